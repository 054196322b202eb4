"""Whether to go on with a plan: predicted against measured, and what a change gains against what it costs. Pure.

    watch = watching(timeline, links)                    # when a plan begins; `timeline` is its simulation
    watch, deviations = observe(watch, measured(...))    # after each step
    if deviations:                                       # ask the planner, with the links and speeds as they are now
        verdict = decide(now, proposed, steps_left=..., stall_s=...)

A part (a peer's computing, a link) deviates when it was off by more than `TOLERANCE` in each of the last `PATIENCE`
steps, always to the same side, and a step could differ by `LEAST_GAIN` for it. Then what was measured is what is
expected from now on, so that one change asks once, and noise of 10% never does. The new plan comes if it saves more
in its first `HORIZON` steps (or the rest of the run, if that is shorter) than it costs to go over, and `LEAST_GAIN` of
the step at least.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

from .base import Link, Plan, StageReport
from .simulator import Timeline
from .words import duration

PATIENCE = 3
TOLERANCE = 1.25
SETTLE = 1
"""The first steps of a plan are not compared: caches fill, and states still arrive."""

HORIZON = 30
LEAST_GAIN = 0.03
BACKGROUND = 0.1
"""What a second of copying costs while the run goes on: the copy takes a part of the links."""

Part = tuple[str, ...]
"""("stage", peer) or ("link", src, dst)."""

Figures = Mapping[Part, float]
"""Seconds of computing for each microbatch, seconds for each byte on a link; by part."""


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
        what = self.part[1] if self.part[0] == "stage" else f"the link from {self.part[1]} to {self.part[2]}"
        factor = max(self.ratio, 1 / self.ratio)
        return f"{what} is {factor:.1f} times {'slower' if self.ratio > 1 else 'faster'} than planned"


@dataclass(frozen=True, slots=True)
class Watch:
    """What is expected of the running plan, the last figures of each part, and how many steps still to pass over.
    `amounts`: how many microbatches or bytes each part has in a step of `step_s`; a part without one always matters."""

    expected: Figures
    seen: Mapping[Part, tuple[float, ...]] = field(default_factory=dict[Part, tuple[float, ...]])
    settling: int = SETTLE
    amounts: Mapping[Part, float] = field(default_factory=dict[Part, float])
    step_s: float = 0.0

    def matters(self, part: Part, expected: float, measured: float) -> bool:
        """Whether the difference of a part could change the step by as much as a new plan has to gain."""
        amount = self.amounts.get(part)
        return amount is None or abs(measured - expected) * amount >= LEAST_GAIN * self.step_s


def watching(timeline: Timeline, links: Iterable[Link] = ()) -> Watch:
    """For a plan that begins. A link that it leaves unused would have as many bytes as its busiest one."""
    figures = expected(timeline, links)
    amounts: dict[Part, float] = {("link", load.src, load.dst): load.nbytes for load in timeline.loads}
    most = max(amounts.values(), default=0.0)
    for part in figures:
        amounts.setdefault(part, timeline.workload.microbatches if part[0] == "stage" else most)
    return Watch(figures, amounts=amounts, step_s=timeline.step_seconds)


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
        off = min(last) > now[part] * TOLERANCE or max(last) * TOLERANCE < now[part]
        if off and len(last) == PATIENCE and watch.matters(part, now[part], fmean(last)):
            found.append(Deviation(part, now[part], fmean(last)))
            now[part] = fmean(last)
    found.sort(key=lambda deviation: (-max(deviation.ratio, 1 / deviation.ratio), deviation.part))
    return replace(watch, expected=now, seen=seen), tuple(found)


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
    """State that goes from one peer to another when the plan changes."""

    src: str
    dst: str
    nbytes: int


def transfers(current: Plan, proposed: Plan, state_bytes: Callable[[int, int], int]) -> tuple[Transfer, ...]:
    """Who must send how much: ops that a peer gets and did not have. `state_bytes(first_op, end_op)` is what a stage of
    those ops keeps between steps: parameters, buffers, optimizer state.

    >>> from geotrain.base import Stage
    >>> def plan(cut):
    ...     return Plan("", "1f1b", 4, (Stage("anna", 0, cut, 2), Stage("ben", cut, 10, 1)))
    >>> transfers(plan(5), plan(7), lambda first, end: 100 * (end - first))
    (Transfer(src='ben', dst='anna', nbytes=200),)
    """
    found: dict[tuple[str, str], int] = {}
    for new in proposed.stages:
        for old in current.stages:
            first, end = max(new.first_op, old.first_op), min(new.end_op, old.end_op)
            if first < end and new.peer != old.peer:
                pair = old.peer, new.peer
                found[pair] = found.get(pair, 0) + state_bytes(first, end)
    return tuple(Transfer(src, dst, nbytes) for (src, dst), nbytes in sorted(found.items()))


def copy_seconds(
    moves: Iterable[Transfer],
    links: Iterable[Link],
    up: Mapping[str, float] | None = None,
    down: Mapping[str, float] | None = None,
) -> float:
    """How long the transfers take when all go at once: the slowest link, uplink or downlink. A pair that is not in
    `links` costs nothing."""
    rates = {(link.src, link.dst): link.rate_bytes_per_s for link in links}
    longest, out, into = 0.0, dict[str, int](), dict[str, int]()
    for move in moves:
        longest = max(longest, move.nbytes / rates.get((move.src, move.dst), float("inf")))
        out[move.src] = out.get(move.src, 0) + move.nbytes
        into[move.dst] = into.get(move.dst, 0) + move.nbytes
    for totals, caps in ((out, up or {}), (into, down or {})):
        longest = max(longest, *(nbytes / caps[peer] for peer, nbytes in totals.items() if peer in caps), 0.0)
    return longest


def balance(
    now_s: float,
    proposed_s: float,
    steps_left: int,
    copy_s: float,
    border_s: float = 0.0,
    background: bool = True,
    horizon: int = HORIZON,
) -> tuple[float, float]:
    """What going over to another plan saves in its first `horizon` steps, and what it costs: (seconds, seconds). Of
    several plans, that with the largest difference is best. Steps that pass while state is copied in the background
    save nothing; the horizon begins after them, since a copy that no longer promises anything is given up.

    >>> balance(2.0, 1.0, 100, copy_s=20.0)  # 10 steps pass meanwhile
    (30.0, 2.0)
    >>> balance(2.0, 1.0, 30, copy_s=20.0)
    (20.0, 2.0)
    >>> balance(2.0, 1.0, 100, copy_s=20.0, background=False)
    (30.0, 20.0)
    """
    copied = min(float(steps_left), copy_s / now_s) if background else 0.0
    saved_s = (now_s - proposed_s) * min(float(horizon), steps_left - copied)
    return saved_s, border_s + (BACKGROUND * copied * now_s if background else copy_s)


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
    border_s: float = 0.0,
    background: bool = True,
    horizon: int = HORIZON,
    because: Sequence[Deviation] = (),
) -> Keep | Switch:
    """Keep the current plan or go over to the proposed one.

    Args:
        now_s, proposed_s: seconds of a step under each, both simulated with what was measured last.
        steps_left: of the run.
        copy_s: to move the state (`copy_seconds`); 0 for codecs and windows.
        border_s: that the run stands still at the step border, whatever moves.
        background: the copy is made while the run goes on.
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
    moving = kind != "codecs"
    saved_s, stall_s = balance(now_s, proposed_s, steps_left, copy_s * moving, border_s * moving, background, horizon)
    if saved_s <= stall_s:
        steps = min(horizon, steps_left)
        return Keep(f"the change costs {duration(stall_s)} and saves {duration(saved_s)} in {steps} steps")
    cost = f", which costs {duration(stall_s)}" if stall_s else ""
    reason = f"{duration(now_s)} a step, {duration(proposed_s)} after the change{cost}"
    return Switch(kind, "; ".join([*map(str, because), reason]))
