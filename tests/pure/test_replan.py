"""When a plan is asked for, and when it is taken."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.base import Link, LinkUse, Plan, Span, Stage, StageReport
from geotrain.replan import (
    PATIENCE,
    Keep,
    Switch,
    Transfer,
    Watch,
    change,
    copy_seconds,
    decide,
    expected,
    measured,
    observe,
    watching,
)
from geotrain.simulator import Message, StageTimes, Workload, simulate

PARTS = {("stage", "anna"): 0.5, ("stage", "ben"): 0.7, ("link", "anna", "ben"): 1e-6}


def plan(*cuts, names=("anna", "ben", "cleo"), **changes):
    bounds = [0, *cuts, 30]
    stages = [Stage(n, a, b, 2, **changes) for n, a, b in zip(names, bounds, bounds[1:], strict=False)]
    return Plan("", "1f1b", 4, tuple(stages))


@given(st.integers(0, 10**6))
def test_jitter_of_ten_percent_asks_for_nothing_in_200_steps(seed):
    noise, watch = random.Random(seed), Watch(PARTS)
    for _ in range(200):
        watch, deviations = observe(watch, {part: value * noise.uniform(0.9, 1.1) for part, value in PARTS.items()})
        assert not deviations


@given(st.integers(0, 10**6), st.sampled_from([0.1, 1 / 3, 3.0, 10.0]), st.sampled_from(list(PARTS)))
def test_one_change_asks_once_and_its_end_asks_once(seed, factor, part):
    noise, watch, asked = random.Random(seed), Watch(PARTS), []
    for step in range(120):
        now = {
            p: v * noise.uniform(0.9, 1.1) * (factor if p == part and 40 <= step < 80 else 1) for p, v in PARTS.items()
        }
        watch, deviations = observe(watch, now)
        asked += [(step, deviation) for deviation in deviations]
    assert [step for step, _ in asked] == [40 + PATIENCE - 1, 80 + PATIENCE - 1]
    assert all(deviation.part == part for _, deviation in asked)
    assert asked[0][1].ratio == pytest.approx(factor, rel=0.25)


def test_single_outliers_ask_for_nothing():
    watch, asked = Watch(PARTS), []
    for step in range(60):
        factor = 5.0 if step % 3 else 1.0
        watch, deviations = observe(watch, {part: value * factor for part, value in PARTS.items()})
        asked += deviations
    assert not asked


def test_what_cannot_change_the_step_asks_for_nothing():
    """Anna computes for a hundredth of the step, and so long is each link busy."""
    stages = (StageTimes("anna", 0.0005, 0.0005, 2), StageTimes("ben", 0.05, 0.05, 1))
    links = [Link("anna", "ben", 1e8, 0.0), Link("ben", "anna", 1e8, 0.0), Link("ben", "cleo", 1e8, 0.0)]
    messages = Message("F", 0, (1,), 1e5), Message("B", 1, (0,), 1e5)
    watch = replace(watching(simulate(Workload("1f1b", 4, stages, messages, tuple(links))), links), settling=0)
    usual, asked = watch.expected, []
    for factor in (2.5, 0.4, 2.5, 20.0):
        small = {part: value * factor for part, value in usual.items() if part != ("stage", "ben")}
        asked.append(set())
        for _ in range(PATIENCE):
            watch, deviations = observe(watch, small)
            asked[-1] |= {deviation.part for deviation in deviations}
    assert asked == [set(), set(), set(), set(usual) - {("stage", "ben")}]


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_an_idle_peer_that_changes_asks_once_and_one_that_trembles_never(factor):
    """Cleo has no stage and tells its speed every other step."""
    stages = StageTimes("anna", 0.1, 0.2, 2), StageTimes("ben", 0.1, 0.1, 1)
    timeline = simulate(Workload("1f1b", 4, stages, (Message("F", 0, (1,), 1e5),), ()))
    speeds = {"anna": 1e9, "ben": 1e9, "cleo": 1e9}
    watch = replace(watching(timeline, speeds=speeds), settling=0)
    asked = []
    for step in range(80):
        now = (factor if 20 <= step < 50 else 1.0) * (0.9, 1.1)[step // 2 % 2]
        watch, deviations = observe(watch, {("stage", "cleo"): 1e-9 * now} if step % 2 == 0 else {})
        asked += [(step, deviation.part) for deviation in deviations]
    assert asked == [(20 + 2 * (PATIENCE - 1), ("stage", "cleo")), (50 + 2 * (PATIENCE - 1), ("stage", "cleo"))]


def test_an_idle_peer_too_slow_to_matter_asks_for_nothing():
    """With all that the busiest stage computes, it would save a fortieth of the step."""
    stages = StageTimes("anna", 0.0005, 0.0005, 2), StageTimes("ben", 10.0, 10.0, 1)
    timeline = simulate(Workload("1f1b", 1, stages, (Message("F", 0, (1,), 1e5),), ()))
    watch = replace(watching(timeline, speeds={"anna": 1e9, "ben": 1e3, "cleo": 1e6}), settling=0)
    for _ in range(PATIENCE):
        watch, deviations = observe(watch, {("stage", "cleo"): 0.5e-6})
        assert not deviations


def test_the_worst_deviation_comes_first_and_is_told_in_words():
    watch = Watch(PARTS, settling=0)
    for _ in range(PATIENCE):
        watch, deviations = observe(
            watch, {("stage", "ben"): 1.4, ("link", "anna", "ben"): 1e-5, ("stage", "new"): 9.0}
        )
    assert [str(d) for d in deviations] == [
        "the link from anna to ben is 10.0 times slower than planned", "ben is 2.0 times slower than planned",
    ]  # fmt: skip


def test_expected_and_measured_speak_of_the_same():
    """A step as simulated, told as stages would tell it: no part deviates."""
    stages = (StageTimes("anna", 0.1, 0.2, 2, duty=0.5), StageTimes("ben", 0.3, 0.3, 1))
    messages = (Message("F", 0, (1,), 1e6), Message("B", 1, (0,), 2e6))
    links = (Link("anna", "ben", 1e7, 0.01), Link("ben", "anna", 4e6, 0.01), Link("ben", "cleo", 1e6, 0.0))
    timeline = simulate(Workload("1f1b", 4, stages, messages, links))
    uses = [LinkUse(x.src, x.dst, int(x.nbytes), int(x.nbytes), x.busy_s, None) for x in timeline.loads]
    reports = [
        StageReport(
            0, s, stage.peer, True, {}, [], timeline.step_seconds, timeline.spans[s],
            tuple(use for use in uses if use.dst == stage.peer), 0,
        )
        for s, stage in enumerate(stages)
    ]  # fmt: skip
    want, got = expected(timeline, links), measured(reports, 4)
    assert got == pytest.approx({part: want[part] for part in got})
    assert set(want) - set(got) == {("link", "ben", "cleo")}
    assert want["link", "ben", "cleo"] == 1e-6
    assert got["bytes", "anna", "ben"] == 4e6


def test_more_bytes_than_planned_are_a_deviation_of_their_own():
    watch = Watch({("bytes", "anna", "ben"): 1e6}, settling=0, amounts={("bytes", "anna", "ben"): 1e-6}, step_s=2.0)
    for _ in range(PATIENCE):
        watch, deviations = observe(watch, {("bytes", "anna", "ben"): 2.1e6})
    assert [str(d) for d in deviations] == ["2.1 times the bytes that were planned go from anna to ben"]


def test_spans_outside_compute_do_not_count():
    spans = (Span("wait", "x", 0.0, 5.0), Span("compute", "0F0", 5.0, 6.0), Span("rest", "0F0", 6.0, 7.0))
    report = StageReport(0, 0, "anna", True, {}, [], 7.0, spans, (), 0)
    assert measured([report], 2) == {("stage", "anna"): 1.0}


def test_change_names_the_largest_difference():
    base = plan(10, 20)
    assert change(base, replace(base, epoch=7, step_seconds=3.0)) == "nothing"
    assert change(base, plan(10, 20, codec_forward="int8")) == "codecs"
    assert change(base, plan(10, 20, recompute=True)) == "windows"
    assert change(base, plan(10, 21, codec_forward="int8")) == "layers"
    assert change(base, plan(10, 20, names=("ben", "anna", "cleo"))) == "layers"


def test_copies_wait_for_the_slowest_link_or_end():
    moves = [Transfer("anna", "ben", 100), Transfer("anna", "cleo", 100)]
    links = [Link("anna", "ben", 50.0, 0.1), Link("anna", "cleo", 20.0, 0.1)]
    assert copy_seconds(moves, links) == 5.0
    assert copy_seconds(moves, links, up={"anna": 25.0}) == 8.0
    assert copy_seconds(moves, links, down={"cleo": 10.0}) == 10.0
    assert copy_seconds([], links, up={"anna": 25.0}) == 0.0


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.integers(0, 1000), st.floats(0, 1e4), st.floats(0, 1e3))
def test_a_switch_always_pays_within_the_horizon(now_s, proposed_s, left, copy_s, stall_s):
    verdict = decide(
        plan(10, 20), plan(11, 20), now_s=now_s, proposed_s=proposed_s, steps_left=left, copy_s=copy_s, stall_s=stall_s
    )
    copied = min(left, copy_s / now_s)
    cost_s = stall_s + 0.1 * copied * now_s
    pays = (now_s - proposed_s) * min(30, left - copied) > cost_s and now_s - proposed_s >= 0.03 * now_s
    assert isinstance(verdict, Switch if pays else Keep)


def test_codecs_cost_no_stall():
    verdict = decide(
        plan(10, 20),
        plan(10, 20, codec_forward="int8"),
        now_s=1.0,
        proposed_s=0.9,
        steps_left=1,
        copy_s=1e9,
        stall_s=9.0,
    )
    assert verdict == Switch("codecs", "1 s a step, 0.9 s after the change")
