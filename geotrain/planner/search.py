"""The best contiguous pipeline over given peers, by dynamic programming from its end. Pure.

    best[S, q][i] = min over j, r of  cost(q, |S|)[i, j] + crossing(q, r)[j] + best[S - q, r][j]

is the least cost of running everything from border i to the end on exactly the peers S, the first stage on q
and the next one on r; `+` is either a sum or a maximum. |S| is the number of stages from this one to the end,
which is its 1F1B window. All orders and all cuts are covered, so the result is exact.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
StageCosts = Callable[[int, int], Floats]
"""(peer, stages from here to the end) -> cost by (first border, end border), infinite where it may not be."""
Crossing = Callable[[int, int], Floats]
"""(peer, next peer) -> cost by border between them."""
Peers = frozenset[int]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The best ways to run from border i to the end with `peer` first, for all i."""

    peer: int
    value: Floats
    end: NDArray[np.intp]
    """Where its stage ends, by i."""
    after: NDArray[np.intp]
    """Which of `rest` comes next, by the border where the stage ends."""
    rest: "Sequence[Pipeline]"

    def stages(self, border: int = 0) -> list[tuple[int, int, int]]:
        """(peer, first border, end border) of each stage."""
        end = int(self.end[border])
        here = (self.peer, border, end)
        return [here, *(self.rest[int(self.after[end])].stages(end) if self.rest else [])]


class Search:
    """`total` is `np.maximum` to minimize the largest cost, `np.add` to minimize their sum."""

    def __init__(self, costs: StageCosts, crossing: Crossing, total: "np.ufunc") -> None:
        self._costs, self._crossing, self._total = costs, crossing, total

    def extend(self, peer: int, count: int, rest: Sequence[Pipeline]) -> Pipeline:
        """Puts `peer` before the pipelines `rest`, which have `count - 1` stages."""
        costs = self._costs(peer, count)
        if not rest:
            last = costs.shape[1] - 1
            ends = np.full(len(costs), last, dtype=np.intp)
            return Pipeline(peer, costs[:, last], ends, ends, ())
        options = np.stack([self._total(self._crossing(peer, r.peer), r.value) for r in rest])
        after = options.argmin(axis=0)
        through = self._total(costs, options.min(axis=0))
        end = through.argmin(axis=1)
        return Pipeline(peer, through[np.arange(len(end)), end], end, after, rest)

    def in_any_order(self, peers: Peers, most: int) -> dict[Peers, Pipeline]:
        """The best pipeline on every subset of at most `most` of `peers`, each peer of it used."""
        found: dict[Peers, list[Pipeline]] = {frozenset(): []}
        for size in range(1, most + 1):
            for smaller in [subset for subset in found if len(subset) == size - 1]:
                for peer in sorted(peers - smaller):
                    subset = smaller | {peer}
                    if subset not in found:
                        found[subset] = [self.extend(q, size, found[subset - {q}]) for q in sorted(subset)]
        return {subset: _best(pipelines) for subset, pipelines in found.items() if subset}

    def in_order(self, peers: Sequence[int], sizes: Iterable[int]) -> dict[Peers, Pipeline]:
        """The best pipeline on the first n of `peers`, in that order, for each n in `sizes`."""
        found: dict[Peers, Pipeline] = {}
        for size in sizes:
            rest: list[Pipeline] = []
            for count, peer in enumerate(reversed(peers[:size]), 1):
                rest = [self.extend(peer, count, rest)]
            found[frozenset(peers[:size])] = rest[0]
        return found


def _best(pipelines: Sequence[Pipeline]) -> Pipeline:
    return min(pipelines, key=lambda pipeline: float(pipeline.value[0]))
