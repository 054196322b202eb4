"""Plans against exhaustive search, and against their proven lower bounds: 48 to 10,000 peers on one core."""

import statistics
import time

from geotrain.planner.bound import lower_bound
from geotrain.planner.exact import exact
from geotrain.planner.heuristic import search
from geotrain.planner.make import _best
from geotrain.planner.polish import lightened, polish
from tests.pure.test_planner_search import random_problem

from .exhaustive import exhaustive, plans
from .planning import instance
from .tables import Table

BLOCKS = 10
"""Of a model whose plans are all looked at."""


def benchmark(short: bool) -> list[Table]:
    return [_exhaustive(short), _exact(short), _certificates(short)]


def _exhaustive(short: bool) -> Table:
    rows: list[tuple[int, str, int, float, float, float, float]] = []
    for peers in (4, 5) if short else (4, 5, 6, 7, 8):
        for codecs in (False, True):
            over, spent, many = list[float](), list[float](), list[float]()
            for seed in range(2 if short else 20):
                problem = random_problem(seed, peers, BLOCKS, codecs)
                begin = time.process_time()
                made = _best(problem, None, 1.0, 0, [])
                if made is None:
                    continue
                made = lightened(problem, polish(problem, made))
                spent.append(time.process_time() - begin)
                over.append(made.value / exhaustive(problem, made).value)
                many.append(plans(problem))
            rows.append(
                (peers, "three" if codecs else "none", len(over), statistics.fmean(over), max(over),
                 statistics.median(many), statistics.median(spent))
            )  # fmt: skip
    columns = ("peers", "codecs", "instances", "mean", "worst", "plans there are", "seconds of CPU to plan")
    return Table("plans over the best of all orders, subsets, cuts and codecs", columns, rows)


def _exact(short: bool) -> Table:
    """More peers than all plans can be looked at for, nothing compressed: the exact search, and what it takes."""
    over, spent, searched = list[float](), list[float](), list[float]()
    for seed in range(2 if short else 20):
        problem = random_problem(seed, 14, 2 * BLOCKS)
        begin = time.process_time()
        made = exact(problem)
        spent.append(time.process_time() - begin)
        begin = time.process_time()
        rough = search(problem, 1.0, 0)
        searched.append(time.process_time() - begin)
        if made is not None and rough is not None:
            over.append(rough.value / made.value)
    row = (len(over), statistics.median(spent), max(spent), statistics.fmean(over), max(over))
    columns = ("instances", "seconds of CPU, median", "most", "local search over it: mean", "worst")
    return Table("the exact search of 14 peers", columns, [row])


def _certificates(short: bool) -> Table:
    rows: list[tuple[int, int, float, float, float, float]] = []
    sizes = ((48, 0.2, 10), (200, 1.0, 10), (1000, 3.0, 10), (10_000, 20.0, 3))
    for peers, deadline_s, count in ((48, 0.2, 4),) if short else sizes:
        over, search_s, bound_s = list[float](), list[float](), list[float]()
        for seed in range(count):
            problem, begin = instance(seed, peers), time.process_time()
            made = search(problem, deadline_s, 0)
            found = time.process_time()
            assert made is not None
            over.append(made.price.step_seconds / lower_bound(problem, made.price.step_seconds))
            search_s.append(found - begin)
            bound_s.append(time.process_time() - found)
        seconds = statistics.median(search_s), statistics.median(bound_s)
        rows.append((peers, count, statistics.median(over), max(over), *seconds))
    title = "step over its lower bound, nothing compressed"
    columns = ("peers", "instances", "median", "worst", "seconds of CPU to plan", "to prove the bound")
    return Table(title, columns, rows)
