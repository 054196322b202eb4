"""Our plan against simpler ones in the real runtime: processes on links between 8 Mbit/s and 1 Gbit/s. I/O.

Six peers on this machine act out the speeds, rates and delays of random networks with slow and fast places. One run
goes through all plans for a network, so that each trains the same model with the same peers. The others are planned
twice: as published, which is raw tensors and 1F1B's own windows, and with our codecs and windows, so that only who does
what differs. Of each kind the best few by the simulator's word are measured, and one that uses all peers.
"""

import asyncio
import math
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from geotrain import config, events, loops
from geotrain.base import Peer, Plan, Stage
from geotrain.blocks import CostModel
from geotrain.codecs.ladder import BACKWARD, FORWARD, RAW, Rung, typical
from geotrain.coordinator import Coordinator
from geotrain.data import BatchSource
from geotrain.graph import OpGraph, capture, cut, graph_hash
from geotrain.layout import lay_out
from geotrain.local import LocalPeer, LocalPeers
from geotrain.planner.baselines import baselines
from geotrain.planner.build import Instance, borders, instance
from geotrain.planner.exact import Found
from geotrain.schedule import default_windows
from geotrain.simulator import simulate
from geotrain.topology import Topology, parse
from geotrain.weights import WeightStore, save_module
from geotrain.workload import workload

from . import acted
from .tables import Cell, Table

WIDTH, LAYERS, ROWS, MICROBATCHES = 64, 24, 4096, 8
STEPS = 4
"""Of each plan; the first is not counted."""

PEERS, PLACES = 6, 4
NAMES = ("anna", "ben", "cleo", "dora", "emil", "fay")
SLOWEST, FASTEST, LEAST_MBIT, MOST_MBIT = 0.175, 0.7, 8.0, 1000.0
NETWORKS = 3
BEST = 3


class Steady(Coordinator):
    """Keeps to the plans that it is given."""

    def _look_for_better(self, because: Iterable[str] = ()) -> None:
        pass


def benchmark(short: bool) -> list[Table]:
    torch.manual_seed(0)
    data = BatchSource([{name: torch.randn(MICROBATCHES * ROWS, WIDTH) for name in ("x", "y")}], MICROBATCHES)
    net = acted.Net(LAYERS, WIDTH, torch.relu)  # little to compute for its bytes: plans hang on the network
    graph = capture(net, data.train(0, 0))
    rows: list[tuple[Cell, ...]] = []
    ratios: dict[str, list[float]] = {"as published": [], "with our codecs and windows": []}
    for seed in range(1 if short else NETWORKS):
        toml = network(seed)
        plans = plans_for(graph, parse(toml), 1 if short else BEST)
        seconds = run(net, graph, data, toml, [plan for _, _, plan in plans])
        ours = seconds[-1]
        for kind, of_kind in ratios.items():
            best = min(s for (of, _, _), s in zip(plans, seconds, strict=True) if of == kind)
            of_kind.append(best / ours)
        rows += [
            (seed, kind, name, len(plan.stages), plan.step_seconds, step_s, step_s / ours)
            for (kind, name, plan), step_s in zip(plans, seconds, strict=True)
        ]
    medians = {kind: statistics.median(of_kind) for kind, of_kind in ratios.items()}
    return [
        Table(
            f"{PEERS} real peers on links of 8 Mbit/s to 1 Gbit/s, median of {STEPS - 1} steps",
            ("network", "others", "plan", "peers", "simulated s", "measured s", "over ours"), rows,
            [f"The best of the others {kind}: {over:.2f} times our step (median)" for kind, over in medians.items()],
            {f"ours over the best other {kind}": 1 / over for kind, over in medians.items()},
        )
    ]  # fmt: skip


def network(seed: int) -> str:
    """Peers 1 to 4 times as fast; 200 Mbit/s to 1 Gbit/s and 1 ms in a place, 8 Mbit/s to 1 Gbit/s (log-uniform) and
    5 to 50 ms between two."""
    rng = np.random.default_rng(seed)
    place = rng.integers(PLACES, size=PEERS)
    rate = np.exp(rng.uniform(math.log(LEAST_MBIT), math.log(MOST_MBIT), (PLACES, PLACES)))
    rate[np.diag_indices(PLACES)] = rng.uniform(200.0, MOST_MBIT, PLACES)
    latency = np.triu(rng.uniform(5.0, 50.0, (PLACES, PLACES)), 1)
    latency += latency.T + np.eye(PLACES)
    duty = np.exp(rng.uniform(math.log(SLOWEST), math.log(FASTEST), PEERS))
    lines: list[str] = []
    for i, name in enumerate(NAMES):
        lines += ["[[peer]]", f'name = "{name}"', f"duty = {duty[i]:.4f}"]
    for i, src in enumerate(NAMES):
        for j, dst in enumerate(NAMES):
            if i != j:
                at = place[i], place[j]
                lines += ["[[link]]", f'src = "{src}"', f'dst = "{dst}"']
                lines += [f"mbit_per_s = {rate[at]:.2f}", f"latency_ms = {latency[at]:.2f}"]
    return "\n".join(lines)


def plans_for(graph: OpGraph, topology: Topology, best: int) -> list[tuple[str, str, Plan]]:
    """(kind, name, plan): one that uses all peers first, since a run begins with them, and ours last. The steps are the
    simulator's."""
    peers = [Peer(name, acted.SPEED * peer.duty, 4 << 30) for name, peer in topology.peers.items()]
    links = topology.links
    rates = typical((*FORWARD, *BACKWARD))

    def simulated(plan: Plan) -> Plan:
        stages = cut(graph, [stage.first_op for stage in plan.stages[1:]])
        step = simulate(workload(plan, stages, CostModel(graph), peers, links, rates))
        return replace(plan, step_seconds=step.step_seconds)

    def others(kind: str, forward: Sequence[Rung], backward: Sequence[Rung]) -> list[tuple[str, str, Plan]]:
        made = instance(
            graph, peers, borders(graph, PEERS), microbatches=MICROBATCHES, links=links, forward=forward,
            backward=backward,
        )  # fmt: skip
        plans = {name: _plan(graph, made, found) for name, found in baselines(made.problem).items() if found}
        if len(forward) == 1:
            plans = {name: _classic(plan) for name, plan in plans.items()}
        return [(kind, name, simulated(plan)) for name, plan in plans.items()]

    published, equal = others("as published", [RAW], [RAW]), others("with our codecs and windows", FORWARD, BACKWARD)
    first = next(row for row in published if len(row[2].stages) == PEERS)
    ours = lay_out(_job(1), graph, peers, 1, None, links, forward=FORWARD, backward=BACKWARD).plan
    chosen = [
        row for kind in (published, equal) for row in sorted(kind, key=lambda row: row[2].step_seconds)[:best]
        if row is not first
    ]  # fmt: skip
    return [first, *chosen, ("", "ours", simulated(ours))]


def _plan(graph: OpGraph, made: Instance, found: Found) -> Plan:
    problem, price = made.problem, found.price
    bounds = [made.points[b] for b in (0, *found.cuts, problem.borders - 1)]
    ahead = [*(problem.forward[f].codec for f, _ in found.codecs), "identity"]
    back = ["identity", *(problem.backward[g].codec for _, g in found.codecs)]
    stages = tuple(
        Stage(problem.names[peer], a, b, price.windows[k], codec_forward=ahead[k], codec_backward=back[k],
              recompute=price.recompute[k])
        for k, (peer, (a, b)) in enumerate(zip(found.order, pairwise(bounds), strict=True))
    )  # fmt: skip
    return Plan(graph_hash(graph), "1f1b", MICROBATCHES, stages)


def _classic(plan: Plan) -> Plan:
    """1F1B as published: a stage holds as many microbatches as there are stages from it on."""
    windows = default_windows("1f1b", len(plan.stages), MICROBATCHES)
    return replace(plan, stages=tuple(replace(s, window=w) for s, w in zip(plan.stages, windows, strict=True)))


def _job(plans: int) -> config.JobConfig:
    train = config.TrainConfig(steps=(STEPS + 1) * plans, microbatches=MICROBATCHES, microbatch_size=ROWS)
    return config.JobConfig(
        train=train, pipeline=config.PipelineConfig(peers=PEERS),
        checkpoint=config.CheckpointConfig(every=0), evaluate=config.EvaluateConfig(every=0, microbatches=0),
    )  # fmt: skip


def run(net: torch.nn.Module, graph: OpGraph, data: BatchSource, toml: str, plans: list[Plan]) -> list[float]:
    """Seconds of a step, by plan."""
    topology = parse(toml)
    done: list[list[float]] = []
    changes: set[asyncio.Future[None]] = set()

    async def whole(folder: Path) -> None:
        (folder / "network.toml").write_text(toml)
        save_module(net, folder / "weights")

        def on_event(event: events.RunEvent) -> None:
            if isinstance(event, events.Planned):
                done.append([])
            elif isinstance(event, events.StepCommitted):
                done[-1].append(event.seconds)
                if len(done[-1]) == STEPS and len(done) < len(plans):
                    changes.add(asyncio.ensure_future(runner.go_over(plans[len(done)], "the next one")))

        swarm = [LocalPeer(name, duty=peer.duty, device="cpu") for name, peer in topology.peers.items()]
        with LocalPeers(swarm, folder / "logs", folder / "network.toml", acted.PROGRAM) as processes:
            runner = Steady(
                _job(len(plans)), graph=graph, source=data, run_dir=folder / "run",
                weights=WeightStore(folder / "weights"), plan=plans[0], topology=topology, on_event=on_event,
            )  # fmt: skip
            processes.give(await runner.start())
            await runner.run()

    with tempfile.TemporaryDirectory() as folder:
        loops.run(asyncio.wait_for(whole(Path(folder)), 900))
    return [statistics.median(steps[1:STEPS]) for steps in done]
