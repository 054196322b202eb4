"""The order in which each stage runs its microbatches, as data: build it, check it, keep it in a file. Pure.

A schedule is one list of actions a stage; `2F0` is stage 2, forward, microbatch 0. One builder makes both
GPipe (Huang et al. 2018) and 1F1B (Narayanan et al. 2021): a stage's *window* is how many microbatches it may
hold between their forward and their backward. GPipe's window is all of them; 1F1B's is `p - s` in stage s of
p, from 0. Where transfers take long, larger windows keep the pipeline from starving.

Both forwards and backwards are in ascending microbatch order: buffers such as batch norm's statistics change
in the order of the forwards, and gradients are summed in the order of the backwards. That is what makes a cut
model equal to the uncut one to the last bit.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from .base import Action
from .errors import PlanError

Schedule = list[list[Action]]
"""Actions by stage, each stage's in the order it runs them."""

Edges = Iterable[tuple[int, int]]
"""Pairs (from stage, to stage)."""

KINDS = ("gpipe", "1f1b")


def default_windows(kind: str, num_stages: int, num_microbatches: int) -> list[int]:
    """How many microbatches each stage holds at most, by the schedule's own rule.

    Raises `PlanError` for an unknown kind, or where there is no stage or no microbatch.
    """
    if kind not in KINDS:
        raise PlanError(f"unknown schedule {kind!r}; use one of {', '.join(KINDS)}")
    if num_stages < 1 or num_microbatches < 1:
        raise PlanError(f"a schedule needs at least 1 stage and 1 microbatch, not {num_stages} and {num_microbatches}")
    if kind == "gpipe":
        return [num_microbatches] * num_stages
    return [min(num_stages - s, num_microbatches) for s in range(num_stages)]


def build(kind: str, num_stages: int, num_microbatches: int, windows: Sequence[int] | None = None) -> Schedule:
    """One step's actions. `windows` (one a stage) replaces the kind's own.

    A stage fills its window with forwards, then alternates one backward, one forward, then drains. The window
    in use is the least of its own and those before it: the stage before sends no more until it gets a
    gradient back, so waiting for more would never end. Raises `PlanError` for a wrong kind, size or window.
    """
    allowed = default_windows(kind, num_stages, num_microbatches)
    if windows is not None:
        _check_windows(windows, num_stages)
        allowed = [min(w, num_microbatches) for w in windows]
    return [list(_fill_and_drain(s, w, num_microbatches)) for s, w in enumerate(accumulate(allowed, min))]


def _fill_and_drain(stage: int, window: int, num_microbatches: int) -> Iterator[Action]:
    for forward in range(num_microbatches + window):
        if forward >= window:
            yield Action(stage, "B", forward - window)
        if forward < num_microbatches:
            yield Action(stage, "F", forward)


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """The actions of an evaluation pass."""
    return [[Action(s, "F", m) for m in range(num_microbatches)] for s in range(num_stages)]


def validate(
    schedule: Schedule,
    num_stages: int,
    num_microbatches: int,
    edges: Edges | None = None,
    gradient_edges: Edges | None = None,
    windows: Sequence[int] | None = None,
) -> None:
    """Raise `PlanError` with the first thing that is wrong with a schedule, or return.

    Every forward and backward once and in ascending order, the backward after its forward, `windows`
    respected where given, and nothing waits for ever: a dry run over `edges` (forward values, from the stage
    that makes one to each that reads it; by default from each stage to the next) and `gradient_edges` (by
    default the same ones backwards), both as `graph.stage_edges` gives them.
    """
    if len(schedule) != num_stages:
        raise PlanError(f"the schedule has {len(schedule)} stages, the plan {num_stages}")
    if windows is not None:
        _check_windows(windows, num_stages)
    for s, actions in enumerate(schedule):
        _check_stage(s, actions, num_microbatches, None if windows is None else windows[s])
    forward = {(s, s + 1) for s in range(num_stages - 1)} if edges is None else set(edges)
    gradients = {(b, a) for a, b in forward} if gradient_edges is None else set(gradient_edges)
    for a, b in sorted(forward | gradients):
        if not (0 <= a < num_stages and 0 <= b < num_stages and a != b):
            raise PlanError(f"an edge goes from stage {a} to stage {b}; there are {num_stages} stages")
    _dry_run(schedule, forward, gradients)


def _check_windows(windows: Sequence[int], num_stages: int) -> None:
    if len(windows) != num_stages:
        raise PlanError(f"{len(windows)} windows for {num_stages} stages; give one a stage")
    for s, window in enumerate(windows):
        if window < 1:
            raise PlanError(f"stage {s} has window {window}; a stage must hold at least 1 microbatch")


def _check_stage(stage: int, actions: Sequence[Action], num_microbatches: int, window: int | None) -> None:
    due = {"F": 0, "B": 0}
    for action in actions:
        if action.stage != stage:
            raise PlanError(f"{action} is in the list of stage {stage}; it belongs to stage {action.stage}")
        if action.kind not in due:
            raise PlanError(f"{action} is not a forward or a full backward; a stage runs F and B only")
        if action.microbatch >= num_microbatches:
            raise PlanError(f"{action} does not exist; the microbatches are 0 to {num_microbatches - 1}")
        if action.microbatch != due[action.kind]:
            wrong = "comes twice or late" if action.microbatch < due[action.kind] else "comes too early"
            expected = Action(stage, action.kind, due[action.kind])
            next_one = f"{expected} is next" if due[action.kind] < num_microbatches else "all have run"
            raise PlanError(f"{action} {wrong} ({next_one}); microbatches must run once each, in ascending order")
        due[action.kind] += 1
        if due["B"] > due["F"]:
            raise PlanError(f"{action} comes before its forward {Action(stage, 'F', action.microbatch)}")
        if window is not None and due["F"] - due["B"] > window:
            live = due["F"] - due["B"]
            raise PlanError(f"{action} makes {live} live microbatches; stage {stage} may hold {window}")
    for kind in ("F", "B"):
        if due[kind] < num_microbatches:
            raise PlanError(f"{Action(stage, kind, due[kind])} is missing from stage {stage}")


def _dry_run(schedule: Schedule, forward: set[tuple[int, int]], gradients: set[tuple[int, int]]) -> None:
    """Run every action as soon as what it needs is there; whatever is left can never run."""
    sources: dict[str, list[list[int]]] = {
        kind: [sorted(a for a, b in pairs if b == s) for s in range(len(schedule))]
        for kind, pairs in (("F", forward), ("B", gradients))
    }
    done: set[Action] = set()
    at = [0] * len(schedule)
    waiting: dict[Action, list[int]] = {}

    def missing(action: Action) -> Action | None:
        needs = (Action(a, action.kind, action.microbatch) for a in sources[action.kind][action.stage])
        return next((need for need in needs if need not in done), None)

    runnable = list(range(len(schedule)))
    while runnable:
        stage = runnable.pop()
        while at[stage] < len(schedule[stage]):
            action = schedule[stage][at[stage]]
            need = missing(action)
            if need is not None:
                waiting.setdefault(need, []).append(stage)
                break
            done.add(action)
            at[stage] += 1
            runnable.extend(waiting.pop(action, ()))

    for stage, actions in enumerate(schedule):
        if at[stage] < len(actions):
            action = actions[at[stage]]
            need = missing(action)
            assert need is not None
            blocker = schedule[need.stage][at[need.stage]]
            where = "" if blocker == need else f", which comes after {blocker}, itself stuck"
            raise PlanError(f"the schedule deadlocks: {action} can never run, it waits for {need}{where}")


def to_csv(schedule: Schedule) -> str:
    """One line a stage, one word an action."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule)


def from_csv(text: str) -> Schedule:
    """The inverse of `to_csv`. Raises `PlanError` naming the line and the word that is not an action."""
    schedule: Schedule = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            schedule.append([Action.parse(word.strip()) for word in line.split(",") if word.strip()])
        except PlanError as error:
            raise PlanError(f"line {number}: {error}") from None
    return schedule
