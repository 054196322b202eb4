"""The network or a peer changes while a real run goes on: how often the plan changes, and what a step takes then. I/O.

Four peers on this machine act out the speeds, rates and delays of a file that changes meanwhile. A link that the plan
uses drops to a tenth, or a peer gets three times slower, and both come back; and all of them tremble by 10%.
"""

import asyncio
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import torch

from geotrain import config, events, loops
from geotrain.base import Plan
from geotrain.coordinator import Coordinator
from geotrain.data import BatchSource
from geotrain.facts import Recorder
from geotrain.graph import capture
from geotrain.local import LocalPeer, LocalPeers, TopologyFile, train_with
from geotrain.weights import WeightStore, save_module

from . import acted
from .tables import Cell, Table

NAMES = ("anna", "ben", "cleo", "dora")
STAGES, MICROBATCHES, ROWS, WIDTH, LAYERS = 3, 4, 256, 256, 9
DUTY, MBIT = 0.5, 200.0
SPARE_DUTY, SPARE_MBIT = 0.35, 40.0
"""Of the last peer, and of all links that do not join neighbors: what is left is missed, and worth going back to."""

WARM, CHANGED = 30, 50
"""Steps before a change, and after it."""

BACK = {"link": 180, "peer": 60}
"""Steps after it has come back: links that are not in use are tried each minute, peers without a stage all 10 s."""

LAST = 12
"""So many steps, at the end, are what a step takes."""

Pair = tuple[str, str]
Network = Callable[[Plan], str]
"""A topology file, for the plan that the run began with."""


def benchmark(short: bool) -> list[Table]:
    torch.set_num_threads(1)
    rows: list[tuple[Cell, ...]] = []
    worst = 0.0
    changes = {"link": ("a link drops to a tenth", _slow_link), "peer": ("a peer gets three times slower", _slow_peer)}
    for kind, (name, network) in list(changes.items())[: 1 if short else None]:
        networks = [network] if short else [network, _usual]
        bounds = [WARM, WARM + CHANGED, WARM + CHANGED + BACK[kind]][: 1 + len(networks)]
        plans, seconds, files = _run(networks, bounds[-1])
        for what, file, (start, end) in zip((name, "it comes back"), files, pairwise(bounds), strict=False):
            step_s = statistics.median(seconds[end - LAST : end])
            _, fresh, _ = _run([], LAST + 5, file)
            over = step_s / statistics.median(fresh[-LAST:])
            worst = max(worst, over)
            rows.append((what, sum(start < at <= end for at in plans), step_s, over))
    trembling = 40 if short else 200
    plans, seconds, _ = _run([_trembling(i) for i in range(trembling // 5)], trembling, every=5)
    rows.append((f"10% up and down, {trembling} steps", len(plans), statistics.median(seconds), None))
    columns = ("change", "plans after it", "s a step", "over a new run")
    title = f"{len(NAMES)} real peers, {STAGES} of them in the plan"
    return [Table(title, columns, rows, ratios={"a step after a change, over one of a new run": worst})]


def _toml(slow: Mapping[str | Pair, float] | None = None) -> str:
    """The network; what is `slow` (a peer, or two peers whose links are) is so by a factor."""
    factors, lines = slow or {}, list[str]()
    for name in NAMES:
        duty = SPARE_DUTY if name == NAMES[-1] else DUTY
        lines += ["[[peer]]", f'name = "{name}"', f"duty = {duty / factors.get(name, 1.0)}"]
    for src in NAMES:
        for dst in NAMES:
            if src != dst:
                neighbors = {src, dst} in ({*NAMES[:2]}, {*NAMES[1:3]})
                rate = (MBIT if neighbors else SPARE_MBIT) / factors.get((min(src, dst), max(src, dst)), 1.0)
                lines += ["[[link]]", f'src = "{src}"', f'dst = "{dst}"', f"mbit_per_s = {rate}", "latency_ms = 2"]
    return "\n".join(lines)


def _usual(plan: Plan) -> str:
    return _toml()


def _slow_link(plan: Plan) -> str:
    a, b = sorted(stage.peer for stage in plan.stages[:2])
    return _toml({(a, b): 10.0})


def _slow_peer(plan: Plan) -> str:
    return _toml({plan.stages[1].peer: 3.0})


def _trembling(seed: int) -> Network:
    noise = random.Random(seed)
    parts: list[str | Pair] = [*NAMES, *((a, b) for a in NAMES for b in NAMES if a < b)]
    return lambda plan: _toml({part: noise.uniform(0.9, 1.1) for part in parts})


def _run(
    networks: list[Network], steps: int, first: str | None = None, every: int = CHANGED
) -> tuple[list[int], list[float], list[str]]:
    """A run in which one network after the other takes the place of the `first`, `every` so many steps, from step
    `WARM` on. Returns after which steps the plan changed, the seconds of each step, and the networks."""
    data = BatchSource([{name: torch.randn(MICROBATCHES * ROWS, WIDTH) for name in ("x", "y")}], MICROBATCHES)
    net = acted.Net(LAYERS, WIDTH, torch.tanh)
    plans: list[Plan] = []
    changed: list[int] = []
    seconds: list[float] = []
    files: list[str] = []
    recorder = Recorder()
    job = config.JobConfig(
        train=config.TrainConfig(steps=steps, microbatches=MICROBATCHES, lr=1e-3),
        pipeline=config.PipelineConfig(peers=len(NAMES), stages=STAGES),
        compression=config.CompressionConfig(max_loss_increase=0),
        checkpoint=config.CheckpointConfig(every=0),
        evaluate=config.EvaluateConfig(every=0, microbatches=0),
    )

    async def whole(folder: Path) -> None:
        file = folder / "network.toml"
        file.write_text(first or _toml())
        save_module(net, folder / "weights")

        def on_event(event: events.RunEvent) -> None:
            recorder(event)
            if isinstance(event, events.Planned):
                plans.append(event.plan)
                if len(plans) > 1:
                    changed.append(len(seconds))
            elif isinstance(event, events.StepCommitted):
                seconds.append(event.seconds)
                number, rest = divmod(len(seconds) - WARM, every)
                if rest == 0 and 0 <= number < len(networks):
                    files.append(networks[number](plans[0]))
                    file.write_text(files[-1])

        duty = {name: peer.duty for name, peer in TopologyFile(file).topology.peers.items()}
        swarm = [LocalPeer(name, duty[name], device="cpu") for name in NAMES]
        with LocalPeers(swarm, folder / "logs", file, acted.PROGRAM) as processes:
            runner = Coordinator(
                job, graph=capture(net, data.train(0, 0)), source=data, run_dir=folder / "run",
                weights=WeightStore(folder / "weights"), on_event=on_event,
            )  # fmt: skip
            await train_with(runner, processes, recorder)(await runner.start())

    with tempfile.TemporaryDirectory() as folder:
        loops.run(asyncio.wait_for(whole(Path(folder)), 600))
    return changed, seconds, files
