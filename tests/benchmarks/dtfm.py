"""The world of DT-FM (Yuan et al., NeurIPS 2022, arXiv:2206.01288), and a scheduler made as theirs is described.

A plan is a partition of the peers into stages of equal size. Its cost, in their words: the slowest stage's exchange of
gradients, and twice the least open tour over the stages, where going from one to the next costs the slowest pair of the
best matching of their peers. Nothing of it overlaps. It is minimized by a genetic search from random partitions.

The network is that of their released scheduler (`dtfm_world.csv`, MIT license): 10 regions, delays in ms and Gbit/s,
between peers of one region 5 ms and 2 Gbit/s. Delays are charged one way, as their code does. Their run of GPT-3 XL:
64 peers, 8 stages of 3 layers, 8 replicas; a replica sends 0.5 GB of activations over each border in a step, and a
stage has 0.9 GB of gradients.
"""

import csv
from functools import cache
from itertools import combinations, pairwise, permutations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from geotrain.planner.problem import Floats, Network, Problem

LAYERS, STAGES, REPLICAS = 24, 8, 8
PEERS = STAGES * REPLICAS
MICROBATCHES = 32
"""Of one replica in a step. Their cost model has none; with 32, those of 61 thousand tokens are of a sample each."""

ACTIVATION_BYTES = 0.5e9 / MICROBATCHES
LAYER_GRADIENT_BYTES = 0.9e9 * STAGES / LAYERS
LAYER_SECONDS = 0.021
"""One layer of GPT-3 XL, one sample of 2,048 tokens, forward, backward and recomputation, at 40 TFLOP/s: 0.85 TFLOP."""

CITED = {1: 24.2, 50: 7.68}
"""Seconds a step of the plan that their released code found, in an earlier model of ours (its compute is not known to
be the same), by steps between exchanges."""


def world(seed: int, speeds: float = 1.0) -> tuple[Problem, Floats]:
    """The problem and the bytes to exchange up to each border. Peers are in regions drawn at random, and 1 to `speeds`
    times as fast as above."""
    rng = np.random.default_rng(seed)
    names, rate, latency = _regions()
    speed = np.exp(rng.uniform(0, np.log(speeds), PEERS)) if speeds > 1 else np.ones(PEERS)
    where = rng.integers(len(names), size=PEERS)
    free = np.full(PEERS, np.inf)
    border = np.arange(LAYERS + 1.0)
    work = border[None] * LAYER_SECONDS
    nothing = np.zeros((LAYERS + 1, LAYERS + 1))
    crossing = np.full(LAYERS + 1, ACTIVATION_BYTES)
    crossing[[0, -1]] = 0.0
    problem = Problem(
        tuple(f"{names[r]}-{i}" for i, r in enumerate(where)), work, work / 4, np.zeros(PEERS, np.intp), speed,
        np.full(PEERS, 1e18), nothing, nothing, nothing, crossing, crossing,
        Network(free, free, rate, latency, where), MICROBATCHES * REPLICAS,
    )  # fmt: skip
    return problem, border * LAYER_GRADIENT_BYTES


@cache
def _regions() -> tuple[list[str], Floats, Floats]:
    """Names, bytes/s and seconds by pair."""
    with Path(__file__).with_name("dtfm_world.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = sorted({row["src"] for row in rows})
    rate, latency = np.zeros((len(names), len(names))), np.zeros((len(names), len(names)))
    for row in rows:
        i, j = names.index(row["src"]), names.index(row["dst"])
        rate[i, j] = rate[j, i] = float(row["gbit_per_s"]) * 1e9 / 8
        latency[i, j] = latency[j, i] = float(row["delay_ms"]) / 1e3
    return names, rate, latency


class Scheduler:
    """Their search: a population of random partitions, offspring by five-point crossover and one exchange. Theirs has
    a population of 100 and 4,900 offspring."""

    def __init__(self, problem: Problem, population: int = 100, offspring: int = 4900) -> None:
        ids = np.arange(PEERS)
        rate, latency = problem.network.rates(ids[:, None], ids), problem.network.latencies(ids[:, None], ids)
        self._exchange = 2 * (latency + LAYER_GRADIENT_BYTES * LAYERS / STAGES / (REPLICAS * rate))
        np.fill_diagonal(self._exchange, 0.0)
        self._transfer = latency + ACTIVATION_BYTES * MICROBATCHES / rate
        self._population, self._offspring = population, offspring

    def plan(self, seed: int = 0) -> list[tuple[list[int], list[int]]]:
        """Eight pipelines of eight stages, three layers each: (peers, borders between them)."""
        rng = np.random.default_rng(seed)
        pool = [rng.permutation(np.repeat(np.arange(STAGES), REPLICAS)) for _ in range(self._population)]
        costs = [self.cost(p)[0] for p in pool]
        for _ in range(self._offspring):
            a, b = rng.integers(len(pool), size=2)
            child = _crossed(pool[a], pool[b], rng)
            cost, worst = self.cost(child)[0], int(np.argmax(costs))
            if cost < costs[worst]:
                pool[worst], costs[worst] = child, cost
        _, first, matches = self.cost(pool[int(np.argmin(costs))])
        lines = [[peer] for peer in first]
        for match in matches:
            for line in lines:
                line.append(match[line[-1]])
        cuts = [LAYERS * k // STAGES for k in range(1, STAGES)]
        return [(line, cuts) for line in lines]

    def cost(self, stage_of: NDArray[np.intp]) -> tuple[float, list[int], list[dict[int, int]]]:
        """Seconds; the peers of the first stage on the tour; who follows whom from each to the next."""
        groups = [np.flatnonzero(stage_of == k) for k in range(STAGES)]
        sync = max(float(self._exchange[np.ix_(g, g)].sum(axis=1).max()) for g in groups)
        between = np.zeros((STAGES, STAGES))
        matched: dict[tuple[int, int], dict[int, int]] = {}
        for i, j in combinations(range(STAGES), 2):
            between[i, j], there = _bottleneck(self._transfer[np.ix_(groups[i], groups[j])])
            between[j, i] = between[i, j]
            matched[i, j] = {int(groups[i][a]): int(groups[j][b]) for a, b in enumerate(there)}
            matched[j, i] = {b: a for a, b in matched[i, j].items()}
        length, tour = _open_tour(between)
        return sync + 2 * length, [int(i) for i in groups[tour[0]]], [matched[step] for step in pairwise(tour)]


def _crossed(a: NDArray[np.intp], b: NDArray[np.intp], rng: np.random.Generator) -> NDArray[np.intp]:
    """b with five places of a; then two exchanged; stages that are too large give to those that are too small."""
    child = b.copy()
    points = rng.permutation(PEERS)[:5]
    child[points] = a[points]
    i, j = rng.integers(PEERS, size=2)
    child[i], child[j] = child[j], child[i]
    sizes = np.bincount(child, minlength=STAGES)
    for peer in range(PEERS):
        if sizes[child[peer]] > REPLICAS:
            sizes[child[peer]] -= 1
            child[peer] = int(np.flatnonzero(sizes < REPLICAS)[0])
            sizes[child[peer]] += 1
    return child


def _bottleneck(cost: Floats) -> tuple[float, list[int]]:
    """The matching whose slowest pair is fastest, and that pair's cost."""
    values = np.unique(cost)
    low, high = 0, len(values) - 1
    best: list[int] = []
    while low <= high:
        middle = (low + high) // 2
        over = cost > values[middle]
        rows, columns = linear_sum_assignment(over)
        if over[rows, columns].any():
            low = middle + 1
        else:
            best, high = [int(j) for j in columns], middle - 1
    return float(values[low]), best


@cache
def _tours() -> NDArray[np.intp]:
    """All orders of the stages, once each way."""
    return np.array([tour for tour in permutations(range(STAGES)) if tour[0] < tour[-1]])


def _open_tour(cost: Floats) -> tuple[float, list[int]]:
    """The shortest path through all."""
    tours = _tours()
    lengths = cost[tours[:, :-1], tours[:, 1:]].sum(axis=1)
    best = int(lengths.argmin())
    return float(lengths[best]), [int(i) for i in tours[best]]
