"""The live view and the plain lines, from made-up events."""

import io
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from geotrain import events, live
from geotrain.base import LinkUse, Plan, Span, Stage, StageReport

from . import story


def plan_of(peers: list[str]) -> Plan:
    stages = tuple(Stage(peer, 10 * i, 10 * (i + 1), window=len(peers) - i) for i, peer in enumerate(peers))
    return Plan("0" * 16, "1f1b", 4, stages)


def committed(step: int, steps: int = 10, loss: float = 3.0, seconds: float = 2.0, skipped: bool = False):
    report = StageReport(
        step, 0, "attic", True, {}, [], seconds,
        spans=(Span("compute", "0F0", 0.0, 0.5), Span("wait", "h from cellar", 0.5, 2.0)),
        links=(LinkUse("attic", "cellar", 4_000_000, 4_000_000, 1.0, 0.0),), memory_bytes=50 << 20,
    )  # fmt: skip
    return events.StepCommitted(step, steps, loss, (loss,), seconds, 512, 1.0, 1e-3, skipped, (report,))


STORY: list[events.RunEvent] = [
    events.Waiting("1 of 2 peers have joined"),
    events.PeerJoined("attic", 2e9, 4 << 30, 0.5),
    events.PeerJoined("cellar", 4e9, 8 << 30, 1.0),
    events.Planned(plan_of(["attic", "cellar"]), (12, 30), ("embed-blocks.1", "blocks.2-loss"), 3_300_000),
    events.Prepared(1, 0),
    events.Evaluated(0, 5.5),
    events.PeerProgress("attic", 0, "waits for h from cellar"),
    committed(1),
]


def test_status_follows_the_events():
    status = live.Status("demo")
    for event in STORY:
        status.apply(event)
    attic = status.peers["attic"]
    assert (status.step, status.steps, status.loss, status.held_out) == (1, 10, 3.0, [(0, 5.5)])
    assert status.tokens_per_s == pytest.approx(256)
    assert status.left_s == pytest.approx(18)
    assert (attic.stage, attic.ops, attic.doing) == (0, 12, "waits for h from cellar")
    assert attic.busy == pytest.approx(0.25)
    assert attic.sent_bytes_per_s == pytest.approx(2e6)


def test_a_new_plan_moves_stages_and_spares_the_rest():
    status = live.Status("demo")
    for event in [*STORY, events.PeerGone("cellar", "silent for 10 s")]:
        status.apply(event)
    assert "cellar" not in status.peers
    status.apply(events.PeerJoined("roof", 1e9, 1 << 30, 1.0))
    status.apply(events.Planned(plan_of(["attic"]), (42,), ("all",), 3_300_000))
    assert status.peers["attic"].ops == 42
    assert status.peers["roof"].stage is None and status.peers["roof"].doing == "spare"


def test_live_view_shows_every_peer_and_what_it_waits_for():
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    view = live.open_view("demo", console)
    assert isinstance(view, live.LiveView)
    with view:
        for event in STORY:
            view(event)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("step 1/10", "loss 3.0000", "attic", "cellar", "waits for h from cellar", "25%", "2.00"):
        assert words in shown


def test_live_view_shows_what_each_codec_does_to_its_link():
    status = live.Status("demo")
    for event in story.run()[:10]:
        status.apply(event)
    console = Console(file=io.StringIO(), width=80)  # nothing is cut off in a narrow window
    console.print(live.render(status))
    assert "…" not in console.file.getvalue()
    shown = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert any(line.startswith("attic → cellar tcu-001 16.0x 0.002 25% ") for line in shown)
    assert any(line.startswith("cellar → attic tcm-05 16.0x 0.002 40% ") for line in shown)
    assert "step 3: 1 message of attic held NaN or infinity" in shown


def test_a_peer_that_joins_while_the_run_trains_is_told_of_and_so_is_what_comes_of_it():
    reason = "roof joined; 2 s a step, 1 s after the change, which costs 3 s"
    stays = "roof joined; no plan is faster than this one by 3%"
    status, lines = live.Status("demo"), []
    view = live.PlainView("demo", lines.append)
    for event in [
        *STORY, events.PeerJoined("roof", 9e9, 1 << 30, 1.0), events.Considered(1, stays),
        events.Planned(plan_of(["attic", "roof"]), (12, 30), ("a", "b"), 3_300_000, reason),
    ]:  # fmt: skip
        status.apply(event)
        view(event)
    assert status.decisions == [f"the plan stays: {stays}", f"plan changed: {reason}"]
    assert lines[-3].startswith("roof joined: 9 GFLOP/s") and lines[-2] == f"the plan stays: {stays}"
    assert lines[-1].endswith(f"because {reason}")
    console = Console(file=io.StringIO(), width=140)
    console.print(live.render(status))
    assert f"plan changed: {reason}" in console.file.getvalue()


def test_plain_lines_outside_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=False, width=40)
    view = live.open_view("demo", console)
    assert isinstance(view, live.PlainView)
    with view:
        for event in [*STORY, events.Checkpointed(1, Path("runs/x")), events.Ended(1, "done", 3.0)]:
            view(event)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "demo"
    assert "waiting: 1 of 2 peers have joined" in lines
    assert any(line.startswith("step 1/10  loss 3.0000") for line in lines)
    assert lines[-1] == "ended: done"
    assert not any("\x1b" in line for line in lines)


def test_plain_lines_never_stay_silent_for_ten_seconds():
    lines: list[tuple[float, str]] = []
    now = [0.0]
    view = live.PlainView("demo", lambda line: lines.append((now[0], line)), clock=lambda: now[0])
    view(STORY[0])
    view(STORY[1])
    while now[0] < 60:
        now[0] += 1.0
        view.remind()
    times = [at for at, _ in lines] + [60.0]
    assert max(b - a for a, b in pairwise(times)) < 10
    assert lines[-1][1] == "waiting: 1 of 2 peers have joined (attic joined)"


def test_fast_steps_do_not_flood_but_the_last_and_skipped_ones_show():
    lines: list[str] = []
    now = [0.0]
    view = live.PlainView("demo", lines.append, clock=lambda: now[0])
    for step in range(1, 101):
        now[0] += 0.01
        view(committed(step, steps=100, skipped=step == 50))
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/100", "50/100", "100/100"]
    assert "SKIPPED" in steps[1]
