"""Small changes to a finished plan, each at its exact price. Pure."""

from collections.abc import Iterator

from .exact import Found, found
from .problem import Problem

MOST_PRICES = 2000

ALIKE = 0.005
"""Plans whose values differ by less are equally good, for all that is known of seconds and of what codecs cost."""


def polish(problem: Problem, best: Found, moves: bool = True) -> Found:
    """Other codecs at one boundary, a cut one border on and, where values jump over stages (which the searches only
    estimate), other orders: until none of them helps. Without `moves` only codecs change."""
    left = MOST_PRICES
    better = True
    while better and left > 0:
        better = False
        for order, cuts, codecs in _changes(problem, best, moves):
            left -= 1
            tried = found(problem, order, cuts, codecs)
            if tried.value < best.value * (1 - 1e-9):
                best, better = tried, True
                break
            if left <= 0:
                break
    return best


def lightened(problem: Problem, best: Found) -> Found:
    """The same stages with less compression, as far as that is as good: one codec after the other gives way to one
    that costs the loss less, first where a second buys most. So links that the step does not wait for lose nothing."""
    limit = best.value * (1 + ALIKE)
    while best.price.loss > 0:
        milder = [found(problem, [*best.order], [*best.cuts], codecs) for codecs in _milder(problem, best)]
        alike = [tried for tried in milder if tried.value <= limit]
        if not alike:
            break
        now = best
        best = min(alike, key=lambda tried: (tried.value - now.value) / (now.price.loss - tried.price.loss))
    return best


def _milder(problem: Problem, best: Found) -> Iterator[list[tuple[int, int]]]:
    """With a codec that costs less, in one direction at one boundary."""
    codecs = list(best.codecs)
    for k, (f, g) in enumerate(codecs):
        pairs = [(a, g) for a, rung in enumerate(problem.forward) if rung.cost < problem.forward[f].cost]
        pairs += [(f, b) for b, rung in enumerate(problem.backward) if rung.cost < problem.backward[g].cost]
        for pair in pairs:
            yield [*codecs[:k], pair, *codecs[k + 1 :]]


def _changes(
    problem: Problem, best: Found, moves: bool
) -> Iterator[tuple[list[int], list[int], list[tuple[int, int]]]]:
    order, cuts, codecs = list(best.order), list(best.cuts), list(best.codecs)
    for k in range(len(cuts)):
        for f, g in problem.pairs:
            if (int(f), int(g)) != codecs[k]:
                yield order, cuts, [*codecs[:k], (int(f), int(g)), *codecs[k + 1 :]]
    if not moves:
        return
    if len(problem.pairs) > 1 or problem.routes:
        bounds = [0, *cuts, problem.borders - 1]
        for k in range(len(cuts)):
            for to in (cuts[k] - 1, cuts[k] + 1):
                if bounds[k] < to < bounds[k + 2]:
                    yield order, [*cuts[:k], to, *cuts[k + 1 :]], codecs
    if problem.routes:
        for a in range(len(order)):
            for b in range(a + 1, len(order)):
                swapped = list(order)
                swapped[a], swapped[b] = swapped[b], swapped[a]
                yield swapped, cuts, codecs
        for a in (0, len(order) - 1):
            for peer in set(range(problem.size)) - set(order):
                yield [*order[:a], peer, *order[a + 1 :]], cuts, codecs
