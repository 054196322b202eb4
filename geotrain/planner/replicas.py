"""Several pipelines that each hold the whole model, and share a step's microbatches. Pure.

With m_r microbatches of M for pipeline r, and gradients (or weights) exchanged after every H steps, a step takes

    max over r of [ (m_r - 1) T_r + fill_r ]  +  sync / H

Peers that hold the same piece of the model exchange it as `exchange` has it; the slowest peer decides.

The search is over grids, R pipelines of K stages with common cuts (the *aligned* form: a stage's replicas can then be
near each other), by exchanging peers, all of a random batch scored at once. The best grids are then tried with fewer
pipelines, and at last each pipeline may have cuts of its own and leave peers out.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .baselines import best_cuts, shortest, tour
from .exchange import Exchange
from .price import Price, price
from .problem import Floats, Ints, Problem

TRIED, FINAL = 40, 6
"""Of all shapes of a grid so many are improved; then the best ones further."""

BATCH = 96
"""Changes that are scored at once."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Peers in order, borders between them, its share of the microbatches, and what that takes."""

    order: tuple[int, ...]
    cuts: tuple[int, ...]
    microbatches: int
    price: Price


@dataclass(frozen=True, slots=True)
class Replicas:
    """`step_seconds` has the exchange's share in it; `sync_seconds` are those of one exchange. `aligned`: all pipelines
    have the same cuts."""

    pipelines: tuple[Pipeline, ...]
    step_seconds: float
    sync_seconds: float
    aligned: bool


def replicas(
    problem: Problem, sync_bytes: Floats, every: int = 1, *, seed: int = 0, rounds: int = 8, most: int | None = None
) -> Replicas | None:
    """The best number of pipelines, their peers, cuts and shares.

    Args:
        problem: `microbatches` are those of a step, of all pipelines together.
        sync_bytes: (B,) bytes to exchange, from the graph's start to each border.
        every: steps between exchanges.
        rounds: batches of exchanges that are tried for each shape of the grid; ten times as many for the best ones.
        most: at most so many pipelines.

    Returns:
        None where the model fits onto no such set of peers.
    """
    row, exchange = tour(problem), Exchange(problem)
    grids = [_Grid(problem, sync_bytes, every, exchange, r, k, row) for r, k in _shapes(problem, most)]
    rng = np.random.default_rng(seed)
    starts = [(n, s, float(grid.seconds(s[None])[0])) for n, grid in enumerate(grids) for s in grid.starts()]
    each = [min((start for start in starts if start[0] == n), key=lambda start: start[2]) for n in range(len(grids))]
    each.sort(key=lambda start: (start[2], start[0]))
    tried = [(*grids[n].improve(s, rng, rounds), n) for n, s, _ in each[:TRIED]]
    tried.sort(key=lambda t: (t[1], t[2]))
    found: list[Replicas] = []
    for peers, _, number in tried[:FINAL]:
        grid, better, value = _fewer(grids[number], *grids[number].improve(peers, rng, 10 * rounds), rng, 2 * rounds)
        if np.isfinite(value):
            ways = grid.ways(better)
            found += [priced(problem, sync_bytes, every, x, exchange) for x in (ways, _own_cuts(problem, ways)) if x]
    fitting = [f for f in found if np.isfinite(f.step_seconds)]
    return min(fitting, key=lambda f: f.step_seconds, default=None)


Ways = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(peers in order, borders between them) of each pipeline."""


def priced(problem: Problem, sync_bytes: Floats, every: int, ways: Ways, exchange: Exchange | None = None) -> Replicas:
    """What given pipelines take, with the best shares: all finish together, as far as whole microbatches allow."""
    first = [price(problem, order, cuts) for order, cuts in ways]
    periods, fills = (np.array([getattr(p, name) for p in first]) for name in ("period_seconds", "fill_seconds"))
    shares = _shares(periods, fills, problem.microbatches)
    pipelines: list[Pipeline] = []
    for (order, cuts), share in zip(ways, shares, strict=True):
        if share:
            one = price(replace(problem, microbatches=int(share)), order, cuts)
            pipelines.append(Pipeline(tuple(order), tuple(cuts), int(share), one))
    sync_s = sync_seconds(exchange or Exchange(problem), sync_bytes, [(p.order, p.cuts) for p in pipelines])
    slowest = max((p.price.step_seconds for p in pipelines), default=np.inf)
    aligned = len({p.cuts for p in pipelines}) == 1
    return Replicas(tuple(pipelines), slowest + sync_s / every, sync_s, aligned)


def sync_seconds(exchange: Exchange, sync_bytes: Floats, ways: Ways) -> float:
    """One exchange between all holders of the same pieces."""
    if len(ways) < 2:
        return 0.0
    last = len(sync_bytes) - 1
    borders = sorted({0, last}.union(*(cuts for _, cuts in ways)))
    holders = np.array([[order[bisect_right(cuts, piece)] for order, cuts in ways] for piece in borders[:-1]])
    return exchange.total_seconds(np.diff(sync_bytes[borders]), holders)


def _shapes(problem: Problem, most: int | None) -> list[tuple[int, int]]:
    """(pipelines, stages): from one peer to all of them."""
    limit = min(problem.size, problem.microbatches, most or problem.size)
    counts = {r for r in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, limit) if r <= limit}
    depths = {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48}
    return sorted(
        (r, k)
        for r in counts
        for k in depths | {int(part * problem.size) // r for part in (1.0, 0.85, 0.7)}
        if 1 <= k <= min(problem.size // r, problem.borders - 1)
    )


def _fewer(
    grid: "_Grid", peers: Ints, value: float, rng: np.random.Generator, rounds: int
) -> tuple["_Grid", Ints, float]:
    """Without one pipeline, or all that have a peer in the same group of near ones, as long as that helps: the last
    few peers of a far region may cost the exchange more than they compute."""
    while grid.count > 1:
        smaller, fewer = grid.without(peers)
        fewer, less = smaller.improve(fewer, rng, rounds)
        if not less < value * (1 - 1e-9):
            break
        grid, peers, value = smaller, fewer, less
    return grid, peers, value


def _own_cuts(problem: Problem, ways: Ways) -> Ways | None:
    """The same pipelines, each with the cuts that are best for itself alone."""
    share = replace(problem, microbatches=max(1, problem.microbatches // len(ways)))
    own = [best_cuts(share, order) for order, _ in ways]
    return [way for way in own if way is not None] if all(own) else None


def _shares(periods: Floats, fills: Floats, microbatches: int) -> Ints:
    """(R,) periods and fills -> whole shares that sum to all microbatches: each goes where it ends first."""
    shares = np.zeros(len(periods), np.intp)
    for _ in range(microbatches):
        shares[int((fills + shares * periods).argmin())] += 1
    return shares


def _together(periods: Floats, fills: Floats, microbatches: int) -> Floats:
    """(C, R) periods and fills -> (C,) when all end together, with fractions of microbatches."""
    used, end = np.isfinite(fills), np.zeros(len(fills))
    for _ in range(4):
        pace = np.where(used, 1 / np.maximum(periods, 1e-12), 0.0)
        spent = np.where(used, (fills - periods) * pace, 0.0).sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            end = (microbatches + spent) / pace.sum(axis=1)
        used = fills <= end[:, None]
    return np.where(used.any(axis=1), end, np.inf)


class _Grid:
    """R pipelines of K stages. A candidate is an order of all peers: the first R x K fill the grid, pipeline by
    pipeline; the others are left out."""

    def __init__(
        self, problem: Problem, sync_bytes: Floats, every: int, exchange: Exchange, count: int, stages: int,
        row: Sequence[int],
    ) -> None:  # fmt: skip
        self._row, self._exchange = row, exchange
        self.problem, self.sync_bytes, self.every = problem, sync_bytes, every
        self.count, self.stages = count, stages
        self.rate, self.latency = exchange.rate, exchange.latency
        self.share = problem.work[0] / problem.work[0, -1]

    def starts(self) -> list[Ints]:
        """Near peers in a stage; near peers in a pipeline, all of them or the fast ones first; equally fast ones."""
        problem, cells = self.problem, self.count * self.stages
        fast = np.argsort(-problem.speed, kind="stable")
        used, rest = fast[:cells], fast[cells:]
        near = np.array([peer for peer in self._row if peer in set(used)])
        stages = [self._near_stages(fast[:pool]) for pool in {problem.size, max(cells, problem.size // 2)}]
        return [*stages, *(np.concatenate((grid, rest)) for grid in (near, used))]

    def _near_stages(self, pool: Ints) -> Ints:
        """Stage by stage the peers that are nearest to each other of those left in the pool; then stages so that near
        ones follow each other, and in each the fast ones first."""
        both = np.minimum(self.rate, self.rate.T)
        left, groups = np.sort(pool), list[Ints]()
        for _ in range(self.stages):
            near = np.sort(both[np.ix_(left, left)], axis=1)[:, ::-1][:, : self.count]
            seed = left[int((1 / near[:, 1:]).sum(axis=1).argmin())]
            group = left[np.argsort(-both[seed, left], kind="stable")[: self.count]]
            groups.append(group[np.argsort(-self.problem.speed[group], kind="stable")])
            left = np.setdiff1d(left, group)
        between = np.array([[1 / float(both[np.ix_(g, h)].min()) for h in groups] for g in groups])
        grid = np.array(groups)[shortest(between**2)]
        return np.concatenate((grid.T.ravel(), np.setdiff1d(np.arange(self.problem.size), grid)))

    def improve(self, peers: Ints, rng: np.random.Generator, rounds: int) -> tuple[Ints, float]:
        """Two peers exchanged, or a stretch of stages turned round: the best of each batch, as long as that helps."""
        best, value = peers, float(self.seconds(peers[None])[0])
        cells, size, idle = self.count * self.stages, len(peers), 0
        for _ in range(rounds):
            a, b = rng.integers(cells, size=BATCH), rng.integers(size, size=BATCH)
            tries = np.repeat(best[None], BATCH, axis=0)
            rows = np.arange(BATCH)
            tries[rows, a], tries[rows, b] = best[b], best[a]
            for row in rows[BATCH // 2 :]:  # half of them turn a stretch of stages round instead
                i, j = sorted(rng.integers(self.stages, size=2))
                grid = best[:cells].reshape(self.count, self.stages).copy()
                grid[:, i : j + 1] = grid[:, i : j + 1][:, ::-1]
                tries[row, :cells], tries[row, cells:] = grid.ravel(), best[cells:]
            seconds = self.seconds(tries)
            k = int(seconds.argmin())
            if seconds[k] < value * (1 - 1e-9):
                best, value, idle = tries[k], float(seconds[k]), 0
            else:
                idle += 1
            if idle > 12:
                break
        return best, value

    def without(self, peers: Ints) -> tuple["_Grid", Ints]:
        """The best grid of fewer pipelines, without one or a group's, and a candidate for it."""
        cells = self.count * self.stages
        grid = peers[:cells].reshape(self.count, self.stages)
        kept = [~np.eye(self.count, dtype=bool)[k] for k in range(self.count)]
        for labels in self._exchange.groupings[1:]:
            kept += [(labels[grid] != group).all(axis=1) for group in np.unique(labels[grid])]
        found: list[tuple[float, int, _Grid, Ints]] = []
        for count in sorted({int(keep.sum()) for keep in kept} - {0}):
            some = [keep for keep in kept if keep.sum() == count]
            tries = np.array([np.concatenate((grid[k].ravel(), grid[~k].ravel(), peers[cells:])) for k in some])
            smaller = _Grid(self.problem, self.sync_bytes, self.every, self._exchange, count, self.stages, self._row)
            seconds = smaller.seconds(tries)
            best = int(seconds.argmin())
            found.append((float(seconds[best]), count, smaller, tries[best]))
        _, _, smaller, best = min(found, key=lambda one: one[:2])
        return smaller, best

    def seconds(self, peers: Ints) -> Floats:
        """(C, N) -> (C,): the step, windows aside."""
        problem, C = self.problem, len(peers)
        grid = peers[:, : self.count * self.stages].reshape(C, self.count, self.stages)
        bounds = self._bounds(grid)
        work = problem.work[:, bounds]  # (kinds, C, K + 1)
        own = np.diff(work, axis=-1)[problem.kind[grid], np.arange(C)[:, None, None], np.arange(self.stages)]
        compute = own / problem.speed[grid]  # (C, R, K)
        first, end = bounds[:, :-1], bounds[:, 1:]
        held = problem.state_bytes[first, end] + problem.activation_bytes[first, end]
        fits = (held[:, None] <= problem.memory[grid]).all(axis=(1, 2))
        src, dst = grid[:, :, :-1], grid[:, :, 1:]
        ahead = problem.forward_bytes[bounds[:, 1:-1]][:, None] / self.rate[src, dst]
        back = problem.backward_bytes[bounds[:, 1:-1]][:, None] / self.rate[dst, src]
        longest = np.maximum(ahead, back).max(axis=2, initial=0.0)
        periods = np.maximum(compute.max(axis=2), longest)
        fills = compute.sum(axis=2) + (ahead + back + self.latency[src, dst] + self.latency[dst, src]).sum(axis=2)
        slowest = _together(periods, fills, problem.microbatches)
        if self.count > 1:
            pieces = np.diff(self.sync_bytes[bounds], axis=1)
            slowest = slowest + self._exchange.seconds(pieces, grid.transpose(0, 2, 1)) / self.every
        return np.where(fits, slowest, np.inf)

    def _bounds(self, grid: Ints) -> Ints:
        """(C, K + 1): each stage as much of the model as its peers have of the speed, at least one piece."""
        pieces, stages = self.problem.borders - 1, self.stages
        speed = self.problem.speed[grid].sum(axis=1).cumsum(axis=1)
        wanted = speed / speed[:, -1:]
        at = np.abs(self.share[None, None] - wanted[:, :, None]).argmin(axis=2)
        at[:, -1] = pieces
        bounds = np.concatenate((np.zeros((len(at), 1), np.intp), at), axis=1)
        steps = np.arange(stages + 1)
        bounds = np.maximum.accumulate(bounds - steps, axis=1) + steps
        return np.minimum(bounds, pieces - (stages - steps))

    def ways(self, peers: Ints) -> list[tuple[list[int], list[int]]]:
        grid = peers[: self.count * self.stages].reshape(1, self.count, self.stages)
        cuts = [int(border) for border in self._bounds(grid)[0, 1:-1]]
        return [([int(i) for i in row], cuts) for row in grid[0]]
