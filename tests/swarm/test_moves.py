"""A plan changes while the run goes on: other cuts, other peers, other codecs; losses stay those of a plain loop."""

import time
from dataclasses import replace

import pytest
import torch

from geotrain import config, events, planner, runstate
from geotrain.base import Peer
from geotrain.errors import PlanError
from geotrain.graph import capture
from geotrain.layout import lacking
from geotrain.scheduler import Found, Scheduler

from . import swarm
from .test_run import audit, of


def plan_for(runner, speeds):
    """A plan over these peers, in parts that follow their speeds."""
    peers = [Peer(name, speed, 1 << 30) for name, speed in speeds.items()]
    return planner.plan(runner.graph, peers, microbatches=swarm.MICROBATCHES, stages=len(peers))


async def after(seen, steps):
    await swarm.until(lambda: len(of(events.StepCommitted, seen)) >= steps)


def moved(seen):
    return [[stage.peer for stage in event.plan.stages] for event in of(events.Planned, seen)]


def test_an_idle_peer_that_was_asked_for_its_speed_still_tells_of_the_links_to_it(tmp_path):
    """So it is with one that joins while stages move: it is linked first and asked then."""
    job, waited_s = swarm.job(steps=30, peers=3), []
    job = job.model_copy(update={"pipeline": config.PipelineConfig(peers=3, stages=2)})

    async def ask(runner, processes, seen):
        await after(seen, 2)
        plan = of(events.Planned, seen)[0].plan
        stays = plan.stages[0].peer
        (spare,) = {"anna", "ben", "carl"} - {stage.peer for stage in plan.stages}
        runner._execute(runstate.Survey(plan.epoch, (spare,)))
        start_s = time.monotonic()
        await runner._test(plan.epoch, [(stays, spare), (spare, stays)])
        waited_s.append(time.monotonic() - start_s)

    result, _, _ = swarm.train(tmp_path, job, ["anna", "ben", "carl"], during=ask, seconds=0.05)
    swarm.assert_equal(result, job)
    assert waited_s[0] < 4.0, "it would have been given up after 5 seconds"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_stages_move_and_the_run_stays_that_of_a_plain_loop(tmp_path, optimizer):
    job = swarm.job(steps=12, peers=3, evaluate=config.EvaluateConfig(every=3))
    train = job.train.model_copy(update={"optimizer": optimizer, "momentum": 0.9})
    pipeline = config.PipelineConfig(peers=3, stages=2)
    job = job.model_copy(update={"train": train, "pipeline": pipeline})
    names = ["anna", "ben", "carl"]

    async def change(runner, processes, seen):
        await after(seen, 2)
        first = of(events.Planned, seen)[0].plan
        spare = next(name for name in names if name not in [stage.peer for stage in first.stages])
        stays = first.stages[0].peer
        await runner.go_over(plan_for(runner, {spare: 3e9, stays: 1e9}), "another pair")
        await after(seen, 5)
        await runner.go_over(plan_for(runner, dict.fromkeys(names, 1e9)), "all three")
        await after(seen, 8)
        await runner.go_over(plan_for(runner, {"ben": 1e9}), "ben alone")

    result, seen, _ = swarm.train(tmp_path, job, names, during=change, seconds=0.05, keep_gradients=True)
    gradients = swarm.assert_equal(result, job)
    ours = result.gradients()
    assert sorted(ours) == sorted(gradients)
    plans = moved(seen)
    assert len(plans) == 4 and sorted(plans[2]) == names and plans[3] == ["ben"]
    assert [event.reason for event in of(events.Planned, seen)] == ["", "another pair", "all three", "ben alone"]
    assert sorted(result.held_out) == [0, 3, 6, 9, 12]
    counted, rollbacks = audit(tmp_path)
    assert counted.ok and rollbacks == []  # no step was done twice


def test_frozen_weights_come_from_the_peer_that_has_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # where each peer has its cache
    job = swarm.job(steps=6, peers=2)

    async def change(runner, processes, seen):
        await after(seen, 2)
        plan = of(events.Planned, seen)[0].plan
        peers = [stage.peer for stage in reversed(plan.stages)]
        stages = tuple(replace(stage, peer=peer) for stage, peer in zip(plan.stages, peers, strict=True))
        await runner.go_over(replace(plan, stages=stages), "swapped")

    result, seen, _ = swarm.train(tmp_path, job, during=change, seconds=0.05)
    swarm.assert_equal(result, job)
    frozen = swarm.net().layers[2].bias.nbytes
    fetched = of(events.Fetched, seen)
    assert sum(event.base_bytes for event in fetched) == frozen, "the coordinator gave it once"
    assert sum(event.shared_bytes for event in fetched) == frozen, "the other peer has it from the first"


def test_frozen_weights_are_there_before_the_plan_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    job = swarm.job(steps=12, peers=2)
    looks = []

    def swap(self, question, layout, steps_left, because, given, has, patient=True):
        """The planner's answer: the same stages, the other way round."""
        peers = reversed(layout.names)
        stages = tuple(replace(stage, peer=peer) for stage, peer in zip(layout.plan.stages, peers, strict=True))
        other = self.lay_out(question, 1, replace(layout.plan, stages=stages))
        looks.append(lacking(other, given, has))
        return Found(other, "swapped", lacking=looks[-1])

    async def change(runner, processes, seen):
        await after(seen, 2)
        monkeypatch.setattr(Scheduler, "better", swap)
        runner._look_for_better(())
        await swarm.until(lambda: len(of(events.Planned, seen)) == 2)
        monkeypatch.undo()

    result, seen, _ = swarm.train(tmp_path, job, during=change, seconds=0.05)
    swarm.assert_equal(result, job)
    (who,) = looks[0]
    assert looks == [{who: ("layers.2.bias",)}, {}], "it was asked again when they had come"
    moved_at = seen.index(of(events.Planned, seen)[1])
    assert [e.reason for e in of(events.Considered, seen[:moved_at])] == [
        f"the weights for another one go to {who} first; swapped"
    ]
    fetched = of(events.Fetched, seen[:moved_at])
    assert sum(event.shared_bytes for event in fetched) == swarm.net().layers[2].bias.nbytes
    assert of(events.Fetched, seen[moved_at:]) == [], "nothing but the trained state moves then"


def test_a_peer_killed_while_its_state_moves_costs_steps_and_nothing_else(tmp_path):
    job = swarm.job(steps=10, peers=2, checkpoint=config.CheckpointConfig(every=2))

    async def change(runner, processes, seen):
        await after(seen, 5)
        plan = of(events.Planned, seen)[0].plan
        other = plan_for(runner, {stage.peer: 1e9 + i for i, stage in enumerate(reversed(plan.stages))})
        await runner.go_over(other, "the other way round")
        await swarm.until(lambda: runner.phase == "preparing" or len(of(events.Planned, seen)) > 1)
        processes[1].kill()

    result, seen, _ = swarm.train(tmp_path, job, during=change, seconds=0.02)
    swarm.assert_equal(result, job)
    assert [gone.name for gone in of(events.PeerGone, seen)] == ["ben"]
    counted, rollbacks = audit(tmp_path)
    assert counted.ok and len(rollbacks) <= 1


def test_a_peer_killed_when_it_has_given_its_stage_away_costs_steps_and_nothing_else(tmp_path):
    """Its optimizer's state may still be on its way, so it is missed, though it has no stage any more."""
    job = swarm.job(steps=10, peers=3, checkpoint=config.CheckpointConfig(every=2))
    job = job.model_copy(update={"pipeline": config.PipelineConfig(peers=3, stages=2)})
    names, killed = ["anna", "ben", "carl"], []

    async def change(runner, processes, seen):
        await after(seen, 5)
        gives, stays = (stage.peer for stage in of(events.Planned, seen)[0].plan.stages)
        (spare,) = {*names} - {gives, stays}
        await runner.go_over(plan_for(runner, {spare: 3e9, stays: 1e9}), "another pair")
        await swarm.until(lambda: len(of(events.Planned, seen)) > 1)
        killed.append(gives)
        processes[names.index(gives)].kill()

    result, seen, _ = swarm.train(tmp_path, job, names, during=change, seconds=0.1)
    swarm.assert_equal(result, job)
    assert [gone.name for gone in of(events.PeerGone, seen)] == killed
    assert len(of(events.Planned, seen)) == 3, "those who are left begin again at the checkpoint"
    counted, rollbacks = audit(tmp_path)
    assert counted.ok and len(rollbacks) <= 1


def test_codecs_change_between_steps(tmp_path):
    job = swarm.job(steps=12, peers=2, compression=config.CompressionConfig())

    async def change(runner, processes, seen):
        for steps, codec in ((2, "int8"), (4, "bf16"), (6, "identity")):
            await after(seen, steps)
            plan = of(events.Planned, seen)[0].plan
            stages = tuple(replace(s, codec_forward=codec, codec_backward=codec) for s in plan.stages)
            await runner.go_over(replace(plan, stages=stages), f"{codec} is enough")
        strange = tuple(replace(s, codec_forward="topk-1") for s in plan.stages)
        with pytest.raises(PlanError, match="take no topk-1"):
            await runner.go_over(replace(plan, stages=strange), "nobody has prepared for it")

    result, seen, _ = swarm.train(tmp_path, job, during=change, seconds=0.05)
    assert [event.plan.stages[0].codec_forward for event in of(events.Planned, seen)] == [
        "identity", "int8", "bf16", "identity",
    ]  # fmt: skip
    assert {event.plan.epoch for event in of(events.Planned, seen)} == {2}  # nobody moved
    losses, _, _ = swarm.plain_loop(job)
    assert result.losses[:3] == losses[:3]
    assert result.losses == pytest.approx(losses, rel=0.02)


def test_codecs_that_do_more_damage_than_the_loss_budget_allows_are_given_up(tmp_path):
    """The guard, on real gradients: a trial comes with the first step of these codecs."""
    job = swarm.job(steps=40, peers=2, compression=config.CompressionConfig(max_loss_increase=1e-4))
    size = {"width": 32, "rows": 64}

    async def compress(runner, processes, seen):
        await after(seen, 2)
        plan = of(events.Planned, seen)[-1].plan
        stages = tuple(replace(s, codec_forward="ec-02", codec_backward="ecm-4") for s in plan.stages)
        await runner.go_over(replace(plan, stages=stages), "a user wants it")

    _, seen, _ = swarm.train(tmp_path, job, during=compress, seconds=0.05, **size)
    plans = of(events.Planned, seen)
    lossy = next(i for i, event in enumerate(plans) if event.reason == "a user wants it")
    assert plans[lossy].plan.stages[0].codec_forward == "ec-02"
    tried = of(events.Tried, seen[seen.index(plans[lossy]) :])[0]
    assert tried.cost > tried.budget > 0 and 0 < tried.error < 10
    after_it = plans[lossy + 1]
    assert after_it.reason.startswith("the codecs cost")
    assert {c for s in after_it.plan.stages for c in (s.codec_forward, s.codec_backward)} <= {"identity", "bf16"}
    counted, _ = audit(tmp_path)
    assert counted.ok


@pytest.mark.parametrize("codecs", [("tcu-005", "tcm-1"), ("ec-01", "ecm-2")])
def test_stages_that_move_send_the_same_bytes_with_lossy_codecs(tmp_path, codecs):
    """Whatever a codec remembers: losses and weights are those of the run that nobody touched, to the last bit."""
    job, size = swarm.job(steps=8, peers=2), {"width": 32, "rows": 64}
    graph = capture(swarm.net(32), swarm.source(**size).train(0, 0))
    plan = planner.plan(
        graph, [Peer(name, 1e9, 1 << 30) for name in ("anna", "ben")], microbatches=swarm.MICROBATCHES, stages=2
    )
    forward, backward = codecs
    stages = tuple(replace(s, codec_forward=forward, codec_backward=backward) for s in plan.stages)
    plan = replace(plan, stages=stages)
    names = [stage.peer for stage in stages]
    places = zip(stages, reversed(names), strict=True)
    swapped = replace(plan, stages=tuple(replace(stage, peer=name) for stage, name in places))

    async def swap(runner, processes, seen):
        await after(seen, 3)
        await runner.go_over(swapped, "the other way round")

    alone, seen, _ = swarm.train(tmp_path / "alone", job, plan=plan, **size)
    reports = [report for event in of(events.StepCommitted, seen) for report in event.stages]
    assert {use.codec for report in reports for use in report.codecs} >= {forward, backward}
    other, seen, _ = swarm.train(tmp_path / "moved", job, during=swap, seconds=0.05, plan=plan, **size)
    assert moved(seen) == [names, names[::-1]]
    assert other.losses == alone.losses
    ours, theirs = alone.state_dict(), other.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
