"""A plan, and what each of its stages is told: its part of the graph, and its actions. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from . import planner, protocol, schedule
from .base import Link, Peer, Plan
from .blocks import CostModel
from .codecs.ladder import BACKWARD, FORWARD, PRETRAINED_BACKWARD, PRETRAINED_FORWARD, RAW, Rung
from .config import HfModel, JobConfig
from .errors import PlanError
from .graph import OpGraph, StageGraph, cut, stage_modules, to_bytes
from .windows import fitted
from .workload import workload


@dataclass(frozen=True, slots=True)
class Layout:
    """`graphs` are the stages as bytes, `actions` their schedules as words, `blocks` a phrase for people."""

    plan: Plan
    stages: tuple[StageGraph, ...]
    graphs: tuple[bytes, ...]
    actions: tuple[tuple[str, ...], ...]
    blocks: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The peers, by stage."""
        return tuple(stage.peer for stage in self.plan.stages)

    def readers(self) -> dict[str, list[str]]:
        """The peers that read each model input."""
        found: dict[str, list[str]] = {}
        for name, stage in zip(self.names, self.stages, strict=True):
            for value in stage.inputs:
                found.setdefault(value, []).append(name)
        return found


def ladders(job: JobConfig, graph: OpGraph) -> tuple[tuple[Rung, ...], tuple[Rung, ...]]:
    """The codecs to choose from, forward and backward: none without a loss budget. Frozen weights tell of a training
    before, too."""
    if job.compression.max_loss_increase == 0:
        return (RAW,), (RAW,)
    frozen = any(not parameter.requires_grad for parameter in graph.parameters.values())
    if frozen or (isinstance(job.model, HfModel) and not job.model.fresh):
        return PRETRAINED_FORWARD, PRETRAINED_BACKWARD
    return FORWARD, BACKWARD


def lay_out(
    job: JobConfig,
    graph: OpGraph,
    peers: Sequence[Peer],
    epoch: int,
    given: Plan | None,
    links: Sequence[Link],
    costs: CostModel | None = None,
    *,
    forward: Sequence[Rung] = (RAW,),
    backward: Sequence[Rung] = (RAW,),
    near: Plan | None = None,
) -> Layout:
    """Make a plan, or take the `given` one, and cut the graph by it. Raises `PlanError` if it would not run.

    Args:
        forward, backward: the codecs to choose from, least compression first.
        near: the plan that runs now.
    """
    train = job.train
    if given is not None:
        plan = given.with_epoch(epoch)
        if plan.microbatches != train.microbatches:
            raise PlanError(
                f"the plan is for {plan.microbatches} microbatches a step, the job has {train.microbatches}; "
                "set train.microbatches or make a new plan"
            )
    else:
        wanted = job.pipeline.stages
        plan = planner.plan(
            graph, peers, microbatches=train.microbatches, schedule=job.pipeline.schedule,
            optimizer=train.optimizer, momentum=train.momentum, links=links, epoch=epoch,
            stages=None if wanted is None else min(wanted, len(peers)), forward=forward, backward=backward,
            max_loss_increase=job.compression.max_loss_increase, near=near, costs=costs,
        )  # fmt: skip
    planner.check(plan, graph, peers, optimizer=train.optimizer, momentum=train.momentum)
    stages = tuple(cut(graph, [stage.first_op for stage in plan.stages[1:]]))
    if given is None and plan.schedule == "1f1b":
        step = workload(plan, stages, costs or CostModel(graph), peers, links)
        best = fitted(step, [stage.window for stage in plan.stages])
        plan = replace(plan, stages=tuple(replace(s, window=w) for s, w in zip(plan.stages, best, strict=True)))
    plan = planner.weighed(plan, graph, optimizer=train.optimizer, momentum=train.momentum)
    windows = [stage.window for stage in plan.stages]
    actions = schedule.build(plan.schedule, len(stages), plan.microbatches, windows)
    words = tuple(tuple(str(action) for action in of_stage) for of_stage in actions)
    bounds = [*(stage.first_op for stage in plan.stages), len(graph.ops)]
    graphs = tuple(to_bytes(stage) for stage in stages)
    return Layout(plan, stages, graphs, words, tuple(stage_modules(graph, bounds)))


def handover(
    old: Layout, new: Layout, given: Collection[str] = ()
) -> tuple[list[tuple[protocol.Move, ...]], dict[str, tuple[protocol.Gift, ...]]]:
    """How the stages of one layout get the state that those of another have: by new stage what it takes over and from
    whom, and by peer what it gives. Every new stage's parameters and buffers are there, but those that are `given`,
    which can be fetched by their content; a peer keeps what it has."""
    owner: dict[str, str] = {}
    holds: dict[str, set[str]] = {}
    for peer, stage in zip(old.names, old.stages, strict=True):
        holds[peer] = {*stage.parameters, *stage.buffers}
        owner |= {name: peer for name in holds[peer] if name not in stage.copies}
    moves: list[tuple[protocol.Move, ...]] = []
    gifts: dict[str, dict[str, list[str]]] = {}
    for peer, stage in zip(new.names, new.stages, strict=True):
        names = [name for name in (*stage.parameters, *stage.buffers) if name not in given]
        trained = {name for name, parameter in stage.parameters.items() if parameter.requires_grad}
        sources = {n: peer if n in holds.get(peer, ()) and n not in trained else owner[n] for n in names}
        moves.append(tuple(protocol.Move(name, source) for name, source in sources.items()))
        for name, source in sources.items():
            if source != peer:
                gifts.setdefault(source, {}).setdefault(name, []).append(peer)
    return moves, {
        peer: tuple(protocol.Gift(name, tuple(to)) for name, to in given.items()) for peer, given in gifts.items()
    }


def lacking(layout: Layout, given: Mapping[str, str], has: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
    """By peer, the parameters and buffers of its stage that are `given` by their content (by name its digest) and that
    it does not have (by peer, digests): it can fetch them before its stage begins."""
    found = {
        peer: tuple(
            name
            for name in (*stage.parameters, *stage.buffers)
            if name in given and given[name] not in has.get(peer, ())
        )
        for peer, stage in zip(layout.names, layout.stages, strict=True)
    }
    return {peer: names for peer, names in found.items() if names}


def plan(graph: OpGraph, peers: Sequence[Peer], links: Sequence[Link], job: JobConfig) -> Plan:
    """Who runs what, for a job, with the codecs' default costs. Raises `PlanError` if nothing fits."""
    forward, backward = ladders(job, graph)
    return lay_out(job, graph, peers, 1, None, links, forward=forward, backward=backward).plan
