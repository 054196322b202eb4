"""Refuses a plan that would not run, with a reason a person understands. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from ..base import Peer, Plan
from ..codecs import get_codec
from ..cost import CostTable
from ..errors import PlanError
from ..graph import OpGraph, cut, graph_hash, stage_edges
from ..schedule import build, validate
from .memory import stage_memory, usable_bytes, ways_out


def check(
    plan: Plan, graph: OpGraph, peers: Sequence[Peer], *, optimizer: str = "adamw", momentum: float = 0.0
) -> None:
    """Returns if `peers` can run the plan.

    Raises:
        PlanError: it is for another graph; names an unknown peer, or one twice; ops are missing, in two
            stages or out of order; a stage is empty; a cut is not allowed; schedule, microbatches, a window
            or a codec is wrong; or a stage does not fit into its peer's memory.
    """
    ours = graph_hash(graph)
    if plan.graph_hash != ours:
        raise PlanError(
            f"the plan is for another model: its graph is {plan.graph_hash[:12]}, this one {ours[:12]}; make a new plan"
        )
    _check_peers(plan, {peer.name for peer in peers})
    _check_ops(plan, len(graph.ops))
    for stage in plan.stages:
        get_codec(stage.codec_forward)
        get_codec(stage.codec_backward)
    windows = [stage.window for stage in plan.stages]
    actions = build(plan.schedule, len(plan.stages), plan.microbatches, windows)
    forward, backward = stage_edges(cut(graph, [stage.first_op for stage in plan.stages[1:]]))
    validate(actions, len(plan.stages), plan.microbatches, forward, backward, windows)
    _check_memory(weighed(plan, graph, optimizer=optimizer, momentum=momentum), peers)


def _check_peers(plan: Plan, known: set[str]) -> None:
    stage_of: dict[str, int] = {}
    for s, stage in enumerate(plan.stages):
        if stage.peer not in known:
            raise PlanError(f"stage {s} is for peer {stage.peer!r}, who is not here; there are {_list(known)}")
        if stage.peer in stage_of:
            raise PlanError(f"peer {stage.peer!r} has stages {stage_of[stage.peer]} and {s}; a peer runs one stage")
        stage_of[stage.peer] = s


def _list(names: set[str]) -> str:
    """A few names in order, for a one-line message."""
    shown = sorted(names)[:8]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _check_ops(plan: Plan, num_ops: int) -> None:
    if not plan.stages:
        raise PlanError("the plan has no stage")
    reached = 0
    for s, stage in enumerate(plan.stages):
        first, end = stage.first_op, stage.end_op
        if first >= end:
            raise PlanError(f"stage {s} is empty: it goes from op {first} to op {end}")
        if s and first < plan.stages[s - 1].first_op:
            raise PlanError(
                f"stage {s} begins at op {first}, before stage {s - 1}: values would have to go in a cycle; "
                "order the stages by their ops"
            )
        if first < reached:
            raise PlanError(f"ops {first} to {min(reached, end) - 1} are in stages {s - 1} and {s}")
        if first > reached:
            raise PlanError(f"ops {reached} to {first - 1} are in no stage")
        reached = end
    if reached < num_ops:
        raise PlanError(f"ops {reached} to {num_ops - 1} are in no stage")
    if reached > num_ops:
        raise PlanError(f"the last stage ends at op {reached}, and the graph has {num_ops} ops")


def weighed(plan: Plan, graph: OpGraph, *, optimizer: str = "adamw", momentum: float = 0.0) -> Plan:
    """The plan with the `memory_bytes` that its windows, codecs and recompute make of each stage."""
    table = CostTable(graph, [0, *(stage.end_op for stage in plan.stages)], optimizer, momentum)
    lossy = any(not get_codec(c).lossless for s in plan.stages for c in (s.codec_forward, s.codec_backward))
    memory = stage_memory(table, plan.microbatches, lossy=lossy)
    stages = [
        replace(stage, memory_bytes=int(memory.peak(min(stage.window, plan.microbatches), stage.recompute)[s, s + 1]))
        for s, stage in enumerate(plan.stages)
    ]
    return replace(plan, stages=tuple(stages))


def _check_memory(plan: Plan, peers: Sequence[Peer]) -> None:
    allowed = {peer.name: usable_bytes(peer) for peer in peers}
    for s, stage in enumerate(plan.stages):
        needed, limit, live = stage.memory_bytes, allowed[stage.peer], min(stage.window, plan.microbatches)
        if needed > limit:
            raise PlanError(f"stage {s} on {ways_out(stage.peer, needed, limit, live, stage.recompute)}")
