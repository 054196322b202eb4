"""`geotrain plan`: who would run what, how long a step would take, and what if. I/O (reads jobs, networks, runs)."""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .base import Link, Peer, Plan
from .blocks import CostModel
from .codecs.ladder import typical
from .config import JobConfig, load_job
from .coordinate import read_plan
from .disk import needs_folder, write_atomic
from .errors import ConfigError, UserError
from .graph import OpGraph, from_bytes
from .jobs import graph_of
from .layout import Layout, ladders, lay_out
from .local import read_topology
from .machine import free_memory_bytes, measured_flops_per_s, pick_device
from .planner.baselines import baselines
from .planner.build import Instance, borders, instance
from .planner.replicas import replicas
from .plots import Bar, standalone, timeline
from .report import STYLE
from .runfolder import GRAPH, JOB
from .simulator import Timeline, simulate
from .specs import open_spec
from .status import read
from .topology import Topology
from .whatif import what_if
from .words import duration, number_of, size
from .workload import workload

_WIDTH = 64
"""Characters of a drawn step."""

_MOST_COMPARED, _BORDERS = 64, 64
"""Simpler plans take their time: only for so many peers, with so many places to cut."""

_MOST_LINKS = 10

_SEEN = 0.2
"""A character shows what takes most of its time, if it takes this part of it at all."""


@dataclass(frozen=True, slots=True)
class Question:
    """What to plan: a job, its graph, and the peers and links there are. `measured_s`: a step of the run that these
    were measured in."""

    job: JobConfig
    graph: OpGraph
    peers: Sequence[Peer]
    links: Sequence[Link]
    measured_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan, its stages' graphs, how a step of it goes, and how long the planner took."""

    layout: Layout
    timeline: Timeline
    planning_s: float

    @property
    def plan(self) -> Plan:
        return self.layout.plan


def main(
    job: Path | None,
    run: Path | None,
    *,
    graph: str | None,
    topology: Path | None,
    out: Path | None,
    svg: Path | None,
    changes: Sequence[str],
    check: Path | None,
    sync_every: int,
    as_json: bool,
) -> int:
    """Answers on standard output; returns the exit code. Raises `UserError`."""
    for path in (out, svg):
        needs_folder(path)
    question = ask(job, run, graph, topology)
    given = read_plan(check) if check is not None else None
    changed = question
    for phrase in changes:
        peers, links = what_if(phrase, changed.peers, changed.links)
        changed = replace(changed, peers=peers, links=links)
    answer = answered(question, given)
    console = Console(width=None if _is_terminal() else 120, highlight=False)
    if as_json:
        console.print_json(json.dumps(facts(question, answer)))
    else:
        if check is not None:
            console.print(f"{check} is a plan that these peers can run")
        show(console, question, answer)
        if check is None:
            _compare(console, question, answer)
        if sync_every:
            _pipelines(console, question, sync_every)
    if changes:
        other = answered(changed, given)
        if as_json:
            console.print_json(json.dumps(facts(changed, other)))
        else:
            console.rule(f"if {'; '.join(changes)}")
            _differences(console, changed, answer, other)
    target = out or (Path("plan.json") if job is not None and job.is_file() and check is None else None)
    if target is not None:
        write_atomic(target, answer.plan.to_json().encode())
        if not as_json:
            console.print(str(target))
    if svg is not None:
        write_atomic(svg, picture(answer.timeline).encode())
    return 0


def ask(job: Path | None, run: Path | None, graph: str | None, topology: Path | None) -> Question:
    """Raises `UserError` if it is not clear what to plan, or for whom."""
    if job is not None and job.is_dir() and run is None:
        job, run = None, job
    if (job is not None) and graph is not None:
        raise UserError("give a job or --graph, not both")
    if (topology is None) == (run is None):
        raise UserError(
            "say what to plan (a job file or --graph) and who is there (--topology FILE), or give the folder of a run "
            "that measured its peers"
        )
    if graph is not None:
        config, captured = open_spec(graph)
    elif job is not None:
        config = load_job(job)
        captured = graph_of(config)
    elif run is not None:
        config, captured = load_job(run / JOB), _run_graph(run)
    else:
        raise UserError("give a job file, --graph, or the folder of a run")
    if topology is not None:
        shape = read_topology(topology)
        return Question(config, captured, described_peers(shape), shape.links)
    assert run is not None
    record = read(run)
    if not record.peers:
        raise UserError(f"{run}: no peer is there; plan with --topology instead")
    return Question(config, captured, list(record.peers.values()), record.links, record.step_s)


def described_peers(shape: Topology) -> list[Peer]:
    """The peers of a topology file. Speed and memory that it leaves open are taken from this machine."""
    device = pick_device("auto")
    flops = memory = 0.0
    if any(peer.flops is None for peer in shape.peers.values()):
        flops = measured_flops_per_s(device, None)
    if any(peer.memory_bytes is None for peer in shape.peers.values()):
        memory = free_memory_bytes(device)
    return [
        Peer(name, (p.flops or flops) * p.duty, p.memory_bytes or int(memory), p.up_bytes_per_s, p.down_bytes_per_s,
             p.region)
        for name, p in shape.peers.items()
    ]  # fmt: skip


def answered(question: Question, given: Plan | None = None) -> Answer:
    """A plan for it (or the `given` one, checked), played through. Raises `PlanError`."""
    start = time.monotonic()
    forward, backward = ladders(question.job, question.graph)
    layout = lay_out(
        question.job, question.graph, question.peers, 1, given, question.links, forward=forward, backward=backward
    )
    planning_s = time.monotonic() - start
    rates = typical((*forward, *backward))
    load = workload(layout.plan, layout.stages, CostModel(question.graph), question.peers, _with_ends(question), rates)
    return Answer(layout, simulate(load), planning_s)


def _with_ends(question: Question) -> list[Link]:
    """Also of pairs that no link tells of: what both ends allow."""
    known = {(link.src, link.dst): link for link in question.links}
    return [
        known.get((a.name, b.name)) or Link(a.name, b.name, min(a.up_bytes_per_s, b.down_bytes_per_s), 0.0)
        for a in question.peers
        for b in question.peers
        if a is not b
    ]


def facts(question: Question, answer: Answer) -> dict[str, Any]:
    """What `--json` prints. Stable."""
    plan = answer.plan
    return {
        "step_seconds": plan.step_seconds,
        "period_seconds": plan.period_seconds,
        "stages": [
            {
                "peer": stage.peer,
                "first_op": stage.first_op,
                "last_op": stage.end_op - 1,
                "block_range": block_range(question.graph, stage.first_op, stage.end_op),
                "codec_forward": stage.codec_forward,
                "codec_backward": stage.codec_backward,
                "window": stage.window,
                "compute_seconds": stage.compute_seconds,
                "memory_bytes": stage.memory_bytes,
            }
            for stage in plan.stages
        ],
        "benched": list(plan.benched),
        "planning_seconds": answer.planning_s,
        "lower_bound_seconds": plan.lower_bound_seconds,
    }


def block_range(graph: OpGraph, first_op: int, end_op: int) -> list[int] | None:
    """First and last number of the repeated blocks that the ops belong to; None if they belong to none."""
    found = (re.search(r"(?:^|\.)(\d+)(?:\.|$)", op.module) for op in graph.ops[first_op:end_op])
    numbers = [int(match.group(1)) for match in found if match]
    return [min(numbers), max(numbers)] if numbers else None


def show(console: Console, question: Question, answer: Answer) -> None:
    """The plan as a table, a step of it as a drawing, and what it is made of."""
    plan, step = answer.plan, answer.timeline
    limits = {peer.name: peer.memory_bytes for peer in question.peers}
    table = Table("stage", "peer", "what", "ops", "compute", "memory", "window", "sends", box=None, pad_edge=False)
    for column in table.columns[3:7]:
        column.justify = "right"
    for i, (stage, blocks) in enumerate(zip(plan.stages, answer.layout.blocks, strict=True)):
        codecs = " / ".join(dict.fromkeys((stage.codec_forward, stage.codec_backward)))
        table.add_row(
            str(i), stage.peer, blocks, str(stage.end_op - stage.first_op), duration(stage.compute_seconds),
            f"{size(stage.memory_bytes)} of {size(limits[stage.peer])}", str(stage.window),
            codecs + (", recomputes" if stage.recompute else ""),
        )  # fmt: skip
    console.print(table)
    console.print()
    for row in drawn(step):
        console.print(row)
    console.print(f"\na step: {duration(plan.step_seconds)}, predicted; played through: {duration(step.step_seconds)}")
    console.print(f"bottleneck: {step.why}")
    if question.measured_s is not None:
        console.print(f"measured in the run: {duration(question.measured_s)} a step")
    used = sorted((load for load in step.loads if load.nbytes), key=lambda load: -load.busy_s)
    for load in used[:_MOST_LINKS]:
        busy = load.busy_s / max(step.step_seconds, 1e-12)
        console.print(f"  {load.src} to {load.dst}: {size(load.nbytes)} a step, busy {busy:.0%} of it")
    if len(used) > _MOST_LINKS:
        console.print(f"  and {len(used) - _MOST_LINKS} links that are less busy")
    for note in plan.notes:
        console.print(f"  {note}")
    console.print(f"planned in {duration(answer.planning_s)}")


def drawn(step: Timeline) -> list[Text]:
    """A row a stage: forward and backward as they follow each other."""
    scale = _WIDTH / max(step.step_seconds, 1e-12)
    names = [stage.peer for stage in step.workload.stages]
    left = max(map(len, names), default=0)
    rows: list[Text] = []
    for name, actions, runs in zip(names, step.workload.actions(), step.runs, strict=True):
        shares = [[0.0, 0.0] for _ in range(_WIDTH)]
        for action, (start, end) in zip(actions, runs, strict=True):
            for at in range(int(start * scale), min(_WIDTH, int(end * scale) + 1)):
                overlap = min(end * scale, at + 1) - max(start * scale, at)
                shares[at][action.kind == "B"] += max(0.0, overlap)
        row = Text(f"{name:>{left}} ")
        for forward, backward in shares:
            if forward + backward < _SEEN:
                row.append("·", style="dim")
            elif forward > backward:
                row.append("█", style="blue")
            else:
                row.append("▒", style="green")
        rows.append(row)
    rows.append(Text(f"{'':>{left}} █ forward ▒ backward · waiting; {duration(step.step_seconds)} in all", style="dim"))
    return rows


def picture(step: Timeline) -> str:
    """The step as an SVG file: a row a stage."""
    rows: list[tuple[str, list[Bar]]] = []
    for s, (stage, spans) in enumerate(zip(step.workload.stages, step.spans, strict=True)):
        bars: list[Bar] = []
        for span in spans:
            kind = span.label.removeprefix(str(s))[:1]
            css = kind if span.activity == "compute" and kind in ("F", "B") else "rest"
            if span.activity in ("wait", "idle"):
                css = "waiting"
            title = f"{span.activity} {span.label}: {duration(span.end_s - span.start_s)}"
            bars.append(Bar(span.start_s, span.end_s, css, span.label if css in ("F", "B") else "", title))
        rows.append((stage.peer, bars))
    legend = [("forward", "F"), ("backward", "B"), ("waiting", "waiting"), ("rest", "rest")]
    return standalone(timeline(rows, step.step_seconds, legend), STYLE)


def _compare(console: Console, question: Question, answer: Answer) -> None:
    """Against simpler ways to plan, by the planner's own model, with the same codecs."""
    if len(question.peers) > _MOST_COMPARED:
        return
    table = Table(
        "simpler plans with all of these peers", "equal cuts", "proportional", "exact", box=None, pad_edge=False
    )
    rows: dict[str, list[str]] = {}
    for name, other in baselines(_instance(question).problem).items():
        step_s = other.price.step_seconds if other else None
        times = f"{step_s / answer.plan.step_seconds:.2f} times" if step_s else ""
        rows.setdefault(name.partition(",")[0], []).append(f"{duration(step_s)}, {times}" if step_s else "does not fit")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)


def _instance(question: Question) -> Instance:
    train, (forward, backward) = question.job.train, ladders(question.job, question.graph)
    return instance(
        question.graph, question.peers, borders(question.graph, len(question.peers), _BORDERS),
        microbatches=train.microbatches, schedule=question.job.pipeline.schedule, optimizer=train.optimizer,
        momentum=train.momentum, links=question.links, forward=forward, backward=backward,
        max_loss_increase=question.job.compression.max_loss_increase,
    )  # fmt: skip


def _pipelines(console: Console, question: Question, every: int) -> None:
    """Several pipelines, each with the whole model, that share a step's microbatches and exchange what they train."""
    made = _instance(question)
    best = replicas(made.problem, made.table["gradient_bytes"][0].astype(float), every)
    if best is None:
        console.print("no set of pipelines fits onto these peers")
        return
    console.print(
        f"with an exchange every {every} steps, nothing compressed, {number_of('pipeline', len(best.pipelines))} would "
        f"take {duration(best.step_seconds)} a step, and {duration(best.sync_seconds)} an exchange (priced only: a run "
        "has one pipeline)"
    )
    for pipeline in best.pipelines:
        names = ", ".join(made.problem.names[peer] for peer in pipeline.order)
        console.print(f"  {pipeline.microbatches} microbatches: {names}")


def _differences(console: Console, question: Question, before: Answer, after: Answer) -> None:
    show(console, question, after)
    a, b = before.plan.step_seconds, after.plan.step_seconds
    change = "as long as before" if a == b else f"{abs(1 - b / a):.1%} {'shorter' if b < a else 'longer'}"
    console.print(f"a step goes from {duration(a)} to {duration(b)}: {change}")
    was, now = ([stage.peer for stage in x.plan.stages] for x in (before, after))
    for name in sorted({*now} - {*was}):
        console.print(f"  {name} gets a stage")
    for name in sorted({*was} - {*now}):
        console.print(f"  {name} has none any more")


def _run_graph(run: Path) -> OpGraph:
    try:
        graph = from_bytes((run / GRAPH).read_bytes())
    except OSError as error:
        raise ConfigError(f"{run}: holds no run: {error.strerror}; give the folder that a run printed") from None
    if not isinstance(graph, OpGraph):
        raise ConfigError(f"{run / GRAPH} is not a whole model")
    return graph


def _is_terminal() -> bool:
    return Console().is_terminal
