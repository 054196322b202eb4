"""The best pipeline over any subset of a few peers, in any order, by dynamic programming from its end. Pure.

For a period T, `G[S, i, p]` is the least fill of running everything from border p to the end on exactly the peers S,
the first stage on i:

    G[S + i, i, p] = min over q, j of  seconds(i, p, q) + boundary(i, j, q) + G[S, j, q]

where stages, links, NICs and memory keep to T; what lies downstream is known, so the round trip and with it the window
are too. The step is (M - 1) T + G: T's term grows and G falls, so an interval of T whose ends promise nothing better
than what is known is dropped whole. With codecs, G is also by what crosses p, since both boundaries of a stage share
its NIC; a boundary's loss is added as the seconds it costs.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import isqrt

import numpy as np

from .price import Price, price
from .problem import Floats, Ints, Problem
from .tables import AtPeriod, Tables

EXACT_PEERS = 14
TOLERANCE = 1e-6
"""Periods that could improve a step by less are not tried."""

LOSS_FACTORS = tuple(1.3**k for k in range(9))
"""A boundary's loss counts as so many times the seconds it costs: the least of them that keeps to the budget."""

LOSSY_TOLERANCE, LOSSY_RUNS = 1e-3, 24
"""With codecs sweeps take longer and their bound is looser."""

MOST_PAIRS = ((8, 4), (11, 3), (EXACT_PEERS, 2))
"""Up to so many peers, so many pairs of codecs are told apart at once; more where a sweep stays within `LEAST_WORK`."""

LEAST_WORK = 20_000_000
"""Of a sweep: subsets, first peers, first and end borders, and pairs at both."""

SweepAt = Callable[[float, float, float], "tuple[float, Found] | None"]
"""(period, limit, what a whole extra step counts for, in seconds) -> the least fill below the limit, and its plan."""


@dataclass(frozen=True, slots=True)
class Found:
    """Peers in order, borders between them, codecs by boundary, and what that takes."""

    order: tuple[int, ...]
    cuts: tuple[int, ...]
    codecs: tuple[tuple[int, int], ...]
    price: Price

    @property
    def value(self) -> float:
        return self.price.objective


def found(problem: Problem, order: list[int], cuts: list[int], codecs: list[tuple[int, int]]) -> Found:
    return Found(tuple(order), tuple(cuts), tuple(codecs), price(problem, order, cuts, codecs))


def exact(
    problem: Problem, known: Found | None = None, stages: int | None = None, tolerance: float = TOLERANCE
) -> Found | None:
    """The best plan (with exactly so many `stages`), None if nothing fits. `known`: a plan, the better the faster.
    `tolerance`: what may be missing from the optimum."""
    best = known
    for single in range(problem.size):
        if stages in (None, 1):
            best = better(best, found(problem, [single], [], []))
    if problem.size == 1:
        return best
    lossy = len(problem.pairs) > 1
    if lossy:
        best = exact(problem.uncompressed(), best, stages)
    tables = Tables(problem)

    def sweep(period: float, limit: float, weight: float) -> tuple[float, Found] | None:
        return Sweep(tables, period, limit, weight, stages).best()

    return over_periods(tables, sweep, best, max(tolerance, LOSSY_TOLERANCE * lossy), LOSSY_RUNS if lossy else 200)


def over_periods(
    tables: Tables, sweep: SweepAt, best: Found | None, tolerance: float, runs: int, high: float = np.inf
) -> Found | None:
    """The best plan over all periods up to `high`; `sweep` knows the best one for each."""
    problem = tables.problem
    many = problem.microbatches - 1
    work = problem.work[:, -1][problem.kind]
    low = float(1 / np.sum(problem.speed / work))
    fill = float((work / problem.speed).min())
    order = count()
    longest = tables.transfer[0]
    high = min(high, float(tables.seconds[:, 0, -1].max() + longest.max(initial=0.0, where=np.isfinite(longest))))
    if best is not None and np.isfinite(best.value) and many:
        high = min(high, (best.value - fill) / many)
    heap = [(many * low + fill, next(order), low * (1 - 1e-9), high, fill)]
    while heap and runs:
        bound, _, start, end, least = heapq.heappop(heap)
        top = np.inf if best is None else best.value
        if bound >= top * (1 - tolerance) or end <= start:
            continue
        runs -= 1
        extra_step_s, limit = many * start + least, top - many * start
        pipeline = sweep(end, limit, extra_step_s)
        if pipeline is None:
            continue
        cost, plan = pipeline
        if not np.isfinite(plan.value):
            plan = _within_budget(problem, sweep, end, limit, extra_step_s)
        period, filled = end, 0.0
        if plan is not None:
            best = better(best, plan)
            period, filled = min(end, plan.price.period_seconds), plan.price.fill_seconds
        if many == 0:
            continue
        # at its own period a plan may have to recompute, and fill longer than was promised: then another may be better
        again = filled > cost * (1 + 1e-9) and period < end * (1 - 1e-6)
        least, end = max(least, cost), period if again else period * (1 - 1e-7)
        middle = (start + end) / 2
        for a, b in ((start, middle), (middle, end)):
            heapq.heappush(heap, (many * a + least, next(order), a, b, least))
    return best if best is not None and np.isfinite(best.value) else None


def _within_budget(problem: Problem, sweep: SweepAt, period: float, limit: float, extra_step_s: float) -> Found | None:
    """The plan of the least factor whose plan is within the loss budget; so are those of larger ones."""
    low, high, best = 1, len(LOSS_FACTORS) - 1, None
    k = high
    while low <= high:
        factor = LOSS_FACTORS[k]
        pipeline = sweep(period, limit + (factor - 1) * extra_step_s * problem.loss_budget, factor * extra_step_s)
        if pipeline is not None and np.isfinite(pipeline[1].value):
            best, high = pipeline[1], k - 1
        elif best is None:
            return None
        else:
            low = k + 1
        k = (low + high) // 2
    return best


def better(a: Found | None, b: Found) -> Found | None:
    """The first one if they are equal; None if neither can run."""
    if not np.isfinite(b.value):
        return a
    return b if a is None or b.value < a.value else a


class Sweep:
    """All subsets at one period. `limit`: fills from there on do not matter."""

    def __init__(self, tables: Tables, period: float, limit: float, weight: float, stages: int | None) -> None:
        self.problem = tables.problem
        n = self.problem.size
        least = next(pairs for peers, pairs in MOST_PAIRS if n <= peers)
        most = max(least, isqrt(LEAST_WORK // (n * 2**n * self.problem.borders**2)))
        self.at: AtPeriod = tables.at(period, weight, most)
        self.limit, self.stages = limit, stages
        self.alone = self.problem.kind.max(initial=0) == 0
        self.layers: list[tuple[Ints, Floats]] = []

    def best(self) -> tuple[float, Found] | None:
        """The least fill and its plan; None if there is none below the limit."""
        n, winner = self.problem.size, (np.inf, 0, 0, 0)
        most = min(n, self.problem.borders - 1, self.stages or n)
        limit = self.limit
        for size in range(1, most + 1):
            layer = self._first() if size == 1 else self._next()
            if layer is None:
                break
            self.layers.append(layer)
            whole = layer[1][:, :, 0, 0]
            if self.stages in (None, size):
                at = int(whole.argmin())
                value = float(whole.flat[at])
                if value < winner[0]:
                    winner = (value, size, at // n, at % n)
                    self.limit = min(self.limit, value)
        self.limit = limit
        if not np.isfinite(winner[0]) or winner[0] >= limit:
            return None
        return winner[0], self._trace(*winner[1:])

    def _first(self) -> tuple[Ints, Floats] | None:
        n = self.problem.size
        last = self.problem.borders - 1
        u = len(self.at.pairs)
        values = np.full((n, n, last + 1, u), np.inf)
        for i in range(n):
            end = np.full((1, last + 1, u), np.inf)
            end[0, last, 0] = 0.0
            values[i, i] = self._before(i, end)[0]
        return self._prune(1 << np.arange(n), values)

    def _next(self) -> tuple[Ints, Floats] | None:
        masks, values = self.layers[-1]
        n = self.problem.size
        parts: list[tuple[Ints, int, Floats]] = []
        for i in range(n):
            rows = np.flatnonzero((masks >> i) & 1 == 0)
            if not len(rows):
                continue
            through = self._through(i, values[rows])
            rows_left = np.flatnonzero(np.isfinite(through).any(axis=(1, 2)))
            if not len(rows_left):
                continue
            made = self._before(i, through[rows_left])
            parts.append((masks[rows[rows_left]] | (1 << i), i, made))
        if not parts:
            return None
        children = np.unique(np.concatenate([part[0] for part in parts]))
        shape = (len(children), n, *values.shape[2:])
        layer = np.full(shape, np.inf)
        for child, i, made in parts:
            layer[np.searchsorted(children, child), i] = made
        return self._prune(children, layer)

    def _through(self, i: int, values: Floats) -> Floats:
        """(rows, B, U): from the end of a stage on peer i, over the best next stage."""
        best = np.full((len(values), *values.shape[2:]), np.inf)
        for j in range(values.shape[1]):
            if j != i and np.isfinite(self.at.links[i, j]).any():
                np.minimum(best, values[:, j] + self.at.links[i, j], out=best)
        best[best >= self.limit] = np.inf
        return best

    def _before(self, i: int, through: Floats) -> Floats:
        """Puts a stage on peer i before: `through` (rows, B, U) by its end -> the same by its first border."""
        rows, b, u = through.shape
        made = np.full((rows, b, u), np.inf)
        options = [option for option in (self.at.stages[i], self.at.again[i]) if option is not None]
        for seconds, rtt in options:
            for p in range(b - 1):
                here = seconds[p, : 1 if p == 0 else u]  # (U, ends, U)
                ends = np.flatnonzero(np.isfinite(here).any(axis=(0, 2)))
                if not len(ends):
                    continue
                a, z = int(ends[0]), int(ends[-1]) + 1
                total = through[:, None, a:z] + here[None, :, a:z]
                longest = rtt[p, a:z]
                if (longest < self.limit).any():
                    total = np.where(total <= longest[None, None, :, None], total, np.inf)
                best = made[:, p, : len(here)]
                np.minimum(best, total.min(axis=(2, 3)), out=best)
        made[made >= self.limit] = np.inf
        return made

    def _prune(self, masks: Ints, values: Floats) -> tuple[Ints, Floats] | None:
        """Drops what cannot be completed below the limit, or within the period by the peers that are left."""
        problem = self.problem
        if self.alone:
            before = problem.work[0]
            values[values + (before / problem.speed.max())[None, None, :, None] >= self.limit] = np.inf
            bits = (masks[:, None] >> np.arange(problem.size)) & 1
            room = (problem.speed.sum() - bits @ problem.speed) * self.at.period * (1 + 1e-9)
            values[np.broadcast_to((before[None] > room[:, None])[:, None, :, None], values.shape)] = np.inf
        alive = np.isfinite(values).any(axis=(1, 2, 3))
        return (masks[alive], values[alive]) if alive.any() else None

    def _trace(self, size: int, row: int, peer: int) -> Found:
        """Finds again what each minimum was made of."""
        order, cuts, codecs = [peer], list[int](), list[tuple[int, int]]()
        masks, values = self.layers[size - 1]
        mask, p, pair = int(masks[row]), 0, 0
        value = float(values[row, peer, 0, 0])
        for level in range(size - 2, -1, -1):
            masks, values = self.layers[level]
            mask &= ~(1 << peer)
            row = int(np.searchsorted(masks, mask))
            onward = values[row] + self.at.links[peer]
            onward[peer] = np.inf
            through = onward.min(axis=0)
            total = np.full(through.shape, np.inf)
            for option in (self.at.stages[peer], self.at.again[peer]):
                if option is not None:
                    one = option[0][p, pair] + through
                    total = np.minimum(total, np.where(one <= option[1][p][:, None], one, np.inf))
            q, after = divmod(int(np.abs(total - value).argmin()), through.shape[-1])
            peer = int(onward[:, q, after].argmin())
            value = float(values[row, peer, q, after])
            p, pair = q, after
            order.append(peer)
            cuts.append(q)
            f, g = self.problem.pairs[self.at.pairs[after]]
            codecs.append((int(f), int(g)))
        return found(self.problem, order, cuts, codecs)
