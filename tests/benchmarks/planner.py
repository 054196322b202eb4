"""Plans against exhaustive search, and against their proven lower bounds: 48 to 1,000 peers on one core."""

import statistics
import time

from geotrain.planner.bound import lower_bound
from geotrain.planner.exact import exact
from geotrain.planner.heuristic import search
from tests.pure.test_planner_search import everything, random_problem

from .planning import instance
from .tables import Table


def benchmark(short: bool) -> list[Table]:
    return [_exhaustive(short), _certificates(short)]


def _exhaustive(short: bool) -> Table:
    rows: list[tuple[str, int, float, float]] = []
    for codecs in (False, True):
        over: list[float] = []
        for seed in range(10 if short else 100):
            problem = random_problem(seed, 3 if codecs else 4, 3 if codecs else 4, codecs)
            made = exact(problem)
            if made is not None:
                over.append(made.value / everything(problem))
        rows.append(("three" if codecs else "none", len(over), statistics.fmean(over), max(over)))
    title = "plans over the best of all orders, subsets, cuts and codecs"
    return Table(title, ("codecs", "instances", "mean", "worst"), rows)


def _certificates(short: bool) -> Table:
    rows: list[tuple[int, int, float, float, float]] = []
    for peers, deadline_s in ((48, 0.2), (200, 1.0), (1000, 3.0))[: 1 if short else 3]:
        over, spent = list[float](), list[float]()
        for seed in range(4 if short else 10):
            problem, begin = instance(seed, peers), time.process_time()
            made = search(problem, deadline_s, 0)
            spent.append(time.process_time() - begin)
            if made is not None:
                over.append(made.price.step_seconds / lower_bound(problem, made.price.step_seconds))
        rows.append((peers, len(over), statistics.median(over), max(over), statistics.median(spent)))
    title = "step over its lower bound, nothing compressed"
    return Table(title, ("peers", "instances", "median", "worst", "seconds of CPU"), rows)
