"""What a step would take: the runtime's own schedule, threads and links, played through event by event. Pure.

A peer computes one action after another, in the order that `schedule.build` gives, and has a thread that encodes what
it sends and one that decodes what it gets; none of them waits for another. A directed link carries one message after
the other at its rate, and each is there one latency later, so latency costs no rate. All links from a peer share its
uplink and all links to it its downlink (`flows`). The coordinator sends model inputs ahead of the run: those of the
next step travel during this one. A step ends when the slowest stage is ready and the coordinator's word is back.

The same workload gives the same timeline, to the last bit. Where no two links share an end and no two kinds of message
a link or a codec thread, all is a matter of sums and maxima: nothing that gets faster makes such a step longer.
"""

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .base import COORDINATOR, Action, Direction, Link, Span
from .errors import PlanError
from .flows import Ends, Flows, LinkLoad
from .schedule import Schedule, build


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage. `forward_s` and `backward_s` are of one microbatch, while the peer computes; with a `duty`
    below 1 it rests after each action, having sent what it made. `apply_s` is the optimizer's before the step's first
    action, `finish_s` what follows the last one: gradient norms, and the exchange with replicas."""

    peer: str
    forward_s: float
    backward_s: float
    window: int
    duty: float = 1.0
    apply_s: float = 0.0
    finish_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Message:
    """What stage `src` (None: the coordinator) sends to the stages `to` in each microbatch, or `once` a step, at its
    start: a value after its forward (`direction` F), a gradient after its backward (B). `nbytes` are those on the
    wire, to each of `to`; it is encoded once, and decoded by each."""

    direction: Direction
    src: int | None
    to: tuple[int, ...]
    nbytes: float
    encode_s: float = 0.0
    decode_s: float = 0.0
    once: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """A step of one pipeline.

    `links` are directed, between peers, and from the coordinator; one that is not there costs nothing. `up` and `down`
    are the bytes per second that all links from and to a peer share, of those that are known. `commit_s`: from the last
    stage's report to the start of the next step.
    """

    schedule: str
    microbatches: int
    stages: tuple[StageTimes, ...]
    messages: tuple[Message, ...] = ()
    links: tuple[Link, ...] = ()
    up: Mapping[str, float] = field(default_factory=dict[str, float])
    down: Mapping[str, float] = field(default_factory=dict[str, float])
    commit_s: float = 0.0

    def actions(self) -> Schedule:
        """Raises `PlanError` as `schedule.build` does."""
        return build(self.schedule, len(self.stages), self.microbatches, [stage.window for stage in self.stages])


@dataclass(frozen=True, slots=True)
class Part:
    """What a step waits for: a stage that computes (`kind` stage, `name` its number and peer), the way from one stage's
    peer to another's (`kind` link: encoding, the queue, the link, decoding), the coordinator's word (commit), or the
    next step's inputs (inputs). `seconds` of the step's critical path."""

    kind: str
    name: str
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """How a step goes. `runs` has, by stage, start and end of each action, `rests` the rest after it, `causes` the
    message that it waited for, by number, or -1; `loads` are the links in use, `encode_s` and `decode_s` the seconds by
    stage; `events` is how many things happened."""

    workload: Workload
    step_seconds: float
    runs: tuple[tuple[tuple[float, float], ...], ...]
    rests: tuple[tuple[float, ...], ...]
    causes: tuple[tuple[int, ...], ...]
    loads: tuple[LinkLoad, ...]
    encode_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    events: int

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """By stage, from the step's start: apply, compute, rest, wait, and idle until all are ready."""
        return tuple(_spans(self, s, actions) for s, actions in enumerate(self.workload.actions()))

    @cached_property
    def path(self) -> tuple[Part, ...]:
        """The critical path, added up by part, the longest first: without one of its seconds the step would be shorter,
        until another path is the longest. The sum is the step."""
        return _path(self)

    @property
    def bottleneck(self) -> Part:
        return self.path[0]

    @property
    def why(self) -> str:
        """The bottleneck, in words."""
        part = self.bottleneck
        what = {
            "stage": f"stage {part.name} computes",
            "link": f"{part.name} is on the way",
            "commit": "the coordinator's word is awaited",
            "inputs": "the next step's inputs are on the way",
        }[part.kind]
        return f"for {part.seconds / max(self.step_seconds, 1e-12):.0%} of the step {what}"


Seconds = Sequence[Sequence[tuple[float, float]]]
"""By stage and action: how long the peer computed, and how long it rested then."""


def simulate(workload: Workload, measured: Seconds | None = None) -> Timeline:
    """Play one step. `measured`: the actions' own seconds, where a step that was run is played again. Raises
    `PlanError` for a workload that cannot run: a wrong window, a stage that does not exist."""
    return _Engine(workload, measured).run()


_Delivery = tuple[int, float, float, int]
"""Of a message to one stage: link, bytes, seconds to decode, the stage (-1: nobody waits for it)."""

_END, _ENCODED, _FLOWED, _ARRIVED, _DECODED = range(5)


class _Engine:
    """The state of the simulated world at one moment. Heap entries are (time, number, kind, ...)."""

    def __init__(self, workload: Workload, measured: Seconds | None) -> None:
        self.workload = workload
        self.schedule = workload.actions()
        count = len(workload.stages)
        self.names = [stage.peer for stage in workload.stages]
        self.heap: list[tuple[float, int, int, int, int, int]] = []
        self.number = self.events = 0
        # stages
        self.plans = [[(a.kind == "B", a.microbatch) for a in actions] for actions in self.schedule]
        self.seconds = measured or [
            [typical[backward] for backward, _ in plan]
            for typical, plan in zip(map(_typical, workload.stages), self.plans, strict=True)
        ]
        self.free = [stage.apply_s for stage in workload.stages]
        self.at = [0] * count
        self.running = [False] * count
        self.runs: list[list[tuple[float, float]]] = [[] for _ in range(count)]
        self.causes: list[list[int]] = [[] for _ in range(count)]
        self.once = [0] * count
        inbound = [[0, 0] for _ in range(count)]
        self.encode_free, self.decode_free = [0.0] * count, [0.0] * count
        self.encode_s, self.decode_s = [0.0] * count, [0.0] * count
        # links
        self.network = Flows(workload.links, workload.up, workload.down)
        self.outbound: list[tuple[list[int], list[int]]] = [([], []) for _ in range(count)]
        self.messages: list[tuple[float, list[_Delivery]]] = []
        for number, message in enumerate(workload.messages):
            backward = message.direction == "B"
            self.messages.append((message.encode_s, [self._delivery(message, dst) for dst in message.to]))
            if message.src is not None and not message.once:
                self.outbound[message.src][backward].append(number)
                for dst in message.to:
                    inbound[dst][backward] += 1
            elif message.src is not None:
                for dst in message.to:
                    self.once[dst] += 1
        self.missing = [([f] * workload.microbatches, [b] * workload.microbatches) for f, b in inbound]

    def _delivery(self, message: Message, dst: int) -> _Delivery:
        count = len(self.names)
        if not 0 <= dst < count or not (message.src is None or 0 <= message.src < count):
            raise PlanError(f"a message goes from stage {message.src} to stage {dst}; there are {count} stages")
        src = COORDINATOR if message.src is None else self.names[message.src]
        link = self.network.number(src, self.names[dst])
        return link, message.nbytes, message.decode_s, dst if message.src is not None else -1

    def run(self) -> Timeline:
        workload, heap = self.workload, self.heap
        inputs_s = self._begin()
        pop, network = heapq.heappop, self.network
        while heap:
            now, _, kind, a, b, c = pop(heap)
            if kind == _END:
                self._ended(a, now)
            elif kind == _ARRIVED:
                self._arrived(a, b, c, now)
            elif kind == _FLOWED:
                if network.current(a, b):
                    self._flowed(a, now)
                    inputs_s = max(inputs_s, now) if network.from_coordinator[a] else inputs_s
            elif kind == _ENCODED:
                self._send(a, b, now)
            else:
                self._there(a, b, c, now)
        for s, at in enumerate(self.at):
            if at < len(self.plans[s]):
                raise PlanError(f"{self.schedule[s][at]} can never run: what it waits for is not sent")
        stages = workload.stages
        ready = max(free + stage.finish_s / stage.duty for free, stage in zip(self.free, stages, strict=True))
        return Timeline(
            workload, max(ready + workload.commit_s, inputs_s), tuple(map(tuple, self.runs)),
            tuple(tuple(rest for _, rest in seconds) for seconds in self.seconds),
            tuple(map(tuple, self.causes)), network.loads(), tuple(self.encode_s), tuple(self.decode_s), self.events,
        )  # fmt: skip

    def _begin(self) -> float:
        """What leaves at once: inputs of the next step, shared parameters. Returns when the inputs have left."""
        for s in range(len(self.names)):
            self._try(s, 0.0)
        last = 0.0
        for m in range(self.workload.microbatches):
            for number, message in enumerate(self.workload.messages):
                if message.src is None and not message.once:
                    last = max(last, self._send(number, m, 0.0))
        for number, message in enumerate(self.workload.messages):
            if message.once:
                self._emit(number, -1 if message.src is None else message.src, 0, 0.0)
        return last

    def _push(self, when: float, kind: int, a: int, b: int, c: int = 0) -> None:
        self.number += 1
        heapq.heappush(self.heap, (when, self.number, kind, a, b, c))

    # Stages.

    def _try(self, s: int, now: float, cause: int = -1) -> None:
        """Start the next action, if it has all that it needs; `cause` is the message that came now."""
        at, plan = self.at[s], self.plans[s]
        if self.running[s] or at == len(plan) or self.once[s]:
            return
        backward, microbatch = plan[at]
        if self.missing[s][backward][microbatch]:
            return
        start = now
        if self.free[s] >= now:
            start, cause = self.free[s], -1
        self.running[s] = True
        self.causes[s].append(cause)
        end = start + self.seconds[s][at][0]
        self.runs[s].append((start, end))
        self._push(end, _END, s, 0)

    def _ended(self, s: int, now: float) -> None:
        at = self.at[s]
        backward, microbatch = self.plans[s][at]
        self.events += 1
        self.at[s] += 1
        self.running[s] = False
        self.free[s] = now + self.seconds[s][at][1]
        for number in self.outbound[s][backward]:
            self._emit(number, s, microbatch, now)
        self._try(s, now)

    def _emit(self, number: int, s: int, microbatch: int, now: float) -> None:
        encode_s = self.messages[number][0]
        if encode_s:
            self.events += 1
            self.encode_s[s] += encode_s
            self.encode_free[s] = max(now, self.encode_free[s]) + encode_s
            self._push(self.encode_free[s], _ENCODED, number, microbatch)
        else:
            self._send(number, microbatch, now)

    def _send(self, number: int, microbatch: int, now: float) -> float:
        """Returns when the last copy has left, so far as that is known by now."""
        last, network = now, self.network
        for to, (link, nbytes, _, _) in enumerate(self.messages[number][1]):
            if network.shared[link]:
                if network.enqueue(link, nbytes, (number, to, microbatch)):
                    self._reschedule(network.start(link, now))
            else:
                left = network.carry(link, nbytes, now)
                last = max(last, left)
                self.events += 1
                self._push(left + network.latency[link], _ARRIVED, number, to, microbatch)
        return last

    def _flowed(self, link: int, now: float) -> None:
        network = self.network
        number, to, microbatch = network.done(link)
        self.events += 1
        self._push(now + network.latency[link], _ARRIVED, number, to, microbatch)
        self._reschedule(network.proceed(link, now))

    def _reschedule(self, ends: Ends) -> None:
        for when, link, version in ends:
            self._push(when, _FLOWED, link, version)

    def _arrived(self, number: int, to: int, microbatch: int, now: float) -> None:
        self.events += 1
        _, _, decode_s, dst = self.messages[number][1][to]
        if decode_s and dst >= 0:
            self.events += 1
            self.decode_s[dst] += decode_s
            self.decode_free[dst] = max(now, self.decode_free[dst]) + decode_s
            self._push(self.decode_free[dst], _DECODED, number, dst, microbatch)
        else:
            self._there(number, dst, microbatch, now)

    def _there(self, number: int, dst: int, microbatch: int, now: float) -> None:
        if dst < 0:
            return
        message = self.workload.messages[number]
        if message.once:
            self.once[dst] -= 1
        else:
            self.missing[dst][message.direction == "B"][microbatch] -= 1
        if not self.running[dst]:
            self._try(dst, now, number)


def _typical(stage: StageTimes) -> tuple[tuple[float, float], tuple[float, float]]:
    """(computing, rest) of a forward, and of a backward."""
    slack = 1 / stage.duty - 1
    return (stage.forward_s, stage.forward_s * slack), (stage.backward_s, stage.backward_s * slack)


def _spans(timeline: Timeline, s: int, actions: Sequence[Action]) -> tuple[Span, ...]:
    stage, at, spans = timeline.workload.stages[s], 0.0, list[Span]()

    def until(activity: str, label: str, end: float) -> None:
        nonlocal at
        if end > at:
            spans.append(Span(activity, label, at, end))
            at = end

    until("apply", "optimizer", stage.apply_s)
    for action, (start, end), rest_s in zip(actions, timeline.runs[s], timeline.rests[s], strict=True):
        until("wait", f"for {action}", start)
        until("compute", str(action), end)
        until("rest", str(action), end + rest_s)
    until("compute", "norms", at + stage.finish_s / stage.duty)
    until("idle", "until the step ends", timeline.step_seconds)
    return tuple(spans)


def _path(timeline: Timeline) -> tuple[Part, ...]:
    """Back from the step's end: an action waited for the one before it, or for a message, and so for who sent that."""
    workload = timeline.workload
    names = [f"{s} ({stage.peer})" for s, stage in enumerate(workload.stages)]
    actions = workload.actions()
    number = [{(a.kind, a.microbatch): i for i, a in enumerate(of_stage)} for of_stage in actions]
    ready = [
        runs[-1][1] + rests[-1] + stage.finish_s / stage.duty
        for stage, runs, rests in zip(workload.stages, timeline.runs, timeline.rests, strict=True)
    ]
    s = max(range(len(ready)), key=ready.__getitem__)
    i, at = len(actions[s]) - 1, ready[s]
    found = defaultdict[tuple[str, str], float](float)
    found["commit", "commit"] = workload.commit_s
    found["inputs", "inputs"] = timeline.step_seconds - workload.commit_s - at
    while i >= 0:
        start, cause = timeline.runs[s][i][0], timeline.causes[s][i]
        found["stage", names[s]] += at - start
        at = start
        i -= 1
        if cause >= 0:
            message, action = workload.messages[cause], actions[s][i + 1]
            sender = message.src
            if sender is None:
                break
            here = workload.stages[s].peer
            way = "link", f"{workload.stages[sender].peer} to {here}"
            s = sender
            if message.once:
                found[way] += at
                at, i = 0.0, -1
            else:
                i = number[s][message.direction, action.microbatch]
                found[way] += at - timeline.runs[s][i][1]
                at = timeline.runs[s][i][1]
    found["stage", names[s]] += at
    parts = (Part(kind, name, seconds) for (kind, name), seconds in found.items() if seconds > 0)
    return tuple(sorted(parts, key=lambda part: -part.seconds)) or (Part("stage", names[0], 0.0),)
