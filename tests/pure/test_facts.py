"""Facts of a run from its events: every second has a place, a replayed step counts once."""

import pytest

from geotrain import events
from geotrain.facts import ACTIVITIES, Recorder, account

from . import story


def recorded(*more: events.RunEvent) -> Recorder:
    recorder = Recorder()
    for event in [*story.run(), *more]:
        recorder(event)
    return recorder


def test_facts_of_a_whole_run():
    facts = recorded().facts(run="x")
    assert facts["run"] == "x" and facts["reason"] == "done"
    assert (facts["held_out_loss_before"], facts["held_out_loss_after"]) == (5.5, 3.4)
    assert len(facts["losses"]) == len(facts["step_seconds"]) == facts["steps"] == 10
    assert facts["tokens_per_second"] == pytest.approx(512 / 2.5)
    assert [s["peer"] for s in facts["stages"]] == ["attic", "cellar"]
    assert facts["checkpoint"].endswith("step-00000010")
    attic_to_cellar = facts["links"][0]
    assert (attic_to_cellar["from"], attic_to_cellar["to"], attic_to_cellar["bytes"]) == ("attic", "cellar", 10_000_000)
    assert attic_to_cellar["busy_share"] == pytest.approx(0.2 / 2.5)


def test_each_direction_of_a_link_tells_its_codec_and_what_it_costs():
    forward, backward = recorded().facts()["links"]
    for link, codec, share, broken in ((forward, "tcu-001", 0.25, 1), (backward, "tcm-05", 0.4, 0)):
        (use,) = link["codecs"]
        assert (use["codec"], use["factor"], link["budget_share"]) == (codec, 16.0, share)
        assert (use["error"], use["bias"]) == (pytest.approx(0.002), pytest.approx(-0.001))
        assert use["not_finite"] == broken


def test_bytes_by_what_they_were():
    fetched = [events.Fetched("attic", 1000, 24), events.Fetched("attic", 0, 6), events.Fetched("cellar", 500, 0)]
    facts = recorded(*fetched).facts()["bytes"]
    assert facts["base"] == {"attic": 1000, "cellar": 500} and facts["state"] == {"attic": 30, "cellar": 0}
    assert facts["checkpoints"] == [5 << 20]


def test_every_second_of_a_step_has_a_place():
    step = story.committed(1)
    seconds = account(step.stages[0], step, story.plan())
    assert set(seconds) == set(ACTIVITIES)
    assert sum(seconds.values()) == pytest.approx(step.seconds)
    assert seconds == pytest.approx(
        {"compute": 1.0, "rest": 0.5, "sending": 0.2, "waiting": 0.3, "other": 0.1, "commit": 0.4}
    )
    total = recorded().facts()["seconds_by_activity"]
    assert sum(total.values()) == pytest.approx(10 * step.seconds)


def test_a_replayed_step_counts_once():
    again = [events.Prepared(2, 8), story.committed(9, loss=1.25), story.committed(10, loss=1.0)]
    facts = recorded(*again).facts()
    assert len(facts["losses"]) == 10
    assert facts["losses"][-2:] == [1.25, 1.0]


def test_a_run_that_never_started_has_facts_too():
    recorder = Recorder()
    recorder(events.Waiting("0 of 2 peers have joined"))
    recorder(events.Ended(0, "interrupted", 1.0))
    facts = recorder.facts()
    assert facts["losses"] == [] and facts["held_out_loss_before"] is None and facts["stages"] == []
