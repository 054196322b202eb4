"""geotrain beside `torch.distributed.pipelining` over gloo, on links that the kernel shapes. I/O (root).

Torch gets its best of GPipe and 1F1B, of equal and balanced splits and of two orders of the peers, each tried; geotrain
runs as its users run it (`geotrain coordinator`, `geotrain join`) and chooses by itself: once everything, so that it
may leave peers out, and once with a stage on each peer, as torch has it. Then all run in turns. A step is from one
optimizer step to the next. Torch's training is exact, so its held-out losses are the plain loop's, and its seconds to a
loss are its start and so many of its steps.
"""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from geotrain.data import open_source
from geotrain.models import Gpt, _rotation
from tests import netswarm
from tests.wan import Wan

from .netbench import Run, geotrain_run, need_networks
from .tables import Cell, Table, alternate, ratio
from .worlds import WORLDS, World, first_weights, load_model, plain_loop

EVERY = 10
"""Steps between evaluations of the long run."""


class Setup(NamedTuple):
    """How torch is asked to do it."""

    schedule: str
    split: tuple[int, ...]
    order: tuple[int, ...]

    def __str__(self) -> str:
        return f"torch {self.schedule}, blocks {'+'.join(map(str, self.split))}, peers {''.join(map(str, self.order))}"


def benchmark(short: bool) -> list[Table]:
    need_networks()
    if short:
        return compare("e", steps=2, rounds=1, long=0)
    return [table for name in WORLDS for table in compare(name, steps=3, rounds=5, long=60)]


def compare(name: str, *, steps: int, rounds: int, long: int) -> list[Table]:
    """A world's tables. `steps`: those of torch that count in each run; `long`: steps of the run for the losses."""
    world = WORLDS[name]
    job = world.config(max(long, 1))
    with tempfile.TemporaryDirectory() as temporary, Wan(world.homes, delay_ms=world.delay_ms) as wan:
        folder = Path(temporary)
        first_weights(job, folder / "weights")
        setups = _setups(world, load_model(job, folder / "weights"))
        if rounds == 1:  # nothing to choose from
            setups = setups[:1]
        numbers = itertools.count()

        def theirs(setup: Setup) -> Run:
            return torch_run(wan, world, setup, folder / "weights", steps)

        def ours(stages: bool) -> Run:
            path = folder / f"run{next(numbers)}"
            return geotrain_run(wan, world, path, steps=4 + 2 * steps, warmup=4, stages=stages)

        tried = {setup: theirs(setup) for setup in setups if len(setups) > 1}
        best = min(setups, key=lambda setup: tried[setup].seconds) if tried else setups[0]
        turns = alternate(
            rounds,
            {"ours": lambda: ours(stages=False), "spread": lambda: ours(stages=True), "theirs": lambda: theirs(best)},
        )
        tables = [_steps_table(f"{name}: {world.title}", tried, best, turns)]
        if long:
            run = geotrain_run(wan, world, folder / "long", steps=long, warmup=4, evaluate_every=EVERY, stages=False)
            losses, held_out, _ = plain_loop(job, folder / "weights", long, range(0, long + 1, EVERY))
            median = statistics.median(run.seconds for run in turns["theirs"])
            start = statistics.median(run.start_s for run in turns["theirs"])
            tables.append(_loss_table(f"{name}: {world.title}", run, losses, held_out, start, median))
    return tables


def torch_run(wan: Wan, world: World, setup: Setup, weights: Path, steps: int) -> Run:
    """One warm-up step, then `steps` that count."""
    spec = {
        "job": world.config(1 + steps).model_dump(mode="json"), "weights": str(weights), "split": setup.split,
        "schedule": setup.schedule.lower(), "master": wan.ip(setup.order[0]), "steps": 1 + steps,
    }  # fmt: skip
    start = time.monotonic()
    ranks: list[subprocess.Popen[str]] = []
    ends: list[float] = []
    counted: list[tuple[list[int], list[int]]] = []
    try:
        for rank, peer in enumerate(setup.order):
            words = [sys.executable, "-m", "tests.benchmarks.torch_worker", rank, json.dumps(spec)]
            ranks.append(
                wan.popen(
                    peer,
                    words,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=netswarm.environment(GLOO_SOCKET_IFNAME="eth0", TORCH_CPP_LOG_LEVEL="ERROR"),
                )
            )
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:  # its backward pass ends the step
            ends.append(json.loads(line)["at_s"])
            counted.append(wan.bytes())
        rows: list[dict[str, Any]] = [json.loads(line) for line in ranks[-1].communicate(timeout=60)[0].splitlines()]
        if len(ends) != 1 + steps or len(rows) != 1 + steps:
            raise RuntimeError(f"{setup}: a rank ended too early")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    sent = sum(counted[-1][0]) - sum(counted[0][0])
    return Run(
        (ends[-1] - ends[0]) / steps if steps < 3 else statistics.median(b - a for a, b in itertools.pairwise(ends)),
        sent / steps, ends[0] - start, [row["loss"] for row in rows], {}, "",
    )  # fmt: skip


def _setups(world: World, model: Gpt) -> list[Setup]:
    """GPipe and 1F1B; equal and balanced; peers as they are listed, and so that the slowest are at the two ends, where
    only one boundary crosses their link."""
    peers = sorted(range(len(world.homes)), key=lambda peer: world.homes[peer].up or float("inf"))
    outward = (peers[0], *peers[2:], peers[1])
    splits = dict.fromkeys((_equal(world.layers, len(peers)), _balanced(world, model, len(peers))))
    orders = dict.fromkeys((tuple(range(len(peers))), outward))
    return [Setup(*choice) for choice in itertools.product(("GPipe", "1F1B"), splits, orders)]


def _equal(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(layers * (stage + 1) // stages - layers * stage // stages for stage in range(stages))


def _balanced(world: World, model: Gpt, stages: int) -> tuple[int, ...]:
    """The split whose slowest stage is fastest, by the measured seconds of embedding, block and head."""
    batch = open_source(world.config(1)).train(0, 0)
    turned = _rotation(torch.arange(world.config(1).model.context), model.config.hidden // model.config.heads)
    tokens = model.embedding(batch["tokens"]).detach().requires_grad_()
    parts = (
        lambda: model.embedding(batch["tokens"]),
        lambda: model.blocks[0](tokens, turned),
        lambda: torch.log_softmax(model.head(model.norm(tokens)), -1),
    )
    embedding, block, head = (statistics.median(_seconds(part) for _ in range(9)) for part in parts)

    def slowest(split: Sequence[int]) -> float:
        ends = {0: embedding, stages - 1: head}
        return max(count * block + ends.get(stage, 0.0) for stage, count in enumerate(split))

    every = (s for s in itertools.product(range(1, world.layers), repeat=stages) if sum(s) == world.layers)
    return min(every, key=lambda split: (slowest(split), max(split)))


def _seconds(part: Any) -> float:
    start = time.perf_counter()
    part().sum().backward()
    return time.perf_counter() - start


def _steps_table(title: str, tried: dict[Setup, Run], best: Setup, turns: dict[str, list[Run]]) -> Table:
    ours, spread, theirs = turns["ours"], turns["spread"], turns["theirs"]
    step = statistics.median(run.seconds for run in ours)
    same = min(len(ours[-1].losses), len(theirs[-1].losses))

    def row(what: str, runs: list[Run]) -> tuple[Cell, ...]:
        seconds = [run.seconds for run in runs]
        megabytes = statistics.median(run.sent_bytes for run in runs) / 1e6
        median = statistics.median(seconds)
        return what, len(runs), median, min(seconds), max(seconds), median / step, megabytes, runs[-1].losses[same - 1]

    rows = [row(str(setup), [run]) for setup, run in tried.items()]
    rows += [row(f"{best}, in turns", theirs), row("geotrain, in turns", ours)]
    rows += [row("geotrain, a stage on each peer, in turns", spread)]
    columns = ("run", "runs", "step s", "least", "most", "over geotrain", "MB a step", f"loss of step {same}")
    speedup, even = (ratio([run.seconds for run in theirs], [run.seconds for run in runs]) for runs in (ours, spread))
    notes = [f"geotrain is {speedup:.2f} times as fast as torch's best (median of {len(ours)} rounds)"]
    notes += [f"with a stage on each peer {even:.2f} times"]
    notes += [f"{what}: {runs[-1].note}" for what, runs in (("as it likes", ours), ("a stage on each peer", spread))]
    return Table(f"steps, {title}", columns, rows, notes, {f"step over torch's best, {title}": 1 / speedup})


def _loss_table(
    title: str, run: Run, losses: list[float], held_out: dict[int, float], start: float, step: float
) -> Table:
    last = max(held_out)
    rows: list[tuple[Cell, ...]] = []
    for done, loss in held_out.items():
        ours_s, ours = run.held_out[done]
        theirs_s = start + (done - 1) * step
        reached = next((at for at, value in run.held_out.values() if value <= loss), None)
        rows.append((
            done, losses[done - 1], run.losses[done - 1], loss, ours, ours / loss, theirs_s, ours_s, reached,
        ))  # fmt: skip
    columns = (
        "steps", "training loss, torch", "ours", "held-out loss, torch", "ours ", "ours / torch", "torch seconds",
        "our seconds", "seconds until ours has torch's held-out loss",
    )  # fmt: skip
    note = f"after {last} steps the held-out loss is {run.held_out[last][1] / held_out[last] - 1:+.2%} of torch's"
    return Table(f"losses, {title}", columns, rows, [note])
