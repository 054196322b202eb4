"""The best cuts and codecs for peers in a given order, by dynamic programming from the end. Pure."""

from collections.abc import Sequence

import numpy as np

from .exact import Found, found, over_periods
from .problem import Floats, Problem
from .tables import AtPeriod, Tables

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

    def sweep(period: float, limit: float, weight: float) -> tuple[float, Found] | None:
        return _sweep(problem, order, tables.at(period, weight, most), limit)

    return over_periods(tables, sweep, known, tolerance, runs, high)


def nearby(problem: Problem, best: Found) -> Found:
    """With one peer fewer or one more, if that is better: a budget for losses leaves gaps that one search does not see
    into (13 % of a step was the largest)."""
    order, others = list(best.order), set(range(problem.size)) - set(best.order)
    orders = [order, *(order[:k] + order[k + 1 :] for k in range(len(order)) if len(order) > 1)]
    orders += [[*order[:k], peer, *order[k:]] for peer in sorted(others) for k in range(len(order) + 1)]
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
