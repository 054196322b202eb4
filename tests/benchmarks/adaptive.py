"""Codecs as a run chooses them between homes, against links without limit and against AdaTopK. I/O.

    python -m tests.benchmarks --only adaptive [--short]

Four peers on this machine train a GPT from scratch on the embedded text, a stage on each. Three of them send 20 Mbit/s
and receive 100, the fourth has a line of 8 Mbit/s. Three runs of as many steps from the same weights: on links without
limit and with nothing lost; in these homes, with the codecs that the run chooses; and with its last plan, but AdaTopK
as published for codecs, with fewer elements on the slow line. Peers act out a speed that leaves the cores that they
share here time to spare (`acted`), so that a step waits for links and not for cores.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from geotrain import events, loops
from geotrain.base import Plan
from geotrain.config import JobConfig, parse_job
from geotrain.coordinator import Coordinator
from geotrain.facts import Recorder
from geotrain.jobs import open_job
from geotrain.local import LocalPeer, LocalPeers, train_with
from geotrain.topology import parse

from . import acted
from .tables import Cell, Table

SLOW = "dora"
UP_MBIT = {"anna": 20.0, "ben": 20.0, "cleo": 20.0, SLOW: 8.0}
DOWN_MBIT = {"anna": 100.0, "ben": 100.0, "cleo": 100.0, SLOW: 8.0}
ADATOPK, ADATOPK_SLOW = "adatopk-10", "adatopk-5"
"""The most elements that are coded so and keep a step as short, and half of them where a line has half the rate."""


@dataclass(frozen=True)
class Run:
    """What happened, and the last of so many plans."""

    facts: dict[str, Any]
    plan: Plan
    plans: int

    @property
    def step_s(self) -> float:
        """In the second half, when codecs are chosen."""
        seconds = self.facts["step_seconds"]
        return statistics.median(seconds[len(seconds) // 2 :])


def benchmark(short: bool) -> list[Table]:
    steps = 12 if short else 50
    free = _run(_job(steps, 0.0), None)
    chosen = _run(_job(steps, 0.01), _toml())
    runs = {"links without limit, nothing lost": free, "homes, codecs as chosen": chosen}
    if not short:
        runs["homes, AdaTopK"] = _run(_job(steps, 0.01), _toml(), _with_adatopk(chosen.plan))
    return [_runs(runs), _links(chosen)]


def _job(steps: int, max_loss_increase: float) -> JobConfig:
    text = f"""
[model]
layers = 4
hidden = 192
context = 128

[train]
steps = {steps}
microbatches = 64
microbatch_size = 1
lr = 1e-3
warmup_steps = 10

[pipeline]
peers = {len(UP_MBIT)}
stages = {len(UP_MBIT)}

[compression]
max_loss_increase = {max_loss_increase}

[checkpoint]
every = 0

[evaluate]
every = 0
microbatches = 16
"""
    return parse_job(text, "adaptive")


def _toml() -> str:
    lines: list[str] = []
    for name in UP_MBIT:
        lines += ["[[peer]]", f'name = "{name}"']
        lines += [f"up_mbit_per_s = {UP_MBIT[name]}", f"down_mbit_per_s = {DOWN_MBIT[name]}"]
    for src in UP_MBIT:
        for dst in UP_MBIT:
            if src != dst:
                lines += ["[[link]]", f'src = "{src}"', f'dst = "{dst}"', "latency_ms = 10"]
    return "\n".join(lines)


def _with_adatopk(plan: Plan) -> Plan:
    """A stage's codecs are those of what it sends to the next one, and back."""
    peers = [stage.peer for stage in plan.stages]

    def codec(boundary: int) -> str:
        if not 0 <= boundary < len(peers) - 1:
            return "identity"
        return ADATOPK_SLOW if SLOW in peers[boundary : boundary + 2] else ADATOPK

    stages = [
        replace(stage, codec_forward=codec(i), codec_backward=codec(i - 1)) for i, stage in enumerate(plan.stages)
    ]
    return replace(plan, stages=tuple(stages))


def _run(job: JobConfig, network: str | None, plan: Plan | None = None) -> Run:
    recorder = Recorder()
    plans: list[Plan] = []

    def on_event(event: events.RunEvent) -> None:
        recorder(event)
        if isinstance(event, events.Planned):
            plans.append(event.plan)

    async def whole(folder: Path) -> None:
        file = folder / "network.toml"
        file.write_text(network or "")
        work = open_job(job)
        swarm = [LocalPeer(name, device="cpu") for name in UP_MBIT]
        with LocalPeers(swarm, folder / "logs", file if network else None, acted.PROGRAM) as processes:
            runner = Coordinator(
                work.job, graph=work.graph, source=work.source, run_dir=folder / "run", plan=plan,
                topology=parse(network) if network else None, on_event=on_event,
            )  # fmt: skip
            await train_with(runner, processes, recorder)(await runner.start())

    with tempfile.TemporaryDirectory() as folder:
        loops.run(asyncio.wait_for(whole(Path(folder)), 600))
    return Run(recorder.facts(), plans[-1], len(plans))


def _runs(runs: Mapping[str, Run]) -> Table:
    free = next(iter(runs.values()))
    whole = free.facts["held_out_loss_after"]
    rows: list[tuple[Cell, ...]] = []
    for name, run in runs.items():
        loss = run.facts["held_out_loss_after"]
        rows.append((name, run.step_s, run.step_s / free.step_s, loss, 100 * (loss / whole - 1), run.plans))
    columns = ("run", "step s", "over links without limit", "held-out loss", "increase %", "plans")
    ratios = {"a step in homes, over one on links without limit": rows[1][2]}
    return Table(f"4 real peers, {len(free.facts['step_seconds'])} steps", columns, rows, ratios=ratios)


def _links(run: Run) -> Table:
    """Of the last plan; a factor is over all messages that had its codec."""
    links = {(link["from"], link["to"]): link for link in run.facts["links"]}
    rows: list[tuple[Cell, ...]] = []
    for here, there in pairwise(run.plan.stages):
        for src, dst, codec in ((here, there, here.codec_forward), (there, here, there.codec_backward)):
            link = links[src.peer, dst.peer]
            factor = next((use["factor"] for use in link["codecs"] if use["codec"] == codec), None)
            rate = min(UP_MBIT[src.peer], DOWN_MBIT[dst.peer])
            rows.append((f"{src.peer} to {dst.peer}", rate, codec, factor))
    columns = ("link", "Mbit/s at most", "codec", "times fewer bytes than raw")
    return Table("what the run chose", columns, rows)
