"""Simpler ways to plan, to compare with: what other systems do, as far as their papers and code say. Pure.

All use every peer, unless there are more than pieces; then the fastest. Orders of peers:

- OP-Fence-like: peers with fast links between them in a row, these groups in a row by the links between them
  (FusionLLM, arXiv:2410.12707);
- DT-FM-like: the least communication in all, an open tour of the peers (Yuan et al. 2022, arXiv:2206.01288);
- as given, and random.

Cuts are equal, or as large as the peers are fast; then codecs are chosen afterwards, one bottleneck after the other,
while that makes the step shorter. Or the best cuts and codecs of that order are taken (`chain`).
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from .chain import along
from .exact import Found, found
from .price import price
from .problem import Floats, Problem

Way = tuple[list[int], list[int]]
"""Peers in order, borders between them."""

_STARTS = 48
"""So many starts of a tour are tried."""

_PERIODS = 12
_SPREAD = 4.0
"""Of a fixed order, so many periods are tried from the least to that many times it."""


def baselines(problem: Problem, seed: int = 0) -> dict[str, Found | None]:
    """Each one's plan, by name; None where it does not fit into the peers' memory."""
    fast = _fastest(problem)
    few = problem.take(fast)
    orders = {
        "given order": list(range(few.size)),
        "OP-Fence-like": fence(few),
        "DT-FM-like": tour(few),
        "random order": [int(i) for i in np.random.default_rng(seed).permutation(few.size)],
    }
    plans: dict[str, Found | None] = {}
    for name, order in orders.items():
        plans[f"{name}, equal cuts"] = compressed(few, equal(few, order))
        plans[f"{name}, proportional cuts"] = compressed(few, proportional(few, order))
        plans[f"{name}, exact cuts"] = along(few, order)
    return {
        name: plan and found(problem, [fast[i] for i in plan.order], list(plan.cuts), list(plan.codecs))
        for name, plan in plans.items()
    }


def _fastest(problem: Problem) -> list[int]:
    """As many as the model has pieces, in the given order."""
    order = np.argsort(-problem.speed, kind="stable")[: problem.borders - 1]
    return sorted(int(i) for i in order)


def equal(problem: Problem, order: Sequence[int]) -> Way:
    pieces, count = problem.borders - 1, len(order)
    return list(order), [round(pieces * k / count) for k in range(1, count)]


def proportional(problem: Problem, order: Sequence[int]) -> Way:
    """Each at least one piece."""
    count, pieces = len(order), problem.borders - 1
    share = np.cumsum(problem.speed[list(order)])
    work = problem.work[0] / problem.work[0, -1]
    cuts: list[int] = []
    for k in range(1, count):
        least = (cuts[-1] if cuts else 0) + 1
        at = int(np.abs(work - share[k - 1] / share[-1]).argmin())
        cuts.append(min(max(at, least), pieces - (count - k)))
    return list(order), cuts


def fence(problem: Problem) -> list[int]:
    """Groups: what stays together when the maximum spanning tree of bandwidths is cut at its widest gap."""
    rate = _rates(problem)
    count = len(rate)
    if count < 3:
        return list(range(count))
    near: Floats = rate[0].copy()
    edges: list[tuple[float, int, int]] = []
    origin, left = np.zeros(count, np.intp), set(range(1, count))
    while left:
        j = max(left, key=lambda i: (near[i], -i))
        edges.append((float(near[j]), int(origin[j]), j))
        left.remove(j)
        closer = rate[j] > near
        near, origin = np.where(closer, rate[j], near), np.where(closer, j, origin)
    heights = sorted(np.log(edge[0]) for edge in edges)
    gaps = [b - a for a, b in pairwise(heights)]
    limit = heights[int(np.argmax(gaps)) + 1]
    group = list(range(count))
    for height, i, j in edges:
        if np.log(height) >= limit:
            old, new = group[j], group[i]
            group = [new if g == old else g for g in group]
    members = [[i for i in range(count) if group[i] == g] for g in sorted(set(group))]
    order = max(members, key=lambda m: float(problem.speed[m].sum()))
    result = sorted(order, key=lambda i: -problem.speed[i])
    rest: list[list[int]] = [m for m in members if m is not order]
    last: list[int] = order
    while rest:
        last = max(rest, key=lambda m: float(rate[np.ix_(last, m)].mean()))
        rest = [m for m in rest if m is not last]
        result += sorted(last, key=lambda i: -problem.speed[i])
    return result


def tour(problem: Problem) -> list[int]:
    """An open tour with the least seconds of raw transfers both ways: nearest neighbor from every start, then parts
    reversed while that helps."""
    ids = np.arange(problem.size)
    inner = slice(1, -1)
    nbytes = float(np.median(problem.forward_bytes[inner])), float(np.median(problem.backward_bytes[inner]))
    there = nbytes[0] / problem.network.rates(ids[:, None], ids) + problem.network.latencies(ids[:, None], ids)
    back = nbytes[1] / problem.network.rates(ids[:, None], ids) + problem.network.latencies(ids[:, None], ids)
    return shortest(there + back.T)


def shortest(cost: Floats) -> list[int]:
    """A short open tour: nearest neighbor from each of the first starts, then parts reversed while that helps."""
    best, least = list(range(len(cost))), np.inf
    for start in range(min(len(cost), _STARTS)):
        path = _reversals(_nearest(cost, start), cost)
        length = float(cost[path[:-1], path[1:]].sum())
        if length < least:
            best, least = path, length
    return best


def _nearest(cost: Floats, start: int) -> list[int]:
    path, left = [start], set(range(len(cost))) - {start}
    while left:
        path.append(min(left, key=lambda j: (cost[path[-1], j], j)))
        left.remove(path[-1])
    return path


def _reversals(path: list[int], cost: Floats) -> list[int]:
    """2-opt. Costs are taken as equal both ways."""
    count = len(path)
    both = (cost + cost.T) / 2
    while count > 2:
        at = np.array(path)
        before = np.concatenate(([0.0], both[at[:-1], at[1:]]))
        i, j = np.triu_indices(count, 1)
        head = np.where(i > 0, both[at[i - 1], at[j]], 0.0) - before[i]
        after = np.where(j + 1 < count, both[at[i], at[(j + 1) % count]] - both[at[j], at[(j + 1) % count]], 0.0)
        gain = head + after
        k = int(gain.argmin())
        if gain[k] >= -1e-12:
            return path
        path = path[: i[k]] + path[i[k] : j[k] + 1][::-1] + path[j[k] + 1 :]
    return path


def best_cuts(problem: Problem, order: Sequence[int]) -> Way | None:
    """The cuts of a fixed order with the shortest step, raw values on the links; a peer may get nothing."""
    ids = [int(i) for i in order]
    seconds = np.stack([np.where(problem.max_windows(i, True) >= 1, problem.seconds(i), np.inf) for i in ids])
    at = np.array(ids)
    rate = problem.network.rates(at[:, None], at)
    latency = problem.network.latencies(at[:, None], at)
    ahead = problem.forward_bytes[None, None] / rate[:, :, None]
    back = problem.backward_bytes[None, None] / rate.T[:, :, None]
    slowest, total = np.maximum(ahead, back), ahead + back + (latency + latency.T)[:, :, None]
    high = float(seconds[:, 0, -1].min(initial=np.inf))
    if not np.isfinite(high):
        high = float(seconds[np.isfinite(seconds)].sum())
    low = float(problem.work[:, -1].min() / problem.speed.sum())
    if _fill(seconds, slowest, total, high) is None:
        high *= 1e6
        if _fill(seconds, slowest, total, high) is None:
            return None
    least, top = low, high
    for _ in range(30):
        middle = (least * top) ** 0.5
        least, top = (least, middle) if _fill(seconds, slowest, total, middle) is not None else (middle, top)
    best: Way | None = None
    value = np.inf
    for period in top * np.geomspace(1, _SPREAD, _PERIODS):
        stages = _fill(seconds, slowest, total, float(period))
        if stages is None:
            continue
        way = [ids[k] for k, _ in stages], [border for _, border in stages[1:]]
        step = price(problem, *way).step_seconds
        if best is None or step < value:
            best, value = way, step
    return best


def _fill(seconds: Floats, slowest: Floats, total: Floats, period: float) -> list[tuple[int, int]] | None:
    """Of all cuts whose parts keep to the period, those with the least fill: (place in the order, first border) of each
    stage."""
    count, borders = len(seconds), seconds.shape[1]
    cost = np.where(seconds <= period * (1 + 1e-9), seconds, np.inf)
    link = np.where(slowest <= period * (1 + 1e-9), total, np.inf)
    fill = np.full((count, borders), np.inf)
    came = np.zeros((count, borders), np.intp)
    source = np.zeros((count, borders), np.intp)
    for k in range(count):
        start = np.full(borders, np.inf)
        before = np.full(borders, -1, np.intp)
        start[0] = 0.0
        if k:
            options = fill[:k] + link[:k, k]
            before[1:] = options.argmin(axis=0)[1:]
            start[1:] = options.min(axis=0)[1:]
        through = start[:, None] + cost[k]
        came[k] = through.argmin(axis=0)
        fill[k] = through[came[k], np.arange(borders)]
        source[k] = before[came[k]]
    last = int(fill[:, -1].argmin())
    if not np.isfinite(fill[last, -1]):
        return None
    stages: list[tuple[int, int]] = []
    border = borders - 1
    while last >= 0:
        first = int(came[last, border])
        stages.append((last, first))
        last, border = int(source[last, border]), first
    return stages[::-1]


def compressed(problem: Problem, way: Way | None) -> Found | None:
    """With codecs where the step waits for a link, the next stronger one each time, while it gets shorter. None if the
    way does not fit."""
    if way is None:
        return None
    order, cuts = way
    codecs = [(0, 0)] * len(cuts)
    best = found(problem, order, cuts, codecs)
    strength = np.argsort([problem.forward_sizes[f].sum() + problem.backward_sizes[g].sum() for f, g in problem.pairs])
    ladder = [(int(f), int(g)) for f, g in problem.pairs[strength[::-1]]]
    for _ in range(len(cuts) * len(ladder)):
        at = best.price
        links = np.maximum(at.forward, at.backward)
        if not len(links) or not np.isfinite(best.value):
            break
        k = int(links.argmax())
        place = ladder.index(best.codecs[k])
        rest = best.codecs[k + 1 :]
        tries = [found(problem, order, cuts, [*best.codecs[:k], pair, *rest]) for pair in ladder[place + 1 :]]
        better = min(tries, key=lambda f: f.value, default=best)
        if better.value >= best.value:
            break
        best = better
    return best if np.isfinite(best.value) else None


def _rates(problem: Problem) -> Floats:
    """Between every two peers, the slower direction."""
    ids = np.arange(problem.size)
    rate = problem.network.rates(ids[:, None], ids)
    rate = np.minimum(rate, rate.T)
    np.fill_diagonal(rate, 0.0)
    return rate
