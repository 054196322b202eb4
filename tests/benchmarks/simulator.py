"""The simulator's speed, and the steps that it predicts against those of real processes. I/O.

Peers on this machine keep to a network's rates and delays and to a duty cap, so that few cores act out many machines.
Each run goes through several plans. The simulator is told what the run itself measured: seconds of each action, rates
and delays of links as their receivers saw them, and the time between the last stage's report and the next step. The
network's own rate stands in where messages are too short to time, or share an uplink.
"""

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from geotrain import config, events, loops
from geotrain.base import Link, Peer, Plan, Stage, StageReport
from geotrain.blocks import CostModel
from geotrain.coordinator import Coordinator
from geotrain.data import BatchSource
from geotrain.graph import OpGraph, candidate_cuts, capture, cut, graph_hash
from geotrain.local import LocalPeer, LocalPeers
from geotrain.models import build
from geotrain.scheduler import rates
from geotrain.simulator import Message, StageTimes, Workload, simulate
from geotrain.topology import Topology
from geotrain.topology import parse as parse_topology
from geotrain.weights import WeightStore, save_module
from geotrain.workload import workload

from .tables import Table

VOCAB, CONTEXT = 512, 64

STEPS = 4
"""Of each plan; the first is not counted."""

NAMES = ("anna", "ben", "cleo", "dora", "emil", "fay")


@dataclass(frozen=True)
class Variant:
    """A plan: how many blocks each stage has, the stages' windows, codecs forward and backward."""

    blocks: tuple[int, ...]
    windows: tuple[int, ...]
    codecs: tuple[str, str] = ("identity", "identity")
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scene:
    """Peers of one `duty`, their links, and the plans that they run. `up`: Mbit/s that all links of a peer share."""

    name: str
    layers: int
    hidden: int
    microbatches: int
    duty: float
    mbit_per_s: tuple[float, ...]
    latency_ms: tuple[float, ...]
    variants: tuple[Variant, ...]
    up: float | None = None

    @property
    def peers(self) -> int:
        return max(len(variant.blocks) for variant in self.variants)

    def toml(self) -> str:
        lines: list[str] = []
        for name in NAMES[: self.peers]:
            lines += ["[[peer]]", f'name = "{name}"', *([f"up_mbit_per_s = {self.up}"] if self.up else [])]
        for i, src in enumerate(NAMES[: self.peers]):
            for j, dst in enumerate(NAMES[: self.peers]):
                if i != j:
                    number = (3 * i + j) % len(self.mbit_per_s), (i + j) % len(self.latency_ms)
                    lines += ["[[link]]", f'src = "{src}"', f'dst = "{dst}"']
                    lines += [
                        f"mbit_per_s = {self.mbit_per_s[number[0]]}",
                        f"latency_ms = {self.latency_ms[number[1]]}",
                    ]
        return "\n".join(lines)


SCENES = (
    Scene("2 peers", 3, 256, 8, 0.3, (20.0, 12.0), (30.0,), (
        Variant((1, 1), (2, 1)), Variant((1, 1), (5, 1)), Variant((2, 1), (4, 1), ("int8", "int8")),
    )),
    Scene("3 peers", 4, 256, 8, 0.3, (15.0, 9.0, 60.0), (10.0, 40.0), (
        Variant((1, 1, 1), (3, 2, 1)), Variant((1, 1, 1), (8, 4, 1)),
        Variant((1, 2, 1), (7, 3, 1), order=(2, 0, 1)),
    )),
    Scene("4 peers, uplinks shared", 4, 192, 8, 0.2, (60.0,), (15.0, 5.0), (
        Variant((1, 1, 1, 1), (4, 3, 2, 1)), Variant((1, 1, 1, 1), (8, 5, 3, 1)),
        Variant((1, 1, 1, 1), (8, 5, 3, 1), ("bf16", "int8")),
    ), up=12.0),
    Scene("6 peers", 6, 128, 8, 0.2, (10.0, 5.0, 25.0, 100.0), (5.0, 25.0), (
        Variant((1, 1, 1, 1, 1, 1), (6, 5, 4, 3, 2, 1)), Variant((1, 1, 1, 1, 1, 1), (8, 8, 6, 4, 3, 1)),
        Variant((2, 1, 1, 1, 1), (8, 7, 5, 3, 1), order=(3, 1, 4, 0, 2)),
    )),
)  # fmt: skip
"""Small models: what takes long is rests and links, since a few cores act out all peers."""


class Steady(Coordinator):
    """Keeps to the plans that it is given."""

    def _look_for_better(self, because: Iterable[str] = ()) -> None:
        pass


def benchmark(short: bool) -> list[Table]:
    scenes = (replace(SCENES[0], variants=SCENES[0].variants[:1]),) if short else SCENES
    torch.manual_seed(0)
    return [speed(), reality(scenes)]


def speed() -> Table:
    rows = []
    for what, cap, codec_s in (
        ("links of their own", None, 0.0), ("with codecs", None, 0.001), ("shared uplinks and downlinks", 1.5e8, 0.0),
    ):  # fmt: skip
        names = [f"p{i}" for i in range(20)]
        stages = tuple(StageTimes(name, 0.01, 0.02, 3 * (20 - i)) for i, name in enumerate(names))
        messages = [Message("F", i, (i + 1,), 1e6, codec_s, codec_s) for i in range(19)]
        messages += [Message("B", i + 1, (i,), 1e6, codec_s, codec_s) for i in range(19)]
        links = tuple(Link(a, b, 1e8, 0.01) for a in names for b in names if a != b)
        caps = {} if cap is None else dict.fromkeys(names, cap)
        workload = Workload("1f1b", 256, stages, tuple(messages), links, caps, caps)
        best = float("inf")
        for _ in range(5):
            start = time.process_time()
            events_ = simulate(workload).events
            best = min(best, time.process_time() - start)
        rows.append((what, events_, events_ / best))
    return Table("simulator: 20 stages, 256 microbatches, one core", ("network", "events", "events/s"), rows)


def reality(scenes: Sequence[Scene]) -> Table:
    rows, errors = [], []
    for scene in scenes:
        for variant, (measured_s, predicted_s) in zip(scene.variants, run(scene), strict=True):
            errors.append(abs(predicted_s / measured_s - 1))
            plan = f"blocks {variant.blocks}, windows {variant.windows}, {'/'.join(dict.fromkeys(variant.codecs))}"
            rows.append((scene.name, plan, measured_s, predicted_s, f"{predicted_s / measured_s - 1:+.1%}"))
    title = f"simulator against {len(rows)} runs of real processes, mean of {STEPS - 1} steps"
    note = f"error: median {statistics.median(errors):.1%}, worst {max(errors):.1%}"
    columns = ("network", "plan", "measured s", "predicted s", "error")
    return Table(title, columns, rows, [note])


def run(scene: Scene) -> list[tuple[float, float]]:
    """(measured, predicted) seconds of a step, by variant."""
    model = config.GptModel(layers=scene.layers, hidden=scene.hidden, heads=4, context=CONTEXT)
    tokens = torch.randint(0, VOCAB, (scene.microbatches, CONTEXT))
    data = BatchSource([{"tokens": tokens, "labels": tokens.roll(-1, 1)}], scene.microbatches)
    net = build(model, VOCAB).train()
    graph, topology = capture(net, data.train(0, 0)), parse_topology(scene.toml())
    plans = [_plan(graph, scene, variant) for variant in scene.variants]
    train = config.TrainConfig(
        steps=(STEPS + 1) * len(plans), microbatches=scene.microbatches, microbatch_size=1
    )  # a plan runs one step more while the next one is laid out
    job = config.JobConfig(
        train=train, pipeline=config.PipelineConfig(peers=scene.peers),
        checkpoint=config.CheckpointConfig(every=0), evaluate=config.EvaluateConfig(every=0, microbatches=0),
    )  # fmt: skip
    done: list[list[events.StepCommitted]] = []
    changes: set[asyncio.Future[None]] = set()

    async def whole(folder: Path) -> None:
        (folder / "network.toml").write_text(scene.toml())
        save_module(net, folder / "weights")
        swarm = [LocalPeer(name, duty=scene.duty, device="cpu") for name in NAMES[: scene.peers]]

        def on_event(event: events.RunEvent) -> None:
            if isinstance(event, events.Planned):
                done.append([])
            elif isinstance(event, events.StepCommitted):
                done[-1].append(event)
                if len(done[-1]) == STEPS and len(done) < len(plans):
                    changes.add(asyncio.ensure_future(runner.go_over(plans[len(done)], "the next one")))

        with LocalPeers(swarm, folder / "logs", folder / "network.toml") as processes:
            runner = Steady(
                job, graph=graph, source=data, run_dir=folder / "run", weights=WeightStore(folder / "weights"),
                plan=plans[0], topology=topology, on_event=on_event,
            )  # fmt: skip
            processes.give(await runner.start())
            await runner.run()

    with tempfile.TemporaryDirectory() as folder:
        loops.run(asyncio.wait_for(whole(Path(folder)), 600))
    found: list[tuple[float, float]] = []
    for plan, steps in zip(plans, done, strict=True):
        counted = steps[1:STEPS]
        predicted = [predict(graph, plan, event, topology) for event in counted]
        found.append((statistics.fmean(event.seconds for event in counted), statistics.fmean(predicted)))
    return found


def _plan(graph: OpGraph, scene: Scene, variant: Variant) -> Plan:
    """Cut between blocks: before the first op of a block's own."""
    starts: dict[str, int] = {}
    for place in candidate_cuts(graph):
        words = place.module.split(".")
        number = next((word for word in words if word.isdigit()), None)
        if number is not None:
            starts.setdefault(number, place.op_index)
    bounds, block = [0], 0
    for count in variant.blocks[:-1]:
        block += count
        bounds.append(starts[str(block)])
    order = variant.order or tuple(range(len(variant.blocks)))
    stages = tuple(
        Stage(NAMES[i], first, end, window, codec_forward=variant.codecs[0], codec_backward=variant.codecs[1])
        for i, first, end, window in zip(order, bounds, [*bounds[1:], len(graph.ops)], variant.windows, strict=True)
    )
    return Plan(graph_hash(graph), "1f1b", scene.microbatches, stages)


def predict(graph: OpGraph, plan: Plan, event: events.StepCommitted, topology: Topology) -> float:
    """The step played again with its own seconds."""
    stages = cut(graph, [stage.first_op for stage in plan.stages[1:]])
    peers = [
        Peer(stage.peer, 1.0, 1, topology.up_bytes_per_s(stage.peer), topology.down_bytes_per_s(stage.peer))
        for stage in plan.stages
    ]
    uses = {(use.src, use.dst): use for report in event.stages for use in report.links}
    links: list[Link] = []
    for (src, dst), use in uses.items():
        back = uses.get((dst, src), use)
        rate = topology.link(src, dst).rate_bytes_per_s
        if use.timed_bytes and topology.up_bytes_per_s(src) == math.inf:
            rate = use.timed_bytes / use.busy_s
        links.append(Link(src, dst, rate, max(0.0, ((use.delay_s or 0.0) + (back.delay_s or 0.0)) / 2)))
    codecs = {use.codec: rates(use) for report in event.stages for use in report.codecs if use.elements}
    commit_s = event.seconds - max(report.seconds for report in event.stages)
    load = workload(plan, stages, CostModel(graph, {}, {}), peers, links, codecs, commit_s)
    reports = sorted(event.stages, key=lambda report: report.stage)
    spent = [_spent(report) for report in reports]
    finish = [sum(seconds.get("norms", (0.0, 0.0))) for seconds in spent]
    load = replace(load, stages=tuple(replace(s, finish_s=f) for s, f in zip(load.stages, finish, strict=True)))
    actions = load.actions()
    measured = [[seconds[str(a)] for a in of_stage] for seconds, of_stage in zip(spent, actions, strict=True)]
    return simulate(load, measured).step_seconds


def _spent(report: StageReport) -> dict[str, tuple[float, float]]:
    """(computing, rest) by action."""
    found: dict[str, tuple[float, float]] = {}
    for span in report.spans:
        seconds = span.end_s - span.start_s
        compute_s, rest_s = found.get(span.label, (0.0, 0.0))
        if span.activity in ("compute", "rest"):
            rests = span.activity == "rest"
            found[span.label] = (compute_s, rest_s + seconds) if rests else (compute_s + seconds, rest_s)
    return found
