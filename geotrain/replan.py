"""Whether to go on with a plan: predicted against measured, and what a change gains against what it costs. Pure.

    watch = watching(timeline, links, speeds)            # when a plan begins; `timeline` is its simulation
    watch, deviations = observe(watch, measured(...))    # after each step, with what was seen of idle peers meanwhile
    if deviations:                                       # ask the planner, with the links and speeds as they are now
        verdict = decide(now, proposed, steps_left=..., copy_s=..., stall_s=...)

A part (a peer's computing, a link, the bytes that cross it) deviates when it was off by more than `TOLERANCE` in each
of the last `PATIENCE` steps, always to the same side, and a step could differ by `LEAST_GAIN` for it. Then what was
measured is what is expected from now on, so that one change asks once, and noise of 10% never does. The new plan comes
if it saves more in its first `HORIZON` steps (or the rest of the run, if that is shorter) than it costs to go over, and
`LEAST_GAIN` of the step at least. Peers and links that the plan leaves idle are watched like those that it uses: when
one of them gets faster, a plan that was not worth it may be.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

from .base import Link, Plan, StageReport
from .planner.make import BACKGROUND, HORIZON, LEAST_GAIN
from .simulator import Timeline
from .words import duration

PATIENCE = 3
TOLERANCE = 1.25
SETTLE = 1
"""The first steps of a plan are not compared: caches fill, and states still arrive."""

Part = tuple[str, ...]
"""("stage", peer), also of a peer without one, ("link", src, dst) or ("bytes", src, dst)."""

Figures = Mapping[Part, float]
"""By part: seconds of computing for each microbatch, of an idle peer for each FLOP; seconds for each byte on a link;
bytes of a step."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """A part that is not what the plan was made for."""

    part: Part
    expected: float
    measured: float

    @property
    def ratio(self) -> float:
        """Above 1: slower than expected."""
        return self.measured / self.expected

    def __str__(self) -> str:
        if self.part[0] == "bytes":
            return f"{self.ratio:.1f} times the bytes that were planned go from {self.part[1]} to {self.part[2]}"
        what = self.part[1] if self.part[0] == "stage" else f"the link from {self.part[1]} to {self.part[2]}"
        factor = max(self.ratio, 1 / self.ratio)
        return f"{what} is {factor:.1f} times {'slower' if self.ratio > 1 else 'faster'} than planned"


@dataclass(frozen=True, slots=True)
class Watch:
    """What is expected of the running plan, the last figures of each part, and how many steps still to pass over.
    `amounts`: what a part's figure is multiplied by to be seconds of a step of `step_s` (microbatches, FLOPs, bytes, or
    seconds for each byte); a part without one always matters."""

    expected: Figures
    seen: Mapping[Part, tuple[float, ...]] = field(default_factory=dict[Part, tuple[float, ...]])
    settling: int = SETTLE
    amounts: Mapping[Part, float] = field(default_factory=dict[Part, float])
    step_s: float = 0.0

    def matters(self, part: Part, expected: float, measured: float) -> bool:
        """Whether the difference of a part could change the step by as much as a new plan has to gain."""
        amount = self.amounts.get(part)
        return amount is None or abs(measured - expected) * amount >= LEAST_GAIN * self.step_s


def watching(timeline: Timeline, links: Iterable[Link] = (), speeds: Mapping[str, float] | None = None) -> Watch:
    """For a plan that begins; `speeds` are the FLOP/s of peers. A link that it leaves idle would have as many bytes as
    its busiest one, and an idle peer as many FLOPs as its busiest stage."""
    figures, speeds, load = expected(timeline, links), speeds or {}, timeline.workload
    amounts: dict[Part, float] = {("link", x.src, x.dst): x.nbytes for x in timeline.loads}
    most = max(amounts.values(), default=0.0)
    amounts |= {("bytes", *part[1:]): figures[part] for part in amounts if part in figures}
    for part in figures:
        amounts.setdefault(part, load.microbatches if part[0] == "stage" else most)
    flops = (load.microbatches * figures["stage", stage.peer] * speeds.get(stage.peer, 0.0) for stage in load.stages)
    busiest = max(flops)
    for peer in speeds.keys() - {stage.peer for stage in load.stages}:
        figures["stage", peer], amounts["stage", peer] = 1 / speeds[peer], busiest
    return Watch(figures, amounts=amounts, step_s=timeline.step_seconds)


def watching_more(watch: Watch, now: Watch) -> Watch:
    """For a plan that stays while there are more peers and links than when it began: those are expected to be as a
    watch that begins `now` has them."""
    return replace(watch, expected={**now.expected, **watch.expected}, amounts={**now.amounts, **watch.amounts})


def expected(timeline: Timeline, links: Iterable[Link] = ()) -> dict[Part, float]:
    """What a plan's simulation says of each part; of `links` that it leaves unused, their rates."""
    figures: dict[Part, float] = {
        ("link", link.src, link.dst): 1 / link.rate_bytes_per_s for link in links if link.rate_bytes_per_s > 0
    }
    for stage in timeline.workload.stages:
        figures["stage", stage.peer] = (stage.forward_s + stage.backward_s) / stage.duty
    for load in timeline.loads:
        if load.nbytes > 0 and load.busy_s > 0:
            figures["link", load.src, load.dst] = load.busy_s / load.nbytes
            figures["bytes", load.src, load.dst] = load.nbytes
    return figures


def measured(reports: Iterable[StageReport], microbatches: int) -> dict[Part, float]:
    """The same of one step, from what its stages tell. Links whose messages were too short to time are missing."""
    figures: dict[Part, float] = {}
    for report in reports:
        actions = (span for span in report.spans if span.activity in ("compute", "rest") and span.label != "norms")
        busy_s = sum(span.end_s - span.start_s for span in actions)
        figures["stage", report.peer] = busy_s / microbatches
        for use in report.links:
            if use.timed_bytes > 0:
                figures["link", use.src, use.dst] = use.busy_s / use.timed_bytes
                figures["bytes", use.src, use.dst] = use.nbytes
    return figures


def observe(watch: Watch, figures: Figures) -> tuple[Watch, tuple[Deviation, ...]]:
    """After a step: the watch to go on with, and what deviates, the worst first. Parts that are not expected, or not
    measured this time, are passed over.

    >>> watch = Watch({("stage", "anna"): 1.0}, settling=0)
    >>> for seconds in (3.0, 3.1, 2.9, 3.0):
    ...     watch, deviations = observe(watch, {("stage", "anna"): seconds})
    ...     print([str(d) for d in deviations])
    []
    []
    ['anna is 3.0 times slower than planned']
    []
    """
    if watch.settling > 0:
        return replace(watch, settling=watch.settling - 1), ()
    seen, now, found = dict(watch.seen), dict(watch.expected), list[Deviation]()
    for part in figures.keys() & watch.expected.keys():
        last = seen[part] = (*seen.get(part, ()), figures[part])[-PATIENCE:]
        if len(last) == PATIENCE and _off(last, now[part]) and watch.matters(part, now[part], fmean(last)):
            found.append(Deviation(part, now[part], fmean(last)))
            now[part] = fmean(last)
    found.sort(key=lambda deviation: (-max(deviation.ratio, 1 / deviation.ratio), deviation.part))
    return replace(watch, expected=now, seen=seen), tuple(found)


def suspected(watch: Watch) -> set[Part]:
    """Parts that were off when they were seen last, and may deviate when they are seen again.

    >>> watch = Watch({("link", "anna", "ben"): 1e-6}, settling=0)
    >>> for figure in (1e-7, 1e-7, 1e-7):
    ...     watch, _ = observe(watch, {("link", "anna", "ben"): figure})
    ...     print(len(suspected(watch)))
    1
    1
    0
    """
    latest = {part: last[-1] for part, last in watch.seen.items()}
    return {
        part for part, figure in latest.items()
        if _off([figure], watch.expected[part]) and watch.matters(part, watch.expected[part], figure)
    }  # fmt: skip


def _off(figures: Sequence[float], expected: float) -> bool:
    return min(figures) > expected * TOLERANCE or max(figures) * TOLERANCE < expected


Change = Literal["nothing", "codecs", "windows", "layers"]
"""What differs between two plans: codecs apply at the next step; windows need new schedules, and no state moves;
layers move."""


def change(current: Plan, proposed: Plan) -> Change:
    def layers(plan: Plan) -> list[tuple[str, int, int]]:
        return [(stage.peer, stage.first_op, stage.end_op) for stage in plan.stages]

    def schedule(plan: Plan) -> tuple[str, int, list[tuple[int, bool]]]:
        return plan.schedule, plan.microbatches, [(stage.window, stage.recompute) for stage in plan.stages]

    def codecs(plan: Plan) -> list[tuple[str, str]]:
        return [(stage.codec_forward, stage.codec_backward) for stage in plan.stages]

    if layers(current) != layers(proposed):
        return "layers"
    if schedule(current) != schedule(proposed):
        return "windows"
    return "codecs" if codecs(current) != codecs(proposed) else "nothing"


@dataclass(frozen=True, slots=True)
class Transfer:
    """State or weights that go from one peer to another when the plan changes."""

    src: str
    dst: str
    nbytes: int


def copy_seconds(
    moves: Iterable[Transfer],
    links: Iterable[Link],
    up: Mapping[str, float] | None = None,
    down: Mapping[str, float] | None = None,
) -> float:
    """How long the transfers take when all go at once: the slowest link, uplink or downlink. A pair that is not in
    `links` costs nothing."""
    rates = {(link.src, link.dst): link.rate_bytes_per_s for link in links}
    between, out, into = Counter[Any](), Counter[Any](), Counter[Any]()
    for move in moves:
        between[move.src, move.dst] += move.nbytes
        out[move.src] += move.nbytes
        into[move.dst] += move.nbytes
    ways: list[tuple[Counter[Any], Mapping[Any, float]]] = [(between, rates), (out, up or {}), (into, down or {})]
    return max((nbytes / by[way] for totals, by in ways for way, nbytes in totals.items() if way in by), default=0.0)


def balance(
    now_s: float, proposed_s: float, steps_left: int, copy_s: float = 0.0, stall_s: float = 0.0, horizon: int = HORIZON
) -> tuple[float, float]:
    """What going over to another plan saves in its first `horizon` steps, and what it costs: (seconds, seconds). Of
    several plans, that with the largest difference is best. Steps that pass while weights are copied in the background,
    for `copy_s`, save nothing; the horizon begins after them, since a copy that no longer promises anything is given
    up. Then the run stands still for `stall_s`.

    >>> balance(2.0, 1.0, 100, copy_s=20.0)  # 10 steps pass meanwhile
    (30.0, 2.0)
    >>> balance(2.0, 1.0, 30, copy_s=20.0)
    (20.0, 2.0)
    >>> balance(2.0, 1.0, 100, stall_s=20.0)
    (30.0, 20.0)
    """
    copied = min(float(steps_left), copy_s / now_s)
    saved_s = (now_s - proposed_s) * min(float(horizon), steps_left - copied)
    return saved_s, stall_s + BACKGROUND * copied * now_s


@dataclass(frozen=True, slots=True)
class Keep:
    reason: str


@dataclass(frozen=True, slots=True)
class Switch:
    """Go over; `change` says how much of the run it touches."""

    change: Change
    reason: str


def decide(
    current: Plan,
    proposed: Plan,
    *,
    now_s: float,
    proposed_s: float,
    steps_left: int,
    copy_s: float = 0.0,
    stall_s: float = 0.0,
    horizon: int = HORIZON,
    because: Sequence[str] = (),
) -> Keep | Switch:
    """Keep the current plan or go over to the proposed one.

    Args:
        now_s, proposed_s: seconds of a step under each, both simulated with what was measured last.
        steps_left: of the run.
        copy_s: to copy weights while the run goes on (`copy_seconds`).
        stall_s: that the run stands still at the step border while state moves and stages begin. Codecs need neither.
        horizon: how many steps things are likely to stay as they are.
        because: what made us ask, for the reason.

    >>> from geotrain.base import Stage
    >>> a = Plan("", "1f1b", 4, (Stage("anna", 0, 5, 2), Stage("ben", 5, 9, 1)))
    >>> b = Plan("", "1f1b", 4, (Stage("anna", 0, 7, 2), Stage("ben", 7, 9, 1)))
    >>> decide(a, b, now_s=2.0, proposed_s=1.5, steps_left=500, copy_s=20.0)
    Switch(change='layers', reason='2 s a step, 1.5 s after the change, which costs 2 s')
    >>> decide(a, b, now_s=2.0, proposed_s=1.5, steps_left=13, copy_s=20.0)
    Keep(reason='the change costs 2 s and saves 1.5 s in 13 steps')
    >>> decide(a, b, now_s=2.0, proposed_s=1.99, steps_left=500)
    Keep(reason='no plan is faster than this one by 3%')
    """
    kind = change(current, proposed)
    gain_s = now_s - proposed_s
    if kind == "nothing" or gain_s < LEAST_GAIN * now_s:
        return Keep(f"no plan is faster than this one by {LEAST_GAIN:.0%}")
    if kind == "codecs":
        copy_s = stall_s = 0.0
    saved_s, cost_s = balance(now_s, proposed_s, steps_left, copy_s, stall_s, horizon)
    if saved_s <= cost_s:
        steps = min(horizon, steps_left)
        return Keep(f"the change costs {duration(cost_s)} and saves {duration(saved_s)} in {steps} steps")
    cost = f", which costs {duration(cost_s)}" if cost_s else ""
    reason = f"{duration(now_s)} a step, {duration(proposed_s)} after the change{cost}"
    return Switch(kind, "; ".join([*because, reason]))
