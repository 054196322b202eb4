"""Plans against those of simpler ways, by the planner's own model: 48 peers over regions and homes."""

import statistics
import time

import numpy as np

from geotrain.codecs.ladder import RAW, Rung
from geotrain.planner.baselines import baselines
from geotrain.planner.heuristic import search
from geotrain.planner.problem import Network, Problem

from .tables import Table

BLOCKS, MICROBATCHES = 48, 32
BLOCK_FLOPS, BOUNDARY_ELEMENTS = 77e9, 2**20
"""A decoder block of width 1024 on 1,024 tokens, forward and backward; what it hands on."""

LADDER = (Rung("identity", 2.0), *(Rung(f"{ratio:g} to 1", 2.0 / ratio) for ratio in (2, 4, 8, 16)))
"""16 bits a number, and codecs that cost nothing but say what is possible with a ratio that is free."""


def instance(seed: int, peers: int = 48, rungs: tuple[Rung, ...] = (RAW,)) -> Problem:
    """Peers 1 to 20 times 1 TFLOP/s in 8 regions; between regions 8 Mbit/s to 10 Gbit/s (log-uniform) and 5 to 150 ms,
    inside 1 to 10 Gbit/s and 1 ms; every other instance has a quarter of its peers in homes, 20 Mbit/s up and 100
    down. Two pieces a block."""
    rng = np.random.default_rng(seed)
    regions = 8
    rate = np.exp(rng.uniform(np.log(1e6), np.log(1.25e9), (regions, regions)))
    rate[np.diag_indices(regions)] = np.exp(rng.uniform(np.log(1.25e8), np.log(1.25e9), regions))
    latency = np.triu(rng.uniform(0.005, 0.15, (regions, regions)), 1)
    latency += latency.T + np.diag(np.full(regions, 0.001))
    home = (rng.random(peers) < 0.25) & bool(seed % 2)
    pieces = 2 * BLOCKS
    work = BLOCK_FLOPS / 2 * np.arange(pieces + 1.0)[None]
    nothing = np.zeros((pieces + 1, pieces + 1))
    elements = np.full(pieces + 1, float(BOUNDARY_ELEMENTS))
    elements[[0, -1]] = 0.0
    free = np.zeros(pieces + 1)
    return Problem(
        tuple(f"peer{i}" for i in range(peers)), work, work / 3, np.zeros(peers, np.intp),
        1e12 * np.exp(rng.uniform(0, np.log(20), peers)), np.full(peers, 1e15), nothing, nothing, nothing,
        2 * elements, 2 * elements,
        Network(np.where(home, 2.5e6, np.inf), np.where(home, 1.25e7, np.inf), rate, latency,
                rng.integers(regions, size=peers)),
        MICROBATCHES, forward_elements=elements, backward_elements=elements, forward_rest=free, backward_rest=free,
        forward=rungs, backward=rungs,
    )  # fmt: skip


def benchmark(short: bool) -> list[Table]:
    count, deadline_s = (2, 0.2) if short else (20, 1.0)
    return [
        _compared("identity only", LADDER[:1], count, deadline_s),
        _compared("codec ratio free", LADDER, count, deadline_s),
    ]


def _compared(title: str, rungs: tuple[Rung, ...], count: int, deadline_s: float) -> Table:
    """The medians over instances of each way's step over that of ours."""
    ours: list[float] = []
    seconds: list[float] = []
    used: list[int] = []
    others: dict[str, list[float]] = {}
    for seed in range(count):
        problem = instance(seed, rungs=rungs)
        start = time.perf_counter()
        plan = search(problem, deadline_s, 0)
        seconds.append(time.perf_counter() - start)
        assert plan is not None
        ours.append(plan.value)
        used.append(len(plan.order))
        for name, other in baselines(problem, seed).items():
            others.setdefault(name, []).append(np.inf if other is None else other.value)
    ratios = {name: [a / b for a, b in zip(values, ours, strict=True)] for name, values in others.items()}
    best = [min(row) for row in zip(*ratios.values(), strict=True)]
    rows = [(name, statistics.median(r), min(r), max(r)) for name, r in ratios.items()]
    rows.append(("the best of these, each time", statistics.median(best), min(best), max(best)))
    return Table(
        f"48 peers, {count} instances, {title}: step over that of our plan",
        ("plan", "median", "least", "most"), rows,
        [f"Ours: median {statistics.median(ours):.3g} s a step on {statistics.median(used):g} peers, "
         f"planned in {statistics.median(seconds):.2g} s."],
        {f"ours over the best other, {title}": 1 / statistics.median(best)},
    )  # fmt: skip
