"""A step that no plan can undercut: the certificate. Pure.

Every plan with period at most T uses a set of peers along a path of links that keep to T. It must carry all work, each
peer at most `cap` (whole pieces within T and its memory), so its compute is at least that of a fractional filling. Its
path enters each peer but the first over some link, which takes at least the cheapest one into that peer, `enter`; and
it visits all clusters of peers that it touches, which takes at least the shortest walk through them, of what links
between clusters take beyond `enter`. Hence for all T in (a, b]

    step >= (M - 1) a + min over sets of clusters [ walk + filling at 1 / speed + enter / cap ]

The first peer's `enter` is given back by linear programming duality. A peer alone needs no network: apart. Intervals of
T are halved, the lowest bound first. Any clusters give a valid bound; they are made by single linkage.
"""

import heapq

import numpy as np

from .problem import Floats, Ints, Problem

CLUSTERS = 10
PRECISION = 0.002
"""Intervals of T are halved until their width costs no more than this part of the bound."""

MOST_HALVINGS = 60
DENSE_PEERS = 2000


def lower_bound(problem: Problem, upper: float, halvings: int = MOST_HALVINGS) -> float:
    """Seconds; `upper` is the step of a known plan."""
    bound = _Bound(problem)
    many = problem.microbatches - 1
    alone = bound.alone()
    low = float(bound.total / np.sum(bound.speed))
    high = max(low, (upper - bound.fill(np.inf)) / many if many else low) * (1 + 1e-9) + 1e-12
    if many == 0:
        return min(alone, bound.fill(np.inf), upper)
    heap = [(many * low + bound.fill(high), low, high, bound.fill(high))]
    while halvings:
        value, a, b, fill = heap[0]
        if value >= min(alone, upper) or many * (b - a) <= PRECISION * value:
            break
        heapq.heappop(heap)
        middle = (a + b) / 2
        halvings -= 1
        heapq.heappush(heap, (many * middle + fill, middle, b, fill))
        first = bound.fill(middle)
        heapq.heappush(heap, (many * a + first, a, middle, first))
    # beyond `high` a plan is no better than `upper`
    return min(alone, heap[0][0], upper)


class Capacity:
    """How much work a stage on each peer can carry, in FLOPs of the first kind of peer."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        ratio = np.array([_least_ratio(problem.work[0], row) for row in problem.work])
        self.speed: Floats = problem.speed / ratio[problem.kind]
        """Never below the truth."""
        self.total = float(problem.work[0, -1])
        self.reach = self._memory_reach()

    def _memory_reach(self) -> Ints:
        """(N, B): the last border that a stage from each border can reach in each peer's memory."""
        problem, b = self.problem, self.problem.borders
        live = self.problem.microbatches if problem.schedule == "gpipe" else 1
        plain = problem.state_bytes + live * problem.activation_bytes
        again = problem.state_bytes + problem.activation_bytes + live * problem.received_bytes
        held = np.minimum(plain, again)
        reach = np.zeros((problem.size, b), np.intp)
        for p in range(b - 1):
            envelope = np.minimum.accumulate(held[p, p + 1 :][::-1])[::-1]
            reach[:, p] = p + np.searchsorted(envelope, problem.memory, side="right")
        reach[:, b - 1] = b - 1
        return reach

    def caps(self, periods: Floats | float) -> Floats:
        """(N, periods): the most work that a stage can do in that time and the peer's memory."""
        problem, work, times = self.problem, self.problem.work[0], np.atleast_1d(periods) * (1 + 1e-9)
        best = np.zeros((problem.size, len(times)))
        for kind in range(len(problem.work)):
            until: Floats = problem.work[kind]
            some = np.flatnonzero(problem.kind == kind)
            room, reach = problem.speed[some, None] * times, self.reach[some]
            made = np.zeros_like(room)
            for p in range(problem.borders - 1):
                place: Ints = np.asarray(np.searchsorted(until, until[p] + room, side="right"), np.intp)
                end = np.minimum(place - 1, reach[:, [p]])
                np.maximum(made, work[end] - work[p], out=made)
            best[some] = made
        return best


class _Bound:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.capacity = Capacity(problem)
        self.speed, self.total = self.capacity.speed, self.capacity.total
        inner = slice(1, problem.borders - 1)
        ahead, back = problem.forward_sizes, problem.backward_sizes
        jumps = [r for r in problem.routes if not r.once]
        spans = np.array([[r.made < b <= max(r.readers) for b in range(problem.borders)] for r in jumps])
        for_ward = sum((r.forward_bytes * s for r, s in zip(jumps, spans, strict=True)), np.zeros(problem.borders))
        back_ward = sum((r.backward_bytes * s for r, s in zip(jumps, spans, strict=True)), np.zeros(problem.borders))
        f, g = problem.pairs.T
        least = (
            np.maximum(ahead[f].min(axis=0) - for_ward, 0)[inner].min(initial=np.inf),
            np.maximum(back[g].min(axis=0) - back_ward, 0)[inner].min(initial=np.inf),
        )
        self.ahead, self.back = (float(x) if np.isfinite(x) else 0.0 for x in least)
        self._network()

    def _network(self) -> None:
        """`longest` and `both`, by pair of peers or, for very many of them, by pair of regions."""
        net = self.problem.network
        if net.region is not None and self.problem.size > DENSE_PEERS:
            rate, latency = net.rate, net.latency
            self.member: Ints = net.region
        else:
            ids = np.arange(self.problem.size)
            rate, latency = net.rates(ids[:, None], ids), net.latencies(ids[:, None], ids)
            self.member = ids
        there, home = self.ahead / rate, self.back / rate.T
        self.longest = np.maximum(there, home)
        self.both = there + home + latency + latency.T
        if len(self.member) == len(rate):
            np.fill_diagonal(self.longest, np.inf)
            np.fill_diagonal(self.both, np.inf)
        self.node = np.maximum(np.minimum(self.ahead, self.back) / net.up, np.minimum(self.ahead, self.back) / net.down)
        """An end of the pipeline sends one way and receives the other: the least that its NIC carries."""

    def alone(self) -> float:
        problem = self.problem
        fits = self.capacity.reach[:, 0] >= problem.borders - 1
        seconds = problem.work[problem.kind, -1] / problem.speed
        return problem.microbatches * float(np.min(seconds[fits], initial=np.inf))

    def fill(self, period: float) -> float:
        """The least fill of a plan of two stages or more; infinite where there is none."""
        cap = self.capacity.caps(period)[:, 0]
        usable = self.longest <= period * (1 + 1e-9)
        both = np.where(usable, self.both, np.inf)
        cap = np.where(self.node <= period * (1 + 1e-9), cap, 0.0)
        enter_at = both.min(axis=0, initial=np.inf)
        cap = np.where(np.isfinite(enter_at)[self.member] & (cap > 0), cap, 0.0)
        keep = np.flatnonzero(cap > 0)
        enter_at = both[np.unique(self.member[keep])].min(axis=0, initial=np.inf)
        keep = keep[np.isfinite(enter_at[self.member[keep]])]
        if cap[keep].sum() < self.total * (1 - 1e-9):
            return np.inf
        order = keep[np.argsort(1 / self.speed[keep] + enter_at[self.member[keep]] / cap[keep], kind="stable")]
        enter, capacity = enter_at[self.member[order]], cap[order]
        nodes = np.unique(self.member[keep])
        label, walk = _clusters(both[np.ix_(nodes, nodes)], enter_at[nodes])
        return self._least(
            label[np.searchsorted(nodes, self.member[order])], walk, enter, capacity, 1 / self.speed[order]
        )

    def _least(self, label: Ints, walk: Floats, enter: Floats, cap: Floats, unit: Floats) -> float:
        """Over all sets of clusters: the spanning tree and the filling; peers in order of their cost."""
        count = int(np.log2(len(walk)))
        masks = np.arange(len(walk))
        use = np.isfinite(walk) & (masks > 0)
        room = np.bincount(label, cap, minlength=count)
        use &= ((masks[:, None] >> np.arange(count)) & 1) @ room >= self.total * (1 - 1e-9)
        masks, walk = masks[use], walk[use]
        if not len(masks):
            return np.inf
        best = np.inf
        rough = walk + self.total * float(unit.min())
        cost = unit + enter / cap
        step = max(1, 400_000 // len(cap))
        ranked = np.argsort(rough, kind="stable")
        for start in range(0, len(ranked), step):
            some = ranked[start : start + step]
            if float(rough[some[0]]) >= best:
                break
            member = ((masks[some][:, None] >> label) & 1).astype(np.float64) * cap
            before = np.cumsum(member, axis=1) - member
            taken = np.clip(self.total - before, 0.0, member)
            last = (taken > 0).shape[1] - 1 - np.argmax((taken > 0)[:, ::-1], axis=1)
            price = cost[last]
            gain = np.maximum(price[:, None] - unit, 0) - np.maximum(price[:, None] - cost, 0)
            back = (gain * member).max(axis=1)
            best = min(best, float((walk[some] + taken @ cost - back).min()))
        return best


def _least_ratio(base: Floats, row: Floats) -> float:
    """The least of `row` for a unit of `base`, over the pieces between borders."""
    first, other = np.diff(base), np.diff(row)
    some = first > 0
    return float((other[some] / first[some]).min(initial=np.inf)) if some.any() else 1.0


def _clusters(both: Floats, enter: Floats) -> tuple[Ints, Floats]:
    """(nodes,) each node's cluster, and (2^clusters,) the shortest walk through each set of clusters, of what links
    take beyond entering. Single linkage: the longest edges of a spanning tree of all nodes are cut."""
    with np.errstate(invalid="ignore"):
        beyond = both - enter[None, :]
    directed = np.where(np.isfinite(beyond), beyond, np.inf)
    beyond = np.minimum(directed, directed.T)
    n = len(beyond)
    near, parent = np.full(n, np.inf), np.zeros(n, np.intp)
    outside, here = np.ones(n, bool), 0
    edges: list[tuple[float, int, int]] = []
    outside[0] = False
    for _ in range(n - 1):
        closer = outside & (beyond[here] < near)
        near[closer], parent[closer] = beyond[here, closer], here
        here = int(np.where(outside, near, np.inf).argmin())
        if not outside[here]:
            here = int(np.flatnonzero(outside)[0])
            parent[here] = here
        edges.append((float(near[here]), int(parent[here]), here))
        outside[here] = False
    edges.sort()
    root = list(range(n))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for _, a, b in edges[: max(0, n - CLUSTERS)]:
        root[find(a)] = find(b)
    names = {r: k for k, r in enumerate(dict.fromkeys(find(i) for i in range(n)))}
    label = np.array([names[find(i)] for i in range(n)], np.intp)
    count = len(names)
    between = np.zeros((count, count))
    rows = np.array([directed[label == k].min(axis=0) for k in range(count)])
    for k in range(count):
        between[:, k] = rows[:, label == k].min(axis=1)
    np.fill_diagonal(between, 0.0)
    for via in range(count):
        between = np.minimum(between, between[:, [via]] + between[[via]])
    return label, _walks(between)


def _walks(between: Floats) -> Floats:
    """(2^n,): by set of clusters, the shortest way to visit all of them, by Held and Karp; `between` by (from, to)."""
    count = len(between)
    masks = np.arange(1 << count)
    member = ((masks[:, None] >> np.arange(count)) & 1).astype(bool)
    ways = np.full((len(masks), count), np.inf)
    ways[1 << np.arange(count), np.arange(count)] = 0.0
    sizes = member.sum(axis=1)
    for size in range(2, count + 1):
        for last in range(count):
            some = masks[(sizes == size) & member[:, last]]
            ways[some, last] = (ways[some & ~(1 << last)] + between[:, last]).min(axis=1)
    return ways.min(axis=1)
