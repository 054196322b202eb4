"""Orders of microbatches: every property that exactness and memory rest on, and golden tables."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.base import Action
from geotrain.errors import PlanError
from geotrain.schedule import (
    Schedule,
    build,
    default_windows,
    forward_only,
    from_csv,
    to_csv,
    validate,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "schedules"
KINDS = st.sampled_from(["gpipe", "1f1b"])
STAGES = st.integers(1, 7)
MICROBATCHES = st.integers(1, 12)


Case = tuple[int, int, list[int], set[tuple[int, int]]]
"""Stages, microbatches, windows, forward edges."""


def most_live(actions: list[Action]) -> int:
    live = most = 0
    for action in actions:
        live += {"F": 1, "B": -1}[action.kind]
        most = max(most, live)
    return most


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 4), (4, 2), (4, 8)])
def test_golden(kind: str, stages: int, microbatches: int) -> None:
    golden = (GOLDEN / f"{kind}_{stages}_stages_{microbatches}_microbatches.csv").read_text()
    assert to_csv(build(kind, stages, microbatches)) == golden


def test_golden_windows() -> None:
    golden = (GOLDEN / "windows_6_4_1_of_8_microbatches.csv").read_text()
    assert to_csv(build("1f1b", 3, 8, [6, 4, 1])) == golden


@given(KINDS, STAGES, MICROBATCHES)
def test_built_schedules_are_valid(kind: str, stages: int, microbatches: int) -> None:
    windows = default_windows(kind, stages, microbatches)
    validate(build(kind, stages, microbatches), stages, microbatches, windows=windows)


@given(STAGES, MICROBATCHES)
def test_1f1b_holds_p_minus_s(stages: int, microbatches: int) -> None:
    for s, actions in enumerate(build("1f1b", stages, microbatches)):
        assert most_live(actions) == min(stages - s, microbatches)
        assert [a.microbatch for a in actions if a.kind == "B"] == list(range(microbatches))


@st.composite
def windowed(draw: st.DrawFn) -> Case:
    stages, microbatches = draw(STAGES), draw(MICROBATCHES)
    windows = draw(st.lists(st.integers(1, 15), min_size=stages, max_size=stages))
    pairs = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
    edges = set(draw(st.lists(st.sampled_from(pairs), unique=True))) if pairs else set[tuple[int, int]]()
    return stages, microbatches, windows, edges


@given(windowed())
def test_any_windows_and_skip_edges_run_to_the_end(
    case: Case,
) -> None:
    stages, microbatches, windows, edges = case
    validate(build("1f1b", stages, microbatches, windows), stages, microbatches, edges, windows=windows)


@given(KINDS, STAGES, MICROBATCHES)
def test_csv_round_trips(kind: str, stages: int, microbatches: int) -> None:
    schedule = build(kind, stages, microbatches)
    assert from_csv(to_csv(schedule)) == schedule


@given(STAGES, MICROBATCHES, st.randoms(use_true_random=False))
def test_a_damaged_schedule_is_refused(stages: int, microbatches: int, rng: random.Random) -> None:
    """Dropping, repeating or swapping an action never passes, unless the swap is itself a valid order."""
    schedule = build("1f1b", stages, microbatches)
    row = rng.choice(schedule)
    index = rng.randrange(len(row))
    if rng.random() < 0.5:
        del row[index]
    else:
        row.insert(rng.randrange(len(row) + 1), row[index])
    with pytest.raises(PlanError):
        validate(schedule, stages, microbatches)


def words(*rows: str) -> Schedule:
    return from_csv("\n".join(rows))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (["0F0,0B0,0F1,0B1"], "has 1 stages, the plan 2"),
        (["0F0,0F1,0B0,0B1", "1F0,1B0,1F1"], "1B1 is missing from stage 1"),
        (["0F0,0F1,0B0,0B1", "1F0,1B0,0F1,1B1"], "0F1 is in the list of stage 1"),
        (["0F0,0F1,0B1,0B0", "1F0,1F1,1B0,1B1"], "0B1 comes too early .0B0 is next"),
        (["0F1,0F0,0B0,0B1", "1F0,1F1,1B0,1B1"], "0F1 comes too early"),
        (["0F0,0F1,0B0,0B1,0B1", "1F0,1F1,1B0,1B1"], "0B1 comes twice or late .all have run"),
        (["0F0,0F1,0B0,0B1", "1B0,1F0,1F1,1B1"], "1B0 comes before its forward 1F0"),
        (["0F0,0F1,0B0,0B1", "1F0,1F1,1F2,1B0"], "1F2 does not exist"),
        (["0F0,0F1,0B0,0B1", "1F0,1I0,1W0,1F1"], "1I0 is not a forward or a full backward"),
        (["0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"], "0B0 can never run, it waits for 1B0.* after 1F1"),
    ],
)  # fmt: skip
def test_validate_says_what_is_wrong(rows: list[str], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        validate(words(*rows), 2, 2)


def test_windows_are_enforced() -> None:
    schedule = build("gpipe", 2, 3)
    with pytest.raises(PlanError, match="0F2 makes 3 live microbatches; stage 0 may hold 2"):
        validate(schedule, 2, 3, windows=[2, 1])


def test_a_cycle_of_values_is_named() -> None:
    schedule = build("1f1b", 2, 1)
    with pytest.raises(PlanError, match=r"0F0 can never run, it waits for 1F0$"):
        validate(schedule, 2, 1, edges=[(0, 1), (1, 0)])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("zigzag", 2, 2), "unknown schedule 'zigzag'; use one of gpipe, 1f1b"),
        (("1f1b", 0, 2), "at least 1 stage"),
        (("1f1b", 2, 0), "at least 1 stage and 1 microbatch"),
        (("1f1b", 2, 2, [1]), "1 windows for 2 stages"),
        (("1f1b", 2, 2, [1, 0]), "stage 1 has window 0"),
    ],
)
def test_build_refuses(arguments: tuple[str, int, int], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        build(*arguments)


def test_edges_out_of_range_are_refused() -> None:
    with pytest.raises(PlanError, match="from stage 0 to stage 5"):
        validate(build("1f1b", 2, 1), 2, 1, edges=[(0, 5)], gradient_edges=[])


def test_forward_only() -> None:
    assert to_csv(forward_only(2, 3)) == "0F0,0F1,0F2\n1F0,1F1,1F2\n"


def test_csv_names_the_wrong_word() -> None:
    with pytest.raises(PlanError, match="line 2: '1X0' is not an action"):
        from_csv("0F0\n1X0\n")
