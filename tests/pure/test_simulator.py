"""The simulator on cases whose answer is known, and what must hold in all."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.base import COORDINATOR, Link
from geotrain.errors import PlanError
from geotrain.schedule import default_windows
from geotrain.simulator import Message, StageTimes, Workload, simulate
from geotrain.windows import fitted


def chain(stages, *, microbatches=4, rate=1e6, latency=0.0, nbytes=(1e5, 1e5), windows=None, **changes):
    """A pipeline of (forward, backward) seconds; the same bytes and links between all neighbors."""
    count, names = len(stages), [f"p{i}" for i in range(len(stages))]
    windows = windows or default_windows("1f1b", count, microbatches)
    times = tuple(StageTimes(n, f, b, w) for n, (f, b), w in zip(names, stages, windows, strict=True))
    forward = [Message("F", s, (s + 1,), nbytes[0]) for s in range(count - 1)]
    backward = [Message("B", s, (s - 1,), nbytes[1]) for s in range(1, count)]
    links = [Link(a, b, rate, latency) for a, b in pairwise(names)]
    links += [Link(link.dst, link.src, rate, latency) for link in links]
    return Workload("1f1b", microbatches, times, (*forward, *backward), tuple(links), **changes)


def test_one_peer_only_computes():
    timeline = simulate(chain([(0.25, 0.5)], commit_s=0.125))
    assert timeline.step_seconds == 4 * 0.75 + 0.125
    assert timeline.runs[0][:3] == ((0.0, 0.25), (0.25, 0.75), (0.75, 1.0))
    assert timeline.why == "for 96% of the step stage 0 (p0) computes"


def test_one_microbatch_goes_there_and_back():
    timeline = simulate(chain([(1.0, 2.0), (3.0, 4.0)], microbatches=1, latency=0.5, nbytes=(1e6, 2e6)))
    assert timeline.step_seconds == 1 + (1 + 0.5) + 3 + 4 + (2 + 0.5) + 2
    assert [(load.nbytes, load.busy_s) for load in timeline.loads] == [(1e6, 1.0), (2e6, 2.0)]
    parts = {(part.kind, part.name): part.seconds for part in timeline.path}
    assert parts == {
        ("stage", "1 (p1)"): 7.0, ("link", "p1 to p0"): 2.5, ("stage", "0 (p0)"): 3.0, ("link", "p0 to p1"): 1.5,
    }  # fmt: skip


def test_a_link_carries_one_message_after_the_other_and_its_latency_costs_no_rate():
    """Stage 0 makes 4 values at once; each takes 1 s on the link and arrives 10 s later."""
    timeline = simulate(chain([(0.0, 0.0), (0.0, 0.0)], rate=1e5, latency=10.0, windows=[4, 4]))
    assert [start for start, _ in timeline.runs[1][:4]] == [11.0, 12.0, 13.0, 14.0]
    assert timeline.step_seconds == 14.0 + 11.0 + 3.0


def test_codec_threads_neither_wait_for_compute_nor_compute_for_them():
    workload = chain([(1.0, 1.0), (1.0, 1.0)], rate=1e9, nbytes=(0, 0), windows=[4, 4])
    first, *rest = workload.messages
    workload = replace(workload, messages=(replace(first, encode_s=2.0, decode_s=3.0), *rest))
    timeline = simulate(workload)
    assert [end for _, end in timeline.runs[0][:4]] == [1.0, 2.0, 3.0, 4.0]
    assert [start for start, _ in timeline.runs[1][:4]] == [
        6.0,
        9.0,
        12.0,
        15.0,
    ]  # encoded at 3, 5, ...; decoded in 3 s
    assert timeline.encode_s == (8.0, 0.0) and timeline.decode_s == (0.0, 12.0)


def test_a_peer_rests_after_it_has_sent():
    workload = chain([(1.0, 1.0), (1.0, 1.0)], rate=1e9, nbytes=(0, 0), windows=[4, 4])
    resting = replace(workload.stages[0], duty=0.5)
    timeline = simulate(replace(workload, stages=(resting, workload.stages[1])))
    assert [end for _, end in timeline.runs[0][:3]] == [1.0, 3.0, 5.0]
    assert timeline.runs[1][0][0] == 1.0
    assert [span.activity for span in timeline.spans[0][:3]] == ["compute", "rest", "compute"]


def test_flows_share_an_uplink():
    """Stage 0 sends to 1 and 2 (a skip edge) over an uplink of 1 MB/s; alone each link would carry 1 MB/s."""
    stages = tuple(StageTimes(f"p{i}", 0.0, 0.0, 1) for i in range(3))
    messages = (Message("F", 0, (1,), 1e6), Message("F", 0, (2,), 3e6), Message("F", 1, (2,), 0))
    timeline = simulate(Workload("gpipe", 1, stages, messages, up={"p0": 1e6}))
    assert timeline.runs[1][0][0] == 2.0  # half of the uplink each
    assert timeline.runs[2][0][0] == 4.0  # and then all of it
    assert {(load.dst, load.busy_s) for load in timeline.loads} == {("p1", 2.0), ("p2", 4.0), ("p2", 0.0)}
    slow = Link("p0", "p2", 0.25e6, 0.0)
    timeline = simulate(Workload("gpipe", 1, stages, messages, (slow,), up={"p0": 1e6}))
    assert timeline.runs[1][0][0] == pytest.approx(1 / 0.75)  # what the slow link cannot use is left to the other
    assert timeline.runs[2][0][0] == 12.0


def test_one_value_for_two_stages_is_encoded_once_and_sent_twice():
    stages = tuple(StageTimes(f"p{i}", 0.0, 0.0, 1) for i in range(3))
    timeline = simulate(Workload("gpipe", 1, stages, (Message("F", 0, (1, 2), 1e6, 0.5, 0.25),), up={"p0": 1e6}))
    assert timeline.encode_s == (0.5, 0.0, 0.0) and timeline.decode_s == (0.0, 0.25, 0.25)
    assert timeline.runs[1][0][0] == timeline.runs[2][0][0] == 2.75


def test_shared_parameters_come_once_before_the_first_action():
    workload = chain([(1.0, 1.0), (1.0, 1.0)], nbytes=(0, 0))
    once = Message("F", 0, (1,), 5e6, once=True)
    timeline = simulate(replace(workload, messages=(*workload.messages, once)))
    assert timeline.runs[1][0][0] == 5.0
    assert timeline.loads[0].nbytes == 5e6


def test_inputs_of_the_next_step_travel_during_this_one():
    workload = chain([(1.0, 1.0)])
    inputs = Message("F", None, (0,), 1e6)
    fast, slow = (Link(COORDINATOR, "p0", rate, 0.1) for rate in (1e6, 0.1e6))
    assert simulate(replace(workload, messages=(inputs,), links=(fast,))).step_seconds == 8.0
    timeline = simulate(replace(workload, messages=(inputs,), links=(slow,)))
    assert timeline.step_seconds == 40.0
    assert timeline.bottleneck.kind == "inputs"


def test_the_optimizer_goes_before_the_first_action_and_norms_after_the_last():
    workload = chain([(1.0, 1.0), (1.0, 1.0)], microbatches=1, nbytes=(0, 0))
    first, last = workload.stages
    stages = (replace(first, apply_s=0.5, finish_s=0.25), replace(last, apply_s=9.0))
    timeline = simulate(replace(workload, stages=stages))
    assert timeline.step_seconds == 9.0 + 1 + 1 + 1 + 0.25
    assert [(s.activity, s.label) for s in timeline.spans[0]] == [
        ("apply", "optimizer"), ("compute", "0F0"), ("wait", "for 0B0"), ("compute", "0B0"), ("compute", "norms"),
    ]  # fmt: skip


def test_small_windows_starve_on_slow_links():
    """1F1B's own windows against ones of a round trip over the period, on links of 1 s."""
    stages = [(1.0, 2.0)] * 3
    own = simulate(chain(stages, microbatches=16, latency=4.0))
    wide = simulate(chain(stages, microbatches=16, latency=4.0, windows=[10, 6, 1]))
    assert wide.step_seconds < 0.62 * own.step_seconds
    assert own.bottleneck.kind == "link" and wide.bottleneck.kind == "stage"


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (Message("F", 0, (7,), 1.0), "from stage 0 to stage 7; there are 2 stages"),
        (Message("F", 1, (0,), 1.0), "0F0 can never run"),
    ],
)
def test_a_workload_that_cannot_run_is_refused(message, problem):
    workload = chain([(1.0, 1.0), (1.0, 1.0)])
    with pytest.raises(PlanError, match=problem):
        simulate(replace(workload, messages=(*workload.messages, message)))
    with pytest.raises(PlanError, match="no rate"):
        simulate(replace(workload, links=(Link("p0", "p1", 0.0, 0.0),)))


seconds = st.floats(0.001, 2.0)
NEVER = st.just(False)


@st.composite
def chains(draw, shared=NEVER):
    count, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    windows = draw(st.lists(st.integers(1, 8), min_size=count, max_size=count))
    workload = chain(
        [(draw(seconds), draw(seconds)) for _ in range(count)],
        microbatches=microbatches, windows=windows, latency=draw(st.floats(0, 1)), rate=draw(st.floats(1e4, 1e6)),
        nbytes=(draw(st.floats(0, 1e5)), draw(st.floats(0, 1e5))), commit_s=draw(st.floats(0, 1)),
    )  # fmt: skip
    codec = st.one_of(st.just(0.0), seconds)
    messages = tuple(replace(m, encode_s=draw(codec), decode_s=draw(codec)) for m in workload.messages)
    workload = replace(workload, messages=messages)
    if draw(shared):
        caps = {stage.peer: draw(st.floats(1e4, 1e6)) for stage in workload.stages}
        workload = replace(workload, up=caps, down=caps)
    return workload


@settings(max_examples=60, deadline=None)
@given(chains(shared=st.booleans()))
def test_the_same_workload_gives_the_same_timeline_and_never_beats_its_parts(workload):
    timeline = simulate(workload)
    assert simulate(workload) == timeline
    count, step = workload.microbatches, timeline.step_seconds * (1 + 1e-9) + 1e-9
    compute_s = [count * (stage.forward_s + stage.backward_s) for stage in workload.stages]
    for busy in (*compute_s, *timeline.encode_s, *timeline.decode_s):
        assert step >= busy + workload.commit_s
    rates = {(link.src, link.dst): link.rate_bytes_per_s for link in workload.links}
    for load in timeline.loads:
        assert step >= load.busy_s >= load.nbytes / rates[load.src, load.dst] * (1 - 1e-9) - 1e-9
    for caps, end in ((workload.up, "src"), (workload.down, "dst")):
        for peer, cap in caps.items():
            assert step * cap >= sum(load.nbytes for load in timeline.loads if getattr(load, end) == peer)
    there_and_back = sum(stage.forward_s + stage.backward_s for stage in workload.stages)
    there_and_back += sum(m.encode_s + m.decode_s for m in workload.messages)
    there_and_back += sum(load.nbytes / count / rates[load.src, load.dst] for load in timeline.loads)
    there_and_back += sum(link.latency_s for link in workload.links)
    assert step >= there_and_back
    assert sum(part.seconds for part in timeline.path) == pytest.approx(timeline.step_seconds)
    for spans in timeline.spans:
        assert all(a.end_s == b.start_s for a, b in pairwise(spans))
        assert spans[0].start_s == 0 and spans[-1].end_s == pytest.approx(timeline.step_seconds)


@settings(max_examples=60, deadline=None)
@given(chains(), st.data())
def test_nothing_that_gets_faster_makes_a_step_longer(workload, data):
    """Without shared ends; see the module."""
    faster = st.floats(0.1, 1.0)
    stages = tuple(
        replace(s, forward_s=s.forward_s * data.draw(faster), backward_s=s.backward_s * data.draw(faster))
        for s in workload.stages
    )
    links = tuple(
        Link(x.src, x.dst, x.rate_bytes_per_s / data.draw(faster), x.latency_s * data.draw(faster))
        for x in workload.links
    )
    messages = tuple(
        replace(m, nbytes=m.nbytes * data.draw(faster), encode_s=m.encode_s * data.draw(faster))
        for m in workload.messages
    )
    better = replace(workload, stages=stages, links=links, messages=messages)
    assert simulate(better).step_seconds <= simulate(workload).step_seconds * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.lists(seconds, min_size=2, max_size=5), st.floats(0, 1), st.floats(0.001, 1.5), st.integers(32, 48))
def test_with_fitted_windows_a_step_takes_what_the_closed_form_says(compute, latency, transfer, microbatches):
    """Step = (M - 1) T + sum of compute + transfers both ways. Fill and drain may overlap with other work."""
    workload = chain(
        [(c / 3, 2 * c / 3) for c in compute], microbatches=microbatches, latency=latency, rate=1e5 / transfer
    )
    windows = fitted(workload, [microbatches] * len(compute))
    stages = tuple(replace(stage, window=w) for stage, w in zip(workload.stages, windows, strict=True))
    step = simulate(replace(workload, stages=stages)).step_seconds
    period = max(*compute, transfer)
    fill = sum(compute) + (len(compute) - 1) * 2 * (transfer + latency)
    assert microbatches * period * (1 - 1e-9) <= step <= 1.1 * ((microbatches - 1) * period + fill)


@settings(max_examples=20, deadline=None)
@given(chains(), st.integers(1, 4))
def test_fitted_windows_keep_to_their_limits_and_are_no_slower_than_the_given_ones(workload, limit):
    windows = fitted(workload, [limit] * len(workload.stages))
    assert all(1 <= window <= limit for window in windows)

    def step(chosen):
        stages = tuple(replace(stage, window=w) for stage, w in zip(workload.stages, chosen, strict=True))
        return simulate(replace(workload, stages=stages)).step_seconds

    assert step(windows) <= step([min(stage.window, limit) for stage in workload.stages])
