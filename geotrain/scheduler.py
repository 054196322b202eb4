"""What was measured of peers, links and codecs, and the plans that follow from it. Pure.

A plan begins with what a survey said and goes on with what the steps say. Where a part is not as planned, the planner
is asked again, with the figures of today; the run goes over to another plan where that is worth its cost.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from . import events, replan
from .base import CodecUse, Link, LinkUse, Peer, Plan, StageReport, Trial
from .blocks import BlockTime, CostModel, Profile, to_measure
from .codecs.ladder import RAW, Rates, Rung, extra_steps, with_relatives
from .config import JobConfig
from .cost import optimizer_states
from .errors import PlanError
from .graph import OpGraph, to_bytes
from .layout import Layout, handover, lacking, ladders, lay_out
from .links import LinkBook, Pair, Probe
from .planner.make import standstill
from .simulator import Timeline, simulate
from .workload import workload

_RECENT = 5
"""So many steps say how fast a peer is."""

_PROBE_EVERY_S = 5.0

_BESIDE_S = 0.002
"""What a microbatch may cost a stage beside its computing. More is the peer's speed."""

_PREPARING_S = 1.0
"""What a change of the plan costs beside what it moves, until one has shown it: stages are built and begin."""

_ANSWER_S, _ANSWER_STEPS = 5.0, 2
"""A test frame should be there by then: one that arrives at a stage is told with that step's report."""

_RUINED = 1e6
"""A relative squared error of gradients that stands for all worse ones, and for those that are not finite."""

SENSITIVITY = 0.1
"""Extra steps for each unit of a microbatch gradient's relative squared error. Errors of different microbatches are
independent, and a step's mean has less of them than a gradient has noise of its own."""

Known = Sequence[tuple[Peer, str]]
"""Peers, as they introduced themselves, and the kind of each."""


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that a plan is made from, as it is at one moment. `doubtful`: links that were not measured since
    something was not as planned."""

    peers: tuple[Peer, ...]
    links: tuple[Link, ...]
    costs: CostModel
    codecs: Mapping[str, Rates]
    commit_s: float
    forward: tuple[Rung, ...]
    backward: tuple[Rung, ...]
    doubtful: frozenset[Pair]

    def peers_by_flops(self) -> tuple[Peer, ...]:
        """The peers, as fast as one has to take them to be who knows the model's FLOPs but not the blocks' times."""
        end, by_flops = len(self.costs.graph.ops), CostModel(self.costs.graph)
        found: list[Peer] = []
        for peer in self.peers:
            ratio = sum(by_flops.seconds(peer, 0, end)) / sum(self.costs.seconds(peer, 0, end))
            found.append(replace(peer, flops_per_s=peer.flops_per_s * ratio))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Found:
    """What came of looking for a better plan. `layout` is None if the run stays with the plan that it has. `doubtful`:
    links that the better plan or the way to it rests on, to be tried before it is believed. `lacking`: by peer the
    frozen weights that it needs for it, to be fetched before, which should take `copy_s`."""

    layout: Layout | None
    reason: str
    doubtful: tuple[Pair, ...] = ()
    lacking: Mapping[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])
    copy_s: float = 0.0


class Scheduler:
    """Plans for one job. Times are seconds on one clock."""

    def __init__(self, job: JobConfig, graph: OpGraph) -> None:
        self._job, self._graph = job, graph
        self._ladders = ladders(job, graph)
        self._max_extra_steps = extra_steps(job.compression.max_loss_increase)
        self._book = LinkBook()
        self._profiles: dict[str, Profile] = {}
        self._costs = CostModel(graph)
        self._speeds: dict[str, deque[float]] = {}
        self._idle_speeds: dict[str, float] = {}
        self._scales: dict[str, float] = {}
        self._idle: dict[replan.Part, float] = {}
        self._codecs: dict[str, CodecUse] = {}
        self._overheads: deque[float] = deque(maxlen=_RECENT)
        self._watch: replan.Watch | None = None
        self._layout: Layout | None = None
        self._predicted: dict[str, float] = {}
        self._plan_peers: dict[str, Peer] = {}
        self._step_s = self._probed_s = self._took_s = self._changed_s = 0.0
        self._commits: deque[float] = deque(maxlen=1 + replan.PATIENCE)
        self._used: set[Pair] = set()
        self._moving_s: float | None = None
        self._preparations: deque[float] = deque(maxlen=_RECENT)
        self._trials: dict[int, Trial] = {}
        self._cost_factor = 1.0

    # What is seen.

    def saw(self, uses: Iterable[LinkUse], start_s: float, end_s: float, *, probe: bool = False) -> None:
        """What receivers saw of links."""
        self._book.saw(uses, start_s, end_s, probe=probe)

    def to_measure(self, peer: Peer, kind: str) -> tuple[bytes, ...]:
        """Blocks that a peer of this kind should time: none if one of its kind has been asked already."""
        if kind in self._profiles:
            return ()
        self._profiles[kind] = Profile(1.0, {})
        return tuple(to_bytes(block.graph) for block in to_measure(self._graph, peer))

    def measured(self, peer: Peer, kind: str, flops_per_s: float, times: Sequence[BlockTime]) -> None:
        """What came of `to_measure`. A peer that answers something else is not believed."""
        if flops_per_s <= 0:
            return  # it was not asked
        found = to_measure(self._graph, peer)
        seconds = [s for time in times for s in (time.forward_s, time.input_gradient_s, time.weight_gradient_s)]
        sound = all(0 <= s < math.inf for s in seconds) and all(time.forward_s > 0 for time in times)
        if len(times) == len(found) and sound:
            by_signature = {block.signature: time for block, time in zip(found, times, strict=True)}
            self._profiles[kind] = Profile(flops_per_s, by_signature)

    def tried(self, trial: Trial) -> events.Tried | None:
        """What one stage says of a trial. When all have spoken: what the codecs do, unless the gradients are not finite
        without them either."""
        if self._layout is None:
            return None
        self._trials = {n: t for n, t in self._trials.items() if t.step == trial.step} | {trial.stage: trial}
        if len(self._trials) < len(self._layout.plan.stages):
            return None
        trials, self._trials = list(self._trials.values()), {}
        raw = sum(t.raw for t in trials)
        if not math.isfinite(raw):
            return None  # the model's own doing: its step tells
        error = sum(t.difference for t in trials) / raw if raw > 0 else 0.0
        error = min(error, _RUINED) if error == error else _RUINED
        losses = next((t.losses for t in trials if t.losses), (0.0, 0.0))
        expected = plan_cost(self._layout.plan, *self._ladders)
        if expected > 0:
            self._cost_factor = max(1.0, SENSITIVITY * error / expected)
        cost = SENSITIVITY * error
        return events.Tried(trial.step, error, losses[1] - losses[0], cost, self._max_extra_steps)

    def rested(self, name: str, flops_per_s: float, uses: Collection[LinkUse], start_s: float, end_s: float) -> None:
        """What a peer without a stage can do now (0: it has not tried again), and what it saw of the links to it. Work
        tells more of a speed than such a test, which then tells how it changes."""
        self._book.saw(uses, start_s, end_s, probe=True)
        for use in uses:
            self._idle["link", use.src, use.dst] = use.busy_s / use.timed_bytes
        if flops_per_s > 0:
            if worked := self._speeds.pop(name, None):
                self._scales[name] = median(worked) / flops_per_s
            self._idle_speeds[name] = flops_per_s * self._scales.get(name, 1.0)
            self._idle["stage", name] = 1 / self._idle_speeds[name]

    def began(self, layout: Layout, question: Question, now_s: float, given: Collection[str] | None = None) -> Timeline:
        """A plan comes into force. Returns how a step of it should go. `given`: it takes its state over from the plan
        before, but for these weights."""
        self._moving_s = None
        if given is not None and self._layout is not None:
            weights, _ = self._moves(self._layout, layout, given)
            self._moving_s = _seconds(weights, question)
        self._layout, self._step_s = layout, now_s
        self._plan_peers = {peer.name: peer for peer in question.peers}
        timeline = self._simulated(layout, question)
        self._watch = _watching(timeline, question)
        self._idle.clear()
        self._used = {(load.src, load.dst) for load in timeline.loads}
        self._predicted = {stage.peer: stage.forward_s + stage.backward_s for stage in timeline.workload.stages}
        return timeline

    def stays(self, question: Question) -> None:
        """The plan goes on, and was compared with others that some peers were not there for when it began."""
        if self._watch is not None and self._layout is not None:
            now = _watching(self._simulated(self._layout, question), question)
            self._watch = replan.watching_more(self._watch, now)

    def prepared(self, now_s: float) -> None:
        """All stages of the plan that began last are ready."""
        if self._moving_s is not None:
            self._preparations.append(max(0.0, now_s - self._step_s - self._moving_s))
        self._step_s = now_s

    def committed(self, event: events.StepCommitted, now_s: float) -> tuple[replan.Deviation, ...]:
        """A step is over: what is not as planned any more."""
        uses = [use for report in event.stages for use in report.links]
        self._book.saw(uses, self._step_s, now_s)
        self._step_s = now_s
        for report in event.stages:
            self._add(report)
        self._took_s = event.seconds
        self._commits.append(now_s)
        self._overheads.append(max(0.0, event.seconds - max(report.seconds for report in event.stages)))
        if self._watch is None:
            return ()
        figures = {**self._idle, **replan.measured(event.stages, self._job.train.microbatches)}
        self._idle.clear()
        self._watch, deviations = replan.observe(self._watch, figures)
        if deviations:
            self._changed_s = self._commits[0]
        return deviations

    def _add(self, report: StageReport) -> None:
        figures = replan.measured([report], self._job.train.microbatches)
        seconds, predicted = figures["stage", report.peer], self._predicted.get(report.peer, 0.0)
        if seconds > 0 and predicted > 0:
            seconds = min(seconds, max(predicted, seconds - _BESIDE_S))
            speed = self._plan_peers[report.peer].flops_per_s * predicted / seconds
            self._speeds.setdefault(report.peer, deque(maxlen=_RECENT)).append(speed)
        for use in report.codecs:
            self._codecs[use.codec] = self._codecs.get(use.codec, CodecUse("", use.codec)).plus(use)

    def probes(self, names: Collection[str], now_s: float) -> list[Probe]:
        """Test frames to be sent now."""
        if now_s - self._probed_s < _PROBE_EVERY_S:
            return []
        self._probed_s = now_s
        suspected = replan.suspected(self._watch) if self._watch is not None else ()
        pairs = {(part[1], part[2]) for part in suspected if part[0] == "link"}
        return self._book.probes(names, now_s, pairs - self._used)

    def tests(self, pairs: Iterable[Pair]) -> list[Probe]:
        """Test frames for links in doubt."""
        return [self._book.test(pair) for pair in pairs]

    def answered(self, tests: Iterable[Probe], sent_s: float, now_s: float) -> bool:
        """Whether the wait for test frames is over. One that is not there in time is known to be so slow at least."""
        left = [test for test in tests if self._book.seen_s((test.src, test.dst)) < sent_s]
        waited_s = now_s - sent_s
        if waited_s < max(_ANSWER_S, _ANSWER_STEPS * self._took_s):
            return not left
        for test in left:  # each by itself: they tell nothing of an end that they share
            self._book.saw([LinkUse(test.src, test.dst, 0, test.nbytes, waited_s, None)], sent_s, now_s, probe=True)
        return True

    # What follows.

    def links(self, names: Collection[str], now_s: float) -> list[Link]:
        """As they are believed to be."""
        return self._book.links(names, now_s)

    def ask(self, known: Known, now_s: float) -> Question:
        """All that is known at this moment of these peers."""
        up, down = self._book.caps()
        peers = tuple(
            replace(
                peer, flops_per_s=self._speed(peer), up_bytes_per_s=up.get(peer.name, peer.up_bytes_per_s),
                down_bytes_per_s=down.get(peer.name, peer.down_bytes_per_s),
            )
            for peer, _ in known
        )  # fmt: skip
        kinds = {peer.name: kind for peer, kind in known}
        profiles = {kind: profile for kind, profile in self._profiles.items() if profile.times}
        seen = {name: rates(use) for name, use in self._codecs.items() if use.elements and name != RAW.codec}
        for ladder in self._ladders:
            seen = with_relatives(seen, ladder)
        commit_s = median(self._overheads) if self._overheads else 0.0
        names = [peer.name for peer in peers]
        links = tuple(self._book.links(names, now_s))
        doubtful = self._book.doubtful(names, self._changed_s)
        if (kinds, profiles) != (self._costs.kinds, self._costs.profiles):
            self._costs = CostModel(self._graph, kinds, profiles)
        forward, backward = (self._ladder(ladder, seen) for ladder in self._ladders)
        return Question(peers, links, self._costs, seen, commit_s, forward, backward, doubtful)

    def _ladder(self, rungs: Sequence[Rung], seen: Mapping[str, Rates]) -> tuple[Rung, ...]:
        """What this job knows of codecs: their bytes and seconds as far as they or their like were used, their costs
        as far as they were tried."""
        found: list[Rung] = []
        for rung in rungs:
            rung = replace(rung, cost=rung.cost * self._cost_factor)
            if of := seen.get(rung.codec):
                rung = replace(
                    rung, bytes_per_element=of.nbytes, seen=True, encode_seconds_per_element=of.encode_s,
                    decode_seconds_per_element=of.decode_s or rung.decode_seconds_per_element,
                )  # fmt: skip
            found.append(rung)
        return tuple(found)

    def codecs(self, plan: Plan) -> tuple[str, ...]:
        """All that the run may compress with while this plan's stages are where they are."""
        chosen = {rung.codec for ladder in self._ladders for rung in ladder}
        chosen |= {codec for stage in plan.stages for codec in (stage.codec_forward, stage.codec_backward)}
        return tuple(sorted(chosen))

    def budget_shares(self, question: Question, plan: Plan) -> tuple[tuple[float, float], ...]:
        """By stage, how much of the loss budget the codecs of its values and of its gradients take."""
        budget, last = self._max_extra_steps or math.inf, len(plan.stages) - 1
        costs = _stage_costs(plan, question.forward, question.backward)
        return tuple((f / budget * (i < last), b / budget * (i > 0)) for i, (f, b) in enumerate(costs))

    def lay_out(self, question: Question, epoch: int, given: Plan | None = None, near: Plan | None = None) -> Layout:
        """A plan (or the `given` one) and what its stages are told; `near` is the plan that runs now. Raises
        `PlanError` if there is none."""
        return lay_out(
            self._job, self._graph, question.peers, epoch, given, question.links, question.costs,
            forward=question.forward, backward=question.backward, near=near,
        )  # fmt: skip

    def better(
        self,
        question: Question,
        layout: Layout,
        steps_left: int,
        because: Sequence[str],
        given: Mapping[str, str],
        has: Mapping[str, Collection[str]],
        patient: bool = True,
    ) -> Found:
        """Whether another plan than that of `layout` is worth going over to.

        Args:
            because: what made us ask, for the reason.
            given: digests of the frozen weights that can be fetched, by name.
            has: those that each peer has, by peer.
            patient: such weights are fetched before, and not while the run stands still.
        """
        current, budget = layout.plan, self._max_extra_steps
        cost = plan_cost(current, question.forward, question.backward)
        try:
            proposed = self.lay_out(question, current.epoch, near=current)
        except PlanError as error:
            return Found(None, f"no other plan: {error}")
        if cost > budget * (1 + 1e-9):
            return Found(proposed, f"the codecs cost {cost:.1%} more steps, and may cost {budget:.1%}")
        lacks = lacking(proposed, given, has)
        (moves, following), copies = self._moves(layout, proposed, given), self._copies(layout, lacks)
        if not patient:
            moves, copies, lacks = [*moves, *copies], [], {}
        now, then = self._simulated(layout, question), self._simulated(proposed, question)
        copy_s, all_s = _seconds(copies, question), _seconds([*moves, *following], question)
        stall_s = standstill(_seconds(moves, question), all_s, then.step_seconds)
        stall_s += median(self._preparations) if self._preparations else _PREPARING_S
        verdict = replan.decide(
            current, proposed.plan, now_s=now.step_seconds, proposed_s=then.step_seconds, steps_left=steps_left,
            copy_s=copy_s, stall_s=stall_s, because=because,
        )  # fmt: skip
        if isinstance(verdict, replan.Switch):
            new = {(load.src, load.dst) for load in then.loads} | {(move.src, move.dst) for move in moves}
            new -= {(load.src, load.dst) for load in now.loads}  # these are seen in each step
            return Found(proposed, verdict.reason, tuple(sorted(new & question.doubtful)), lacks, copy_s)
        return Found(None, "; ".join([*because, verdict.reason]))

    def _simulated(self, layout: Layout, question: Question) -> Timeline:
        return simulate(
            workload(
                layout.plan, layout.stages, question.costs, question.peers, question.links, question.codecs,
                question.commit_s,
            )
        )  # fmt: skip

    def _speed(self, peer: Peer) -> float:
        seen = self._speeds.get(peer.name)
        return median(seen) if seen else self._idle_speeds.get(peer.name, peer.flops_per_s)

    def _moves(
        self, old: Layout, new: Layout, given: Collection[str]
    ) -> tuple[list[replan.Transfer], list[replan.Transfer]]:
        """What the stages of one layout hand over to those of another: weights and buffers, and the optimizers' state,
        which follows."""
        _, gifts = handover(old, new, given)
        train, weights, following = self._job.train, list[replan.Transfer](), list[replan.Transfer]()
        for src, of in gifts.items():
            for name, dst in ((gift.name, dst) for gift in of for dst in gift.to):
                nbytes, parameter = self._weight_bytes(name), self._graph.parameters.get(name)
                weights.append(replan.Transfer(src, dst, nbytes))
                if parameter is not None and parameter.requires_grad:
                    nbytes *= optimizer_states(train.optimizer, train.momentum)
                    following.append(replan.Transfer(src, dst, nbytes))
        return weights, following

    def _copies(self, old: Layout, lacks: Mapping[str, Collection[str]]) -> list[replan.Transfer]:
        """Weights that peers fetch: as if from those whose stages have them."""
        owner = {
            name: peer
            for peer, stage in zip(old.names, old.stages, strict=True)
            for name in (*stage.parameters, *stage.buffers)
        }
        return [
            replan.Transfer(owner[name], dst, self._weight_bytes(name))
            for dst, names in lacks.items()
            for name in names
        ]

    def _weight_bytes(self, name: str) -> int:
        """Of a parameter or buffer."""
        return (self._graph.parameters.get(name) or self._graph.buffers[name]).spec.nbytes


def _seconds(transfers: Iterable[replan.Transfer], question: Question) -> float:
    up = {peer.name: peer.up_bytes_per_s for peer in question.peers}
    down = {peer.name: peer.down_bytes_per_s for peer in question.peers}
    return replan.copy_seconds(transfers, question.links, up, down)


def _watching(timeline: Timeline, question: Question) -> replan.Watch:
    return replan.watching(timeline, question.links, {peer.name: peer.flops_per_s for peer in question.peers})


def rates(use: CodecUse) -> Rates:
    """Decoding is timed where a message is sampled."""
    decode_s = use.decode_s / use.sampled_bytes * use.raw_bytes if use.sampled_bytes else 0.0
    return Rates(use.encode_s / use.elements, decode_s / use.elements, use.wire_bytes / use.elements)


def plan_cost(plan: Plan, forward: Sequence[Rung], backward: Sequence[Rung]) -> float:
    """The fraction of extra steps that all codecs of a plan cost together."""
    costs = _stage_costs(plan, forward, backward)
    return math.prod([1 + f for f, _ in costs[:-1]] + [1 + b for _, b in costs[1:]]) - 1


def _stage_costs(plan: Plan, forward: Sequence[Rung], backward: Sequence[Rung]) -> list[tuple[float, float]]:
    """Of each stage's codecs, for values and for gradients. The last stage sends no values, the first no gradients."""
    values, gradients = ({rung.codec: rung.cost for rung in ladder} for ladder in (forward, backward))
    return [(values.get(stage.codec_forward, 0.0), gradients.get(stage.codec_backward, 0.0)) for stage in plan.stages]
