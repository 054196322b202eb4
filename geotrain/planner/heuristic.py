# pyright: basic
"""A good plan for many peers: local search over paths of peers, then exact cuts. Pure.

A path is scored without cutting it: at each period of a grid around the one in mind, a peer can carry `caps`, so the
path's period is the first that carries all work, or its slowest link; its fill is what that work and its links take.
All insertions, removals, replacements, moves and reversals are scored at once, and the best is taken until none
helps. Then a stretch of the path is taken out at random and the search goes on, keeping what is better. The paths that
score best are cut exactly (`chain`), and few peers get the exact search with some of the left-out ones (`exact`).
The effort is counted in rounds, not in seconds: the same input gives the same plan.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .bound import Capacity
from .chain import along
from .exact import EXACT_PEERS, Found, better, exact, found
from .problem import Floats, Ints, Problem

MOST_PEERS = 384
"""Of more, the most useful are searched."""

STARTS = (1.0, 1.06, 1.15, 1.3, 1.6)
"""First paths are made for these multiples of the least period that one can be made for."""

STARS = 4
"""For the longer half of these periods, more paths are made around so many peers, far from each other."""

Make = Callable[..., list[int]]
"""From the place of the best score, the changed path."""

EXACT_WORK_PER_S = 4e7
"""Subsets of peers, first peers, first and end borders that the exact search at the end may try in a second: half of
what it manages."""

GRID = np.geomspace(0.86, 1.3, 40)
SHORT = 1e6
"""How much worse than a step anything is that does not carry the model."""


def search(problem: Problem, deadline_s: float, seed: int, near: Sequence[int] = ()) -> Found | None:
    """The best plan found; None if none was. `near`: peers in order, to begin from as well."""
    chosen = useful(problem, near)
    part = problem.take(chosen) if len(chosen) < problem.size else problem
    number = {peer: i for i, peer in enumerate(chosen)}
    start = [number[p] for p in near]
    raw = None
    if len(problem.pairs) > 1:  # a tight loss budget leads paths astray
        raw = _Search(part.uncompressed(), deadline_s / 2, seed).best(start)
        start = start or ([] if raw is None else list(raw.order))
    searching = _Search(part, deadline_s, seed)
    best = searching.best(start)
    if raw is not None:
        best = along(part, raw.order, better(best, raw))
    best = searching.finish(best)
    if best is None:
        return None
    order = [chosen[i] for i in best.order]
    return found(problem, order, list(best.cuts), list(best.codecs))


def paths(problem: Problem, deadline_s: float, seed: int) -> Found | None:
    """Only the local search: a beginning for others."""
    return _Search(problem, deadline_s, seed).best([])


def useful(problem: Problem, near: Sequence[int] = ()) -> list[int]:
    """The peers worth a search, in order: fast, with links and memory."""
    if problem.size <= MOST_PEERS:
        return list(range(problem.size))
    capacity = Capacity(problem)
    period = 4 * capacity.total / float(np.sort(capacity.speed)[-MOST_PEERS:].sum())
    carried = capacity.caps(period)[:, 0]
    net, ahead = problem.network, float(problem.forward_bytes[1:-1].min(initial=0.0))
    slow = ahead / np.minimum(net.up, net.down)
    score = np.where(carried > 0, 1 / capacity.speed + slow / np.maximum(carried, 1e-300), np.inf)
    ranked = np.argsort(score, kind="stable")
    return sorted({*near, *(int(i) for i in ranked[: MOST_PEERS * 2 // 3])})


class _Search:
    def __init__(self, problem: Problem, deadline_s: float, seed: int) -> None:
        self.problem = problem
        self.random = np.random.default_rng(seed)
        self.work = EXACT_WORK_PER_S * deadline_s / problem.borders**2
        self.rounds = max(2, int(deadline_s * 20000 / (problem.size + 100)))
        self.capacity = Capacity(problem)
        ids = np.arange(problem.size)
        net = problem.network
        self.rate = net.rates(ids[:, None], ids)
        half = np.minimum(net.up, net.down) / 2
        shared = np.minimum(self.rate, np.minimum(half[:, None], half[None, :]))
        f, g = problem.pairs.T
        inner = slice(1, max(2, problem.borders - 1))
        ahead = np.median(problem.forward_sizes[:, inner], axis=1)[f]
        back = np.median(problem.backward_sizes[:, inner], axis=1)[g]
        latency = net.latencies(ids[:, None], ids)
        self.latency = latency + latency.T
        self.longest = np.stack([np.maximum(a / shared, z / shared.T) for a, z in zip(ahead, back, strict=True)])
        self.both = np.stack([a / self.rate + z / self.rate.T for a, z in zip(ahead, back, strict=True)])
        self.many = problem.microbatches - 1

    def best(self, near: Sequence[int]) -> Found | None:
        """Rounds of local search from several paths, and exact cuts of the best ones."""
        problem = self.problem
        singles = [found(problem, [i], [], []) for i in np.argsort(-problem.speed, kind="stable")[:8]]
        best: Found | None = None
        for single in singles:
            best = better(best, single)
        first = self._least_period()
        paths = [(period, self._construct(period)) for period in (first * s for s in STARTS)]
        for period in (first * s for s in STARTS[len(STARTS) // 2 :]):
            paths += [(period, self._construct(period, star)) for star in self._stars(period)]
        if near:
            paths.append((first, list(near)))
        pool: dict[tuple[int, ...], float] = {}
        states: list[tuple[float, list[int], float]] = []
        for period, path in paths:
            if not path:
                continue
            for _ in range(2):
                space = _Space(self, period)
                path = space.descend(path)
                period = space.period_of(path)
            score = space.score(path)
            states.append((score, path, period))
            pool[tuple(path)] = score
        states.sort(key=lambda state: state[0])
        for at in range(min(2, len(states))):
            score, path, period = states[at]
            space = _Space(self, period)
            score = space.score(path)
            for turn in range(self.rounds // (1 + at * 2) // 2):
                tried = space.descend(space.kick(path))
                value = space.score(tried)
                if value < score * (1 - 1e-9):
                    score, path = value, tried
                    pool[tuple(path)] = score
                    if not 0.97 < space.period_of(path) / space.period < 1.03:
                        space = _Space(self, space.period_of(path))
                        score = space.score(path)
                elif turn % 8 == 7:
                    space = _Space(self, space.period_of(path) * float(self.random.uniform(0.94, 1.06)))
                    score = space.score(path)
        finals = sorted(pool, key=lambda path: pool[path])[: 2 + self.rounds // 30]
        for path in finals:
            best = along(problem, path, best, tolerance=1e-3, runs=14, high=pool[path] / max(self.many, 1) * 1.2)
        if best is None:  # memory or the loss budget allow less than the scores say
            for path in finals:
                best = along(problem, path, best, tolerance=1e-3, runs=14)
        return best

    def finish(self, best: Found | None) -> Found | None:
        """Few chosen peers: the exact search, with some of those left out."""
        if best is None:
            return best
        chosen = list(best.order)
        most = max(n for n in range(EXACT_PEERS - 2) if n * 2**n <= self.work)
        room = min(most, self.problem.size) - len(chosen)
        if room < 1:
            return along(self.problem, best.order, best, tolerance=1e-5)
        path = np.array(chosen)
        cheapest = np.minimum(self.both[0], self.both[0].T)[path].min(axis=0)
        score = 1 / self.problem.speed + cheapest / self.capacity.total * len(chosen)
        score[path] = np.inf
        more = [int(i) for i in np.argsort(score, kind="stable")[:room]]
        ids = sorted(chosen + more)
        number = {peer: i for i, peer in enumerate(ids)}
        part = self.problem.take(ids)
        again = found(part, [number[i] for i in chosen], list(best.cuts), list(best.codecs))
        whole = exact(part, again)
        if whole is None:
            return best
        return better(best, found(self.problem, [ids[i] for i in whole.order], list(whole.cuts), list(whole.codecs)))

    def _least_period(self) -> float:
        """The least period that a first path can be made for, to a few percent."""
        low = self.capacity.total / float(self.problem.speed.sum())
        high = self.capacity.total / float(self.problem.speed.max())
        for _ in range(7):
            middle = (low * high) ** 0.5
            if self._construct(middle):
                high = middle
            else:
                low = middle
        return high

    def _stars(self, period: float) -> list[Ints]:
        """For the best peers to be near, of those with mostly the same neighbors one: all peers, the nearest and
        fastest first. A fast peer may be at home where links are slow, and no small change leads away from there."""
        caps = self.capacity.caps(period)[:, 0]
        longest, both = _at(self, period, 0.0)
        links = np.where(longest <= period * (1 + 1e-9), both, np.inf)
        np.fill_diagonal(links, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            cost = np.where(caps > 0, caps / self.capacity.speed + links, np.inf)  # (from, to): of a full stage
            order = np.argsort(cost / np.maximum(caps, 1e-300), axis=1, kind="stable")
        carried = np.cumsum(caps[order], axis=1)
        count = (carried < self.capacity.total).sum(axis=1) + 1
        seconds = np.cumsum(np.take_along_axis(cost, order, 1), axis=1)
        rows = np.flatnonzero(count <= len(caps))
        total = seconds[rows, count[rows] - 1]
        stars, found = list[Ints](), list[set[int]]()
        for i in rows[np.argsort(total, kind="stable")]:
            near = {int(j) for j in order[i, : count[i]]}
            if all(2 * len(near & other) < len(near) for other in found):
                stars.append(order[i])
                found.append(near)
            if len(stars) == STARS:
                break
        return stars

    def _construct(self, period: float, ranked: Ints | None = None) -> list[int]:
        """Peers by rank (by speed), each where it lengthens the path least, until they carry the model; empty if they
        do not."""
        caps = self.capacity.caps(period)[:, 0]
        longest, both = _at(self, period, 0.0)
        links = np.where(longest <= period * (1 + 1e-9), both, np.inf)
        path: list[int] = []
        carried = 0.0
        for i in np.argsort(-caps, kind="stable") if ranked is None else ranked:
            if caps[i] <= 0:
                continue
            if not path:
                ends = np.isfinite(links[i]).any()
                if not ends:
                    continue
                path, carried = [int(i)], float(caps[i])
            else:
                here = np.array(path)
                before, after = np.append(np.inf, links[here, i]), np.append(links[i, here], np.inf)
                between = np.concatenate([[0.0], links[here[:-1], here[1:]], [0.0]])
                extra = np.where(np.isinf(before), 0, before) + np.where(np.isinf(after), 0, after) - between
                allowed = np.isfinite(before) & np.isfinite(after)
                allowed[0], allowed[-1] = np.isfinite(after[0]), np.isfinite(before[-1])
                extra = np.where(allowed, extra, np.inf)
                at = int(extra.argmin())
                if not np.isfinite(extra[at]):
                    continue
                path.insert(at, int(i))
                carried += float(caps[i])
            if carried >= self.capacity.total * (1 - 1e-9):
                return path if len(path) < self.problem.borders else []
        return []


def _at(search: _Search, period: float, weight: float) -> tuple[Floats, Floats]:
    """(N, N): the longest transfer, and seconds with latency and loss, at each link's best pair of codecs."""
    if len(search.longest) == 1:
        return search.longest[0], search.both[0] + search.latency
    cost = search.both + weight * search.problem.pair_cost[:, None, None]
    cost = np.where(search.longest <= period * (1 + 1e-9), cost, SHORT + search.longest)
    pair = cost.argmin(axis=0)[None]
    longest, both = (np.take_along_axis(table, pair, 0)[0] for table in (search.longest, search.both))
    loss = search.problem.pair_cost[pair[0]] * weight
    return longest, both + search.latency + loss


class _Space:
    """Paths around one period."""

    def __init__(self, search: _Search, period: float) -> None:
        self.search, self.period, self.many = search, period, search.many
        self.total = search.capacity.total * (1 - 1e-9)
        self.grid: Floats = GRID * period
        self.caps: Floats = search.capacity.caps(self.grid)  # (N, G)
        self.busy: Floats = self.caps / search.capacity.speed[:, None]
        longest, both = _at(search, period, self.many * period)
        self.link, self.floor = both.copy(), longest.copy()
        np.fill_diagonal(self.link, 0.0)
        np.fill_diagonal(self.floor, 0.0)
        self.most = search.problem.borders - 1

    def period_of(self, path: list[int]) -> float:
        here = np.array(path)
        floor = float(self.floor[here[:-1], here[1:]].max(initial=0.0))
        return max(floor, float(self._fill(self.caps[here].sum(axis=0), self.busy[here].sum(axis=0))[0]))

    def score(self, path: list[int]) -> float:
        here = np.array(path)
        floor = self.floor[here[:-1], here[1:]].max(initial=0.0)
        period, fill = self._fill(self.caps[here].sum(axis=0), self.busy[here].sum(axis=0))
        return float(self.many * np.maximum(period, floor) + fill + self.link[here[:-1], here[1:]].sum())

    def _fill(self, caps: Floats, busy: Floats) -> tuple[Floats, Floats]:
        """(..., G) -> the first period that carries all work, and seconds of compute in all stages."""
        enough = caps >= self.total
        g = enough.argmax(axis=-1)
        carries = enough.any(axis=-1)
        g = np.where(carries, g, len(self.grid) - 1)
        held = np.take_along_axis(caps, g[..., None], -1)[..., 0]
        used = np.take_along_axis(busy, g[..., None], -1)[..., 0]
        part = self.total / np.maximum(held, 1e-9 * self.total)
        period = self.grid[g] * np.where(carries, 1.0, part * 1.05)
        return period, used * part

    def descend(self, path: list[int]) -> list[int]:
        """To where no single change helps."""
        score = self.score(path)
        for _ in range(200):
            tried = self._change(path, score)
            if tried is None:
                return path
            value = self.score(tried)
            if value >= score * (1 - 1e-9):
                return path
            path, score = tried, value
        return path

    def kick(self, path: list[int]) -> list[int]:
        """Without a stretch of it, or with two stretches exchanged."""
        random, k = self.search.random, len(path)
        if k < 3:
            return path
        a, length = int(random.integers(k)), int(random.integers(1, max(2, min(6, k // 2)) + 1))
        rest = path[:a] + path[a + length :]
        if random.random() < 0.3:
            at = int(random.integers(len(rest) + 1))
            return rest[:at] + path[a : a + length] + rest[at:]
        if random.random() < 0.5:
            outside = np.setdiff1d(np.arange(len(self.caps)), path)
            if len(outside):
                rest.insert(min(a, len(rest)), int(random.choice(outside)))
        return rest or path

    def _change(self, path: list[int], score: float) -> list[int] | None:
        """The best of all single changes, by estimate; None if none promises to help."""
        here = np.array(path, np.intp)
        k, n = len(path), len(self.caps)
        edge, floor = self.link[here[:-1], here[1:]], self.floor[here[:-1], here[1:]]
        links = float(edge.sum())
        pre = np.concatenate([[0.0], np.maximum.accumulate(floor)])
        post = np.concatenate([np.maximum.accumulate(floor[::-1])[::-1], [0.0]])
        caps, busy = self.caps[here].sum(axis=0), self.busy[here].sum(axis=0)
        outside = np.setdiff1d(np.arange(n), here, assume_unique=False)
        best = score * (1 - 1e-9)
        change: tuple[Make, Any] | None = None

        def consider(value: Floats, make: Make) -> None:
            nonlocal best, change
            if value.size and float(value.min()) < best:
                best = float(value.min())
                change = (make, np.unravel_index(int(value.argmin()), value.shape))

        # entering and leaving links of a place; nothing at the ends
        before = np.concatenate([np.zeros((1, n)), self.link[here]])
        after = np.concatenate([self.link[:, here].T, np.zeros((1, n))])
        before_floor = np.concatenate([np.zeros((1, n)), self.floor[here]])
        after_floor = np.concatenate([self.floor[:, here].T, np.zeros((1, n))])
        edges = np.concatenate([[0.0], edge, [0.0]])
        least = np.concatenate([[post[0]], np.maximum(pre[:-1], post[1:]), [pre[-1]]])  # without the edge at each place
        if k < self.most and len(outside):
            period, fill = self._fill(caps + self.caps[outside], busy + self.busy[outside])
            slowest = np.maximum(least[:, None], np.maximum(before_floor[:, outside], after_floor[:, outside]))
            extra = before[:, outside] + after[:, outside] - edges[:, None]
            consider(
                self.many * np.maximum(slowest, period) + fill + links + extra,
                lambda at, i: [*path[:at], int(outside[i]), *path[at:]],
            )
        if k > 1:
            short_period, short_fill = self._fill(caps - self.caps[here], busy - self.busy[here])
            bridge, bridge_floor = np.zeros(k), np.zeros(k)
            bridge[1:-1] = self.link[here[:-2], here[2:]]
            bridge_floor[1:-1] = self.floor[here[:-2], here[2:]]
            other = np.maximum(
                np.concatenate([[0.0, 0.0], pre[1:-1]])[:k], np.concatenate([post[1:], [0.0]])[:k]
            )  # without both edges of each peer
            gone = links - edges[:-1] - edges[1:]
            consider(
                self.many * np.maximum(np.maximum(other, bridge_floor), short_period) + short_fill + gone + bridge,
                lambda at: [*path[:at], *path[at + 1 :]],
            )
            if len(outside):
                period, fill = self._fill(
                    (caps - self.caps[here])[:, None] + self.caps[outside][None],
                    (busy - self.busy[here])[:, None] + self.busy[outside][None],
                )
                enter, leave = before[:-1][:, outside], after[1:][:, outside]
                slowest = np.maximum(before_floor[:-1][:, outside], after_floor[1:][:, outside])
                slowest = np.maximum(slowest, other[:, None])
                consider(
                    self.many * np.maximum(slowest, period) + fill + gone[:, None] + enter + leave,
                    lambda at, i: [*path[:at], int(outside[i]), *path[at + 1 :]],
                )
        if k > 2 and change is None:
            self._rearrange(path, here, links, floor, edge, caps, busy, consider)
        if change is None:
            return None
        make, at = change
        return make(*map(int, at))

    def _rearrange(
        self, path: list[int], here: Ints, links: float, floor: Floats, edge: Floats, caps: Floats, busy: Floats,
        consider: Callable[[Floats, Make], None],
    ) -> None:  # fmt: skip
        """Reversals of stretches i..j, and moves of stretches of up to three peers."""
        k = len(path)
        period, fill = (float(x) for x in self._fill(caps, busy))
        i, j = np.triu_indices(k, 1)
        left, right = (
            np.where(i > 0, here[i - 1], here[j]),
            np.where(j < k - 1, here[np.minimum(j + 1, k - 1)], here[i]),
        )
        before = np.concatenate([[0.0], edge, [0.0]])
        total = links - before[i] - before[j + 1] + self.link[left, here[j]] + self.link[here[i], right]
        pre = np.concatenate([[0.0, 0.0], np.maximum.accumulate(floor)])
        post = np.concatenate([np.maximum.accumulate(floor[::-1])[::-1], [0.0, 0.0]])
        inside = np.zeros((k, k))
        for a in range(k - 1):
            inside[a, a + 1 :] = np.maximum.accumulate(floor[a:])
        slowest = np.maximum(np.maximum(pre[i], post[j + 1]), inside[i, j])
        slowest = np.maximum(slowest, np.maximum(self.floor[left, here[j]], self.floor[here[i], right]))
        consider(
            self.many * np.maximum(slowest, period) + fill + total,
            lambda m: [*path[: i[m]], *path[i[m] : j[m] + 1][::-1], *path[j[m] + 1 :]],
        )
        for length in (1, 2, 3):
            if k <= length:
                break
            a = np.arange(k - length + 1)
            rest = np.arange(k - length)[None, :]
            rest = here[rest + length * (rest >= a[:, None])]  # (starts, k - length)
            head, tail = here[a][:, None], here[a + length - 1][:, None]
            rest_edge, rest_floor = (table[rest[:, :-1], rest[:, 1:]] for table in (self.link, self.floor))
            r_pre = np.pad(np.maximum.accumulate(rest_floor, axis=1), ((0, 0), (1, 0)))
            r_post = np.pad(np.maximum.accumulate(rest_floor[:, ::-1], axis=1)[:, ::-1], ((0, 0), (0, 1)))
            least = np.concatenate([r_post[:, :1], np.maximum(r_pre[:, :-1], r_post[:, 1:]), r_pre[:, -1:]], axis=1)
            first, last = ((0, 0), (1, 0)), ((0, 0), (0, 1))
            enter, leave = np.pad(self.link[rest, head], first), np.pad(self.link[tail, rest], last)
            slow = np.maximum(np.pad(self.floor[rest, head], first), np.pad(self.floor[tail, rest], last))
            slow = np.maximum(np.maximum(slow, least), inside[a, a + length - 1][:, None])
            gone = rest_edge.sum(axis=1) + np.array([edge[s : s + length - 1].sum() for s in a])
            around = np.pad(rest_edge, ((0, 0), (1, 1)))

            def moved(s: int, at: int, length: int = length) -> list[int]:
                others = path[:s] + path[s + length :]
                return others[:at] + path[s : s + length] + others[at:]

            value = self.many * np.maximum(slow, period) + fill + gone[:, None] - around + enter + leave
            consider(value, moved)
