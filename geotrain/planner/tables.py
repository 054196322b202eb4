"""What stages and boundaries cost if no part may take longer than a period, as arrays for the searches. Pure."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .problem import Floats, Ints, Problem

CLOSE = 1 + 1e-9
"""Rounding never decides whether something keeps to a period."""


class Tables:
    """All peers of a problem with its network by pair; what does not depend on the period.

    A *pair* is a pair of codecs of a boundary, a number in `Problem.pairs`.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        n = problem.size
        net = problem.network
        ids = np.arange(n)
        self.rate: Floats = net.rates(ids[:, None], ids[None, :])
        self.latency: Floats = net.latencies(ids[:, None], ids[None, :])
        self.seconds: Floats = np.stack([problem.seconds(i) for i in range(n)])
        self.again: Floats = np.stack([problem.again_seconds(i) for i in range(n)])
        _, first, same = np.unique(problem.memory, return_index=True, return_inverse=True)
        self.plain: Floats = np.stack([problem.max_windows(int(i), False) for i in first])[same]
        self.recompute: Floats = np.stack([problem.max_windows(int(i), True) for i in first])[same]
        f, g = problem.pairs.T
        self.ahead: Floats = problem.forward_sizes[f]
        self.back: Floats = problem.backward_sizes[g]

    @cached_property
    def transfer(self) -> tuple[Floats, Floats]:
        """(N, N, B, P): the longer direction, and both with their latencies: from the first peer to the second."""
        there = self.ahead.T[None, None] / self.rate[:, :, None, None]
        home = self.back.T[None, None] / self.rate.T[:, :, None, None]
        latency = (self.latency + self.latency.T)[:, :, None, None]
        return np.maximum(there, home), there + home + latency

    def at(self, period: float, weight: float, most_pairs: int, path: bool = False) -> "AtPeriod":
        """`weight`: seconds that a whole extra step counts for. In a `path` each peer sends to the next one only."""
        problem = self.problem
        longest, total = self.transfer
        links = np.where(longest <= period * CLOSE, total + weight * problem.pair_cost, np.inf)
        k = np.arange(problem.size - 1)
        used = _useful(links[k, k + 1] if path else links, most_pairs)
        links = links[..., used]
        ahead, back = self.ahead[used].T, self.back[used].T  # (B, U)
        late, early = problem.receiver_seconds[used].T, problem.sender_seconds[used].T
        limit = period * CLOSE
        stages: list[tuple[Floats, Floats]] = []
        again: list[tuple[Floats, Floats] | None] = []
        codec = late[:, :, None, None] + early[None, None]
        for i in range(problem.size):
            up, down = problem.network.up[i] * limit, problem.network.down[i] * limit
            fits = (back[:, :, None, None] + ahead[None, None] <= up) & (
                ahead[:, :, None, None] + back[None, None] <= down
            )

            def stage(seconds: Floats, windows: Floats, fits: NDBools = fits) -> tuple[Floats, Floats]:
                whole = seconds[:, None, :, None] + codec
                allowed = fits & (whole <= limit) & (windows >= 1)[:, None, :, None]
                longest_rtt = np.where(windows >= problem.microbatches, np.inf, windows * limit)
                return np.where(allowed, whole, np.inf), longest_rtt

            stages.append(stage(self.seconds[i], self.plain[i]))
            tight = (self.plain[i] < problem.microbatches) & (self.recompute[i] > self.plain[i])
            again.append(stage(self.seconds[i] + self.again[i], self.recompute[i]) if tight.any() else None)
        return AtPeriod(period, np.array(used, np.intp), links, stages, again)


NDBools = np.ndarray


@dataclass(frozen=True)
class AtPeriod:
    """`links` (N, N, B, U): seconds and loss of a boundary, infinite where too slow. Of each peer `stages`: seconds
    (B, U, B, U) by first border, its pair, end border, its pair; and the longest round trip (B, B) that memory
    allows; `again` the same with recompute, None where it never helps. `pairs` (U,) are the pairs considered."""

    period: float
    pairs: Ints
    links: Floats
    stages: list[tuple[Floats, Floats]]
    again: list[tuple[Floats, Floats] | None]


def _useful(links: Floats, most: int) -> list[int]:
    """The raw pair, and those with which most is won over all links and borders, one after the other. To be able to
    use a link at all counts more than anything."""
    seconds = links[..., 1:-1, :].reshape(-1, links.shape[-1])
    seconds = seconds[np.isfinite(seconds).any(axis=1)]
    never = 10 * float(seconds.max(initial=0.0, where=np.isfinite(seconds)))
    seconds = np.where(np.isfinite(seconds), seconds, never)
    used, least = [0], seconds[:, 0]
    while len(used) < most:
        won = np.maximum(least[:, None] - seconds, 0.0).sum(axis=0)
        pair = int(won.argmax())
        if won[pair] <= 0:
            break
        used.append(pair)
        least = np.minimum(least, seconds[:, pair])
    return sorted(used)
