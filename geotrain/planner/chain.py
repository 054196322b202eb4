"""The best cuts and codecs for peers in a given order, by dynamic programming from the end. Pure."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from .exact import Found, found, over_periods
from .problem import Floats, Problem
from .tables import CLOSE, AtPeriod, Tables

JOINING = 6
"""So many of the fastest peers are tried in every place of a plan that runs."""

PLACES = 250
"""Borders times pairs of codecs that are always affordable: all pairs of a short model."""


def along(
    problem: Problem,
    order: Sequence[int],
    known: Found | None = None,
    tolerance: float = 1e-4,
    runs: int = 40,
    high: float = np.inf,
) -> Found | None:
    """The best plan with exactly these peers in this order, or `known` where it is better. None: nothing fits."""
    if len(order) >= problem.borders:
        return known
    tables = Tables(problem.take(order))
    most = max(6 if len(order) <= 8 else 3 if len(order) <= 14 else 2, PLACES // problem.borders)

    k = np.arange(len(order) - 1)
    longest = tables.transfer[0][k, k + 1]

    def sweep(period: float, limit: float, weight: float) -> tuple[float, Found] | None:
        losses = np.where(longest <= period * CLOSE, problem.pair_cost, np.inf).min(axis=(1, 2))
        if losses.sum() > problem.loss_budget:
            return None
        return _sweep(problem, order, tables.at(period, weight, most, path=True), limit)

    return over_periods(tables, sweep, known, tolerance, runs, high)


def nearby(problem: Problem, best: Found, *, longer: bool = True, exchanged: bool = True, passes: int = 4) -> Found:
    """With one peer fewer or one more (`longer`), or with one in the place of another (`exchanged`), until none of them
    is better: a budget for losses leaves gaps that one search does not see into."""
    for _ in range(passes):
        was, order = best, list(best.order)
        others, places = sorted(set(range(problem.size)) - set(order)), range(len(order))
        orders: list[list[int]] = []
        if longer:
            orders += [order[:k] + order[k + 1 :] for k in places if len(order) > 1]
            orders += [[*order[:k], peer, *order[k:]] for peer in others for k in (*places, len(order))]
        if exchanged:
            orders += [[*order[:k], peer, *order[k + 1 :]] for peer in others for k in places]
            orders += [
                [*order[:i], order[j], *order[i + 1 : j], order[i], *order[j + 1 :]] for i, j in combinations(places, 2)
            ]
        for tried in orders:
            best = along(problem, tried, best, tolerance=1e-3, runs=12) or best
        if best is was:
            break
    return best


def neighbours(problem: Problem, now: Found) -> list[Found]:
    """Plans that move little state: `now` with other cuts, without some stages in a row, with one peer more, or with
    one in the place of another."""
    order, size = list(now.order), len(now.order)
    fastest = np.argsort(-problem.speed, kind="stable")[:JOINING]
    orders = [order]
    orders += [order[:i] + order[j:] for i, j in combinations(range(size + 1), 2) if j - i < size]
    orders += [[*order[:k], int(p), *order[k:]] for p in fastest if p not in order for k in range(size + 1)]
    options = [along(problem, tried, tolerance=0.01, runs=8) for tried in orders]
    options += [
        found(problem, [*order[:k], peer, *order[k + 1 :]], list(now.cuts), list(now.codecs))
        for peer in sorted(set(range(problem.size)) - set(order)) for k in range(size)
    ]  # fmt: skip
    return [option for option in options if option is not None and np.isfinite(option.value)]


def resized(problem: Problem, best: Found) -> Found:
    """With any number of peers, if that is better: those left out join by speed, each where raw tensors take least,
    and those there leave, the slowest first. One peer more or fewer may not help where two do."""
    ids, inner = np.arange(problem.size), slice(1, problem.borders - 1)
    rate = problem.network.rates(ids[:, None], ids)
    ahead, back = (float(np.median(sizes[0, inner])) for sizes in (problem.forward_sizes, problem.backward_sizes))
    latency = problem.network.latencies(ids[:, None], ids)
    seconds = ahead / rate + back / rate.T + latency + latency.T
    fast = sorted(range(problem.size), key=lambda i: (-problem.speed[i], i))
    order, orders = list(best.order), list[list[int]]()
    for peer in (peer for peer in fast if peer not in best.order):
        before, after = [0.0, *seconds[order, peer]], [*seconds[peer, order], 0.0]
        between = [0.0, *seconds[order[:-1], order[1:]], 0.0]
        at = int(np.argmin(np.add(before, after) - between))
        order = [*order[:at], peer, *order[at:]]
        orders.append(order)
    for count in range(1, len(best.order)):
        gone = set([peer for peer in fast if peer in best.order][-count:])
        orders.append([peer for peer in best.order if peer not in gone])
    for tried in orders:
        best = along(problem, tried, best, tolerance=1e-3, runs=12) or best
    return best


def _sweep(problem: Problem, order: Sequence[int], at: AtPeriod, limit: float) -> tuple[float, Found] | None:
    """The least fill at a period, if it is below the limit."""
    b, u = problem.borders, len(at.pairs)
    through = np.full((b, u), np.inf)
    through[b - 1, 0] = 0.0
    ways: list[Floats] = []
    for k in reversed(range(len(order))):
        total = np.full((b, u, b, u), np.inf)
        for option in (at.stages[k], at.again[k]):
            if option is not None:
                one = option[0] + through
                total = np.minimum(total, np.where(one <= option[1][:, None, :, None], one, np.inf))
        flat = total.reshape(b, u, b * u)
        chosen = flat.argmin(axis=2)
        ways.append(chosen)
        value = np.take_along_axis(flat, chosen[..., None], axis=2)[..., 0]
        value[value >= limit] = np.inf
        if not np.isfinite(value).any():
            return None
        through = value + at.links[k - 1, k] if k else value
    fill = float(through[0, 0])
    if not np.isfinite(fill):
        return None
    p, pair, cuts, codecs = 0, 0, list[int](), list[tuple[int, int]]()
    for chosen in ways[:0:-1]:
        p, pair = divmod(int(chosen[p, pair]), u)
        cuts.append(p)
        f, g = problem.pairs[at.pairs[pair]]
        codecs.append((int(f), int(g)))
    return fill, found(problem, list(order), cuts, codecs)
