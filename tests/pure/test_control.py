"""Control: whatever comes in whatever order, one epoch is active and no step is committed twice in it."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from geotrain import control, events, protocol, runstate
from geotrain.base import Peer, Plan, Stage, StageReport, Trial


def clip(norms):
    total = math.sqrt(sum(norm * norm for norm in norms.values()))
    return total, min(1.0, 1.0 / (total + 1e-6))


SETTINGS = runstate.Settings(
    steps=3, peers=2, parameters=("a", "b"), lr_at=lambda step: 0.1 / (step + 1), clip=clip, tokens_per_step=8
)


def plan_over(names, epoch):
    stages = tuple(Stage(name, i, i + 1, 1) for i, name in enumerate(names))
    return Plan("hash", "1f1b", 2, stages, epoch)


def report(stage, peer, step, finite=True, norm=1.0, last=True):
    name, losses = "ab"[stage % 2], [2.0, 4.0] if last else []
    return StageReport(step, stage, peer, finite, {name: norm}, losses, 0.1, (), (), 0)


class Run:
    """A coordinator without a world: feeds events, keeps all commands and what they did."""

    def __init__(self, **changes):
        self.state = runstate.State(replace(SETTINGS, **changes), started_s=0.0, gathering_s=0.0)
        self.now_s = 0.0
        self.commands = []
        self.ledger = []

    def do(self, event):
        self.state, commands = control.apply(self.state, event, self.now_s)
        for command in commands:
            if isinstance(command, runstate.LedgerCommit):
                assert command.row.step == len(self.ledger)
                self.ledger.append(command.row)
            if isinstance(command, runstate.LedgerRollback):
                assert command.step < len(self.ledger)
                del self.ledger[command.step :]
        self.commands += commands
        return commands

    def join(self, name):
        return self.do(runstate.Joined(hash(name), Peer(name, 1e9, 1 << 30), 1.0, "h:1", "cpu"))

    def say(self, name, message):
        return self.do(runstate.Said(name, message))

    def choose_plan(self):
        names = [peer.name for peer in self.last(runstate.Propose).peers]
        return self.do(runstate.PlanChosen(plan_over(names, self.state.epoch)))

    def start(self, *names):
        for name in names:
            self.join(name)
        self.choose_plan()
        return self.load()

    def load(self):
        for i, stage in enumerate(self.state.plan.stages):
            commands = self.say(stage.peer, protocol.Loaded(self.state.epoch, i, 0))
        return commands

    def step(self, **changes):
        done, last = self.state.done, len(self.state.plan.stages) - 1
        for i, stage in enumerate(self.state.plan.stages):
            what = report(i, stage.peer, done, last=i == last, **changes)
            commands = self.say(stage.peer, protocol.Ready(self.state.epoch, what))
        return commands

    def save(self, step):
        for i, stage in enumerate(self.state.plan.stages):
            self.say(stage.peer, protocol.Saved(self.state.epoch, step, i))
        return self.do(runstate.CheckpointWritten(step, Path(f"step-{step}")))

    def last(self, kind):
        return next(command for command in reversed(self.commands) if isinstance(command, kind))

    def emitted(self, kind):
        emitted = [command.event for command in self.commands if isinstance(command, runstate.Emit)]
        return [event for event in emitted if isinstance(event, kind)]

    def instructed(self):
        return self.last(runstate.Instruct).instructions


def kinds(commands):
    return [type(command).__name__ for command in commands]


def test_a_whole_run():
    run = Run(evaluate_every=2, evaluate_microbatches=4, checkpoint_every=2)
    assert kinds(run.join("anna")) == ["Welcome", "Emit", "Emit"]
    assert run.emitted(events.Waiting)[-1].reason == "1 of 2 peers have joined"
    assert kinds(run.join("ben")) == ["Welcome", "Emit", "Emit", "Propose"]
    assert kinds(run.choose_plan()) == ["Prepare", "Emit"]
    assert kinds(run.load()) == ["Emit", "Feed", "Instruct"]
    assert run.instructed() == (protocol.Evaluate(0, 4), protocol.Train(0))
    run.say("ben", protocol.Scored(1, 0, (4.0, 6.0)))
    assert run.emitted(events.Evaluated) == [events.Evaluated(0, 5.0)]

    run.now_s = 2.5
    assert kinds(run.step()) == ["LedgerCommit", "Instruct", "Emit"]  # the ledger comes first
    total, factor = clip({"a": 1.0, "b": 1.0})
    assert run.instructed() == (protocol.Commit(0, factor, 0.1, False), protocol.Train(1))
    (committed,) = run.emitted(events.StepCommitted)
    assert (committed.step, committed.loss, committed.losses, committed.seconds) == (1, 3.0, (2.0, 4.0), 2.5)
    assert committed.grad_norm == total and committed.tokens == 8 and len(committed.stages) == 2

    run.step()
    assert run.instructed()[1:] == (protocol.Evaluate(2, 4), protocol.Checkpoint(2), protocol.Train(2))
    run.step()
    assert run.instructed()[1:] == (protocol.Evaluate(3, 4), protocol.Checkpoint(3))
    assert run.state.phase == "draining"
    assert run.save(2) and run.state.phase == "draining"
    run.say("ben", protocol.Scored(1, 2, (3.0,)))
    run.save(3)
    run.say("ben", protocol.Scored(1, 3, (2.0,)))
    assert run.last(runstate.Finish) == runstate.Finish("done", failed=False)
    assert run.emitted(events.Ended) == [events.Ended(3, "done", 2.5)]
    assert [event.step for event in run.emitted(events.Checkpointed)] == [2, 3]


def test_gradients_are_asked_for_after_the_last_commit():
    run = Run(steps=1, keep_gradients=True)
    run.start("anna", "ben")
    run.step()
    assert kinds(run.instructed()) == ["Commit", "Gradients", "Checkpoint"]


@pytest.mark.parametrize("changes", [{"finite": False}, {"norm": math.inf}, {"norm": math.nan}])
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(changes):
    run = Run()
    run.start("anna", "ben")
    run.step(**changes)
    assert run.instructed()[0] == protocol.Commit(0, 0.0, 0.1, skip=True)
    assert run.ledger[0].skipped and run.emitted(events.StepCommitted)[0].skipped


def test_a_step_needs_every_stage_once():
    run = Run()
    run.start("anna", "ben")
    ready = protocol.Ready(1, report(0, "anna", 0))
    for name, message in [("anna", ready), ("anna", ready), ("ben", ready), ("nobody", ready)]:
        assert run.say(name, message) == []
    assert run.say("ben", protocol.Ready(2, report(1, "ben", 0))) == []
    assert run.say("ben", protocol.Ready(1, report(1, "ben", 1))) == []
    assert run.ledger == []
    assert run.say("ben", protocol.Ready(1, report(1, "ben", 0)))
    assert len(run.ledger) == 1


def test_a_lost_peer_sends_the_rest_back_to_the_checkpoint():
    run = Run(checkpoint_every=1, steps=9)
    run.start("anna", "ben")
    run.join("carl")  # a spare
    run.step()
    run.save(1)
    run.step()
    run.step()
    assert len(run.ledger) == 3
    commands = run.do(runstate.Lost("ben", "its connection ended"))
    assert kinds(commands) == ["Emit", "LedgerRollback", "Emit", "Propose"]
    assert [peer.name for peer in run.last(runstate.Propose).peers] == ["anna", "carl"]
    assert run.state.epoch == 2 and run.state.done == 1 and len(run.ledger) == 1
    run.choose_plan()
    assert run.last(runstate.Prepare).step == 1
    assert run.say("anna", protocol.Ready(1, report(0, "anna", 3))) == []  # a late report of the old epoch
    run.load()
    assert run.instructed() == (protocol.Train(1),)
    for i, name in enumerate(("anna", "carl")):
        run.say(name, protocol.Ready(1, report(i, name, 1)))  # the right step, but of the old epoch
    assert len(run.ledger) == 1
    run.step()
    assert [row.epoch for row in run.ledger] == [1, 2]


def test_without_a_checkpoint_the_rest_starts_again():
    run = Run()
    run.start("anna", "ben")
    run.step()
    run.do(runstate.Lost("anna", "gone"))
    run.choose_plan()
    assert run.last(runstate.Prepare).step == 0 and run.ledger == []


def test_a_checkpoint_that_is_being_written_is_waited_for():
    run = Run(checkpoint_every=1, steps=9)
    run.start("anna", "ben")
    run.step()
    for i, name in enumerate(("anna", "ben")):
        run.say(name, protocol.Saved(1, 1, i))
    run.do(runstate.Lost("ben", "gone"))
    assert run.state.phase == "draining"
    run.do(runstate.CheckpointWritten(1, Path("step-1")))
    assert run.state.phase == "planning" and run.state.done == 1 and len(run.ledger) == 1


def test_a_peer_lost_before_training_is_waited_for_again():
    run = Run()
    run.join("anna")
    run.join("ben")
    run.choose_plan()
    run.do(runstate.Lost("ben", "gone"))
    assert run.state.phase == "gathering"
    run.join("carl")
    assert run.state.phase == "planning" and run.state.epoch == 2
    assert run.do(runstate.PlanChosen(plan_over(["anna", "ben"], 1))) == []  # the old proposal's answer


def test_a_leaving_peer_hands_over_without_losing_a_step():
    run = Run(steps=9)
    run.start("anna", "ben")
    run.step()
    assert run.say("ben", protocol.Leaving()) == []
    run.step()
    assert kinds(run.instructed()) == ["Commit", "Checkpoint"]
    commands = run.save(2)
    assert kinds(commands) == ["Emit", "Dismiss", "Emit", "Emit", "Propose"]
    assert len(run.ledger) == 2 and run.state.done == 2
    assert [peer.name for peer in run.last(runstate.Propose).peers] == ["anna"]
    assert run.do(runstate.Lost("ben", "its connection ended")) == []


def test_a_spare_leaves_at_once():
    run = Run(steps=9)
    run.start("anna", "ben")
    run.join("carl")
    assert kinds(run.say("carl", protocol.Leaving())) == ["Dismiss", "Emit"]
    assert run.state.phase == "training"


def test_the_user_stops_between_steps():
    run = Run(steps=9, evaluate_every=1, evaluate_microbatches=1)
    run.start("anna", "ben")
    run.do(runstate.UserStop())
    run.say("ben", protocol.Scored(1, 0, (1.0,)))
    run.step()
    assert kinds(run.instructed()) == ["Commit", "Checkpoint"]
    run.save(1)
    assert run.last(runstate.Finish) == runstate.Finish("interrupted", failed=False)


def at_its_texts():
    run = Run(steps=1, continues=True)
    run.start("anna", "ben")
    run.step()
    assert kinds(run.save(1)) == ["Emit", "Emit", "Continue"] and run.last(runstate.Continue).step == 2
    return run


def test_texts_come_last():
    run = at_its_texts()
    run.do(runstate.Continued((("Why?", "Because."),)))
    assert run.emitted(events.Continued) == [events.Continued("Why?", "Because.")]
    assert run.last(runstate.Finish) == runstate.Finish("done", failed=False)


@pytest.mark.parametrize(
    "end",
    [
        lambda run: run.do(runstate.UserStop()),
        lambda run: run.do(runstate.Lost("ben", "its connection ended")),
        lambda run: run.say("ben", protocol.Failed(run.state.epoch, "the link to anna is lost")),
    ],
)
def test_a_run_that_is_trained_does_not_fail_over_its_texts(end):
    run = at_its_texts()
    end(run)
    assert run.last(runstate.Finish) == runstate.Finish("done", failed=False)


@pytest.mark.parametrize("phase", ["gathering", "planning", "preparing"])
def test_the_user_stops_before_training(phase):
    run = Run()
    run.join("anna")
    if phase != "gathering":
        run.join("ben")
    if phase == "preparing":
        run.choose_plan()
    assert run.state.phase == phase
    run.do(runstate.UserStop())
    assert run.last(runstate.Finish).reason == "interrupted"
    assert kinds(run.join("carl")) == ["Refuse"]


def test_too_few_peers():
    run = Run(wait_s=30)
    run.join("anna")
    run.now_s = 31
    run.say("anna", protocol.Progress(0, 0, "waiting"))
    run.do(runstate.Tick())
    finish = run.last(runstate.Finish)
    assert finish.failed and finish.reason.startswith("after 30 s 1 of 2 peers have joined; ")


def test_a_run_waits_for_the_peers_that_its_plan_names():
    run = Run(named=frozenset({"ben", "carl"}))
    run.join("anna")
    run.join("carl")
    assert run.emitted(events.Waiting)[-1].reason == "2 of 2 peers have joined; the plan needs ben"
    run.join("ben")
    assert [peer.name for peer in run.last(runstate.Propose).peers] == ["anna", "carl", "ben"]


def test_a_silent_peer_is_lost():
    run = Run(silence_s=5)
    run.start("anna", "ben")
    run.now_s = 6
    run.say("anna", protocol.Progress(1, 0, "waiting for h from ben"))
    run.do(runstate.Tick())
    assert run.emitted(events.PeerGone) == [events.PeerGone("ben", "silent for 5 s")]
    assert run.state.phase == "planning" and list(run.state.members) == ["anna"]


def test_nobody_left():
    run = Run()
    run.start("anna", "ben")
    run.now_s = 1000
    run.do(runstate.Tick())
    assert [command.failed for command in run.commands if isinstance(command, runstate.Finish)] == [True]
    assert "no peer is left" in run.last(runstate.Finish).reason


def test_a_failure_names_peer_and_stage():
    run = Run()
    run.start("anna", "ben")
    assert run.say("ben", protocol.Failed(7, "an old one")) == []
    run.say("ben", protocol.Failed(1, "out of memory"))
    assert run.last(runstate.Finish) == runstate.Finish("stage 1 on ben failed: out of memory", failed=True)


def test_a_refused_plan_ends_the_run_with_its_reason():
    run = Run()
    run.join("anna")
    run.join("ben")
    run.do(runstate.PlanRefused(1, "the model needs 4 GiB, the peers have 2"))
    assert run.last(runstate.Finish).reason == "the model needs 4 GiB, the peers have 2"


def test_links_are_measured_before_the_first_plan():
    run = Run(survey=True)
    run.join("anna")
    assert kinds(run.join("ben")) == ["Welcome", "Emit", "Emit", "Survey"]
    assert run.last(runstate.Survey) == runstate.Survey(1, ("anna", "ben"))
    assert run.say("anna", protocol.Surveyed(1, (), 0.0, ())) == []
    assert kinds(run.say("ben", protocol.Surveyed(1, (), 0.0, ()))) == ["Emit", "Propose"]
    run.choose_plan()
    run.load()
    run.join("carl")
    run.do(runstate.Lost("ben", "gone"))
    assert run.last(runstate.Survey).names == ("anna", "carl")  # nobody knows carl's links


def training_with_a_survey():
    run = Run(survey=True, steps=9)
    run.join("anna")
    run.join("ben")
    for name in ("anna", "ben"):
        run.say(name, protocol.Surveyed(1, (), 0.0, ()))
    run.choose_plan()
    run.load()
    return run


def test_a_peer_that_joins_a_running_run_is_measured_and_considered_beside_it():
    run = training_with_a_survey()
    assert kinds(run.join("carl")) == ["Welcome", "Emit", "Survey"]
    assert run.last(runstate.Survey) == runstate.Survey(2, ("carl",))
    run.step()  # nobody waits for carl
    assert run.say("carl", protocol.Surveyed(1, (), 0.0, ())) == []
    assert run.say("carl", protocol.Surveyed(2, (), 0.0, ())) == [runstate.Consider("carl")]
    assert run.say("carl", protocol.Surveyed(2, (), 0.0, ())) == []
    run.do(runstate.Switch(2, plan_over(["anna", "carl"], 7), "carl joined"))
    run.step()
    assert kinds(run.load()) == ["Emit", "Feed", "Instruct"]
    assert len(run.ledger) == 2 and run.instructed() == (protocol.Train(2),)


@pytest.mark.parametrize("phase", ["planning", "preparing", "draining"])
def test_a_peer_that_joins_while_nothing_trains_is_considered_when_it_trains_again(phase):
    run = training_with_a_survey()
    if phase == "planning":
        run.do(runstate.Lost("ben", "gone"))
    else:
        run.do(runstate.Switch(2, plan_over(["ben", "anna"], 7), "the other way round"))
        if phase == "draining":
            run.state = replace(run.state, evaluating=frozenset({0}))
        run.step()
    assert run.state.phase == phase
    assert kinds(run.join("carl")) == ["Welcome", "Emit"]
    if phase == "planning":
        run.choose_plan()
    run.say("ben", protocol.Scored(2, 0, (1.0,)))
    assert kinds(run.load()) == ["Emit", "Feed", "Instruct", "Survey"]
    assert run.say("carl", protocol.Surveyed(run.state.epoch, (), 0.0, ())) == [runstate.Consider("carl")]


def test_a_peer_that_joins_before_a_move_that_fails_is_considered_all_the_same():
    run = training_with_a_survey()
    run.join("carl")
    run.say("carl", protocol.Surveyed(2, (), 0.0, ()))
    run.do(runstate.Switch(2, plan_over(["anna", "carl"], 7), "carl joined"))
    run.state = replace(run.state, evaluating=frozenset({0}))
    run.step()
    run.join("dora")
    assert kinds(run.do(runstate.Lost("carl", "gone"))) == ["Emit", "Instruct", "Survey"]
    assert run.last(runstate.Survey).names == ("dora",)


@pytest.mark.parametrize("how", ["silence", "loss"])
def test_a_survey_does_not_wait_for_ever(how):
    run = Run(survey=True, survey_s=30.0, silence_s=1e9)
    run.join("anna")
    run.join("ben")
    run.say("anna", protocol.Surveyed(1, (), 0.0, ()))
    run.now_s = 31.0
    run.do(runstate.Tick() if how == "silence" else runstate.Lost("ben", "gone"))
    assert run.state.phase == "planning" and len(run.last(runstate.Propose).peers) == (2 if how == "silence" else 1)


def test_other_codecs_come_into_force_with_the_next_step():
    run = Run()
    run.start("anna", "ben")
    stages = tuple(replace(stage, codec_forward="int8", codec_backward="hd4u") for stage in run.state.plan.stages)
    assert run.do(runstate.Switch(1, replace(run.state.plan, stages=stages, epoch=9), "the link is slow")) == []
    run.step()
    assert run.instructed()[1:] == (
        protocol.Codecs(("int8", "int8"), ("hd4u", "hd4u")), protocol.Try(1), protocol.Train(1),
    )  # fmt: skip
    assert run.last(runstate.Adopt).plan == run.state.plan and run.state.plan.stages == stages
    assert (run.state.epoch, run.state.plan.epoch, run.state.phase) == (1, 1, "training")


def compressed(**changes):
    """Two peers train with codecs, from step 1 on."""
    run = Run(steps=100_000, **changes)
    run.start("anna", "ben")
    stages = tuple(replace(stage, codec_forward="int8") for stage in run.state.plan.stages)
    run.do(runstate.Switch(1, replace(run.state.plan, stages=stages), "the link is slow"))
    return run


def trials(run, steps, trial_s, step_s=1.0):
    """Trains; a trial holds its step up. Returns the steps before which there was one."""
    found = []
    for _ in range(steps):
        if protocol.Try(run.state.done) in run.instructed():
            found.append(run.state.done)
            for i, stage in enumerate(run.state.plan.stages):
                run.now_s += trial_s / 2
                run.say(stage.peer, protocol.Tried(1, Trial(run.state.done, i, 1.0, 1.0, 0.1, ())))
        run.now_s += step_s
        run.step()
    return found


def test_codecs_are_tried_when_they_are_new_and_then_every_so_many_steps():
    run = compressed(try_every=50)
    assert trials(run, 160, trial_s=0.2) == [1, 51, 101, 151]


@pytest.mark.parametrize("trial_s", [2.0, 5.0, 30.0])
def test_trials_take_a_hundredth_of_the_time_and_no_more(trial_s):
    """Over a slow link, one without codecs takes as long as many steps with them."""
    run = compressed(try_every=50)
    found = trials(run, 12_000, trial_s)
    assert run.state.trials_s == pytest.approx(trial_s * len(found))
    assert len(found) > 12_000 * 0.01 / trial_s
    assert run.state.trials_s - trial_s <= 0.01 * run.now_s, "all but the last one are paid for"


def moving(**changes):
    """Two peers train, a third is there, and the plan is to go over from ben to carl."""
    run = Run(evaluate_every=1, evaluate_microbatches=1, **changes)
    run.start("anna", "ben")
    run.join("carl")
    run.do(runstate.Switch(1, plan_over(["anna", "carl"], 7), "carl is faster"))
    run.step()
    return run


def test_stages_move_when_the_step_is_committed_and_nothing_is_on_its_way():
    run = moving()
    assert run.instructed() == (protocol.Commit(0, pytest.approx(0.707, abs=1e-3), 0.1, False), protocol.Evaluate(1, 1))
    assert run.state.phase == "draining"
    run.say("ben", protocol.Scored(1, 0, (5.0,)))
    run.say("ben", protocol.Scored(1, 1, (4.0,)))
    prepare = run.last(runstate.Prepare)
    assert (prepare.step, prepare.plan.epoch, prepare.switch.reason) == (1, 2, "carl is faster")
    assert kinds(run.load()) == ["Emit", "Feed", "Instruct"]
    assert run.instructed() == (protocol.Train(1),)  # evaluated already
    run.step()
    assert [row.step for row in run.ledger] == [0, 1] and [row.epoch for row in run.ledger] == [1, 2]


def moved():
    """Carl has taken over from ben, whose optimizer's state may still be on its way."""
    run = moving(steps=9)
    run.say("ben", protocol.Scored(1, 0, (5.0,)))
    run.say("ben", protocol.Scored(1, 1, (4.0,)))
    run.load()
    assert run.state.givers == {"anna", "ben"}
    return run


def test_stages_move_again_when_all_state_of_the_move_before_has_come():
    run = moved()
    run.do(runstate.Switch(2, plan_over(["carl"], 7), "anna is slow"))
    run.step()
    assert run.instructed()[-1] == protocol.Train(2) and run.state.switch is not None
    run.step()
    assert run.instructed()[-1] == protocol.Evaluate(3, 1)
    assert run.state.phase == "draining" and run.state.after == "move"


def test_other_codecs_do_not_wait_for_it():
    run = moved()
    stages = tuple(replace(stage, codec_forward="int8") for stage in run.state.plan.stages)
    run.do(runstate.Switch(2, replace(run.state.plan, stages=stages), "the link is slow"))
    run.step()
    assert run.state.switch is None and run.state.plan.stages == stages


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_peer_that_gave_its_stage_away_is_missed_until_all_of_it_has_come(steps):
    run = moved()
    for _ in range(steps):
        run.step()
    phase = run.state.phase
    run.do(runstate.Lost("ben", "gone"))
    if steps < 2:
        assert run.state.phase == "planning" and run.state.done == 0
    else:
        assert run.state.phase == phase and run.state.done == 3


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_peer_that_gave_its_stage_away_leaves_without_losing_a_step(steps):
    run = moved()
    for _ in range(steps):
        run.step()
    run.say("ben", protocol.Leaving())
    if steps < 2:
        assert "ben" in run.state.members
        run.step()
        assert run.instructed()[-1] == protocol.Checkpoint(steps + 2)
        for done in sorted(run.state.evaluating):
            run.say("carl", protocol.Scored(2, done, (4.0,)))
        run.save(steps + 2)
        assert run.state.phase == "planning"
    assert "ben" not in run.state.members and run.state.done == len(run.ledger) == 1 + steps + (steps < 2)


def test_when_the_peer_to_move_to_is_lost_the_old_plan_goes_on():
    run = moving()
    run.do(runstate.Lost("carl", "gone"))
    assert run.instructed() == (protocol.Train(1),) and run.state.phase == "training"
    assert run.state.switch is None and run.state.epoch == 1


@pytest.mark.parametrize("name", ["ben", "carl"])
def test_a_peer_lost_while_stages_move_costs_the_steps_since_the_checkpoint(name):
    run = moving()
    if name == "carl":
        run.say("ben", protocol.Scored(1, 0, (5.0,)))
        run.say("ben", protocol.Scored(1, 1, (4.0,)))
        assert run.state.phase == "preparing"
    run.do(runstate.Lost(name, "gone"))
    assert run.last(runstate.LedgerRollback) == runstate.LedgerRollback(0, run.state.epoch)
    assert run.state.phase == "planning" and run.state.done == 0


def test_a_stop_while_stages_are_about_to_move_ends_the_run_as_usual():
    run = moving()
    run.do(runstate.UserStop())
    assert run.instructed() == (protocol.Train(1),)
    run.step()
    assert run.instructed()[-1] == protocol.Checkpoint(2) and run.state.after == "interrupted"


def test_names_are_unique():
    run = Run()
    run.join("anna")
    assert kinds(run.join("anna")) == kinds(run.join("coordinator")) == ["Refuse"]
    assert list(run.state.members) == ["anna"]


class Swarm(RuleBasedStateMachine):
    """Joins, losses, leaves, stops, and acknowledgements that are late, doubled or of an old epoch."""

    def __init__(self):
        super().__init__()
        self.run = Run(
            steps=12, checkpoint_every=2, evaluate_every=3, evaluate_microbatches=1, survey=True, continues=True
        )
        self.names = 0
        self.late = []
        self.asked = set()
        self.finishes = 0
        self.best = (0, 0)

    def do(self, event):
        before = self.run.state
        for command in self.run.do(event):
            self.finishes += isinstance(command, runstate.Finish)
            if isinstance(command, runstate.Emit) and isinstance(command.event, events.StepCommitted):
                told = {(report.step, report.seconds, report.stage) for report in command.event.stages}
                # `seconds` says in which epoch it was said
                assert told == {(before.done, before.epoch, i) for i in range(len(before.plan.stages))}
            if isinstance(command, runstate.Prepare) and command.switch is not None:
                assert command.step == self.run.state.done == before.done + (before.phase == "training")
                begun = before.moved_at is None or before.done + (before.phase == "training") >= before.moved_at + 2
                assert begun, "a stage hands on what it has"
            if isinstance(command, runstate.Survey) and self.run.state.phase == "training":
                (name,) = command.names  # nobody who trains is disturbed
                assert not self.run.state.members[name].known and self.run.state.stage_of(name) is None
                self.asked.add((command.epoch, name))
            if isinstance(command, runstate.Instruct):
                assert command.epoch in (before.epoch, self.run.state.epoch)
                commits = [i for i in command.instructions if isinstance(i, protocol.Commit)]
                assert [i.step for i in commits] == ([self.run.ledger[-1].step] if commits else [])

    @initialize()
    def begin(self):
        for _ in range(3):
            self.join()
        self.look()
        self.plan()

    @precondition(lambda self: self.run.state.phase == "surveying")
    @rule()
    def look(self):
        for name in sorted(self.run.state.surveying):
            self.do(runstate.Said(name, protocol.Surveyed(self.run.state.epoch, (), 0.0, ())))

    @precondition(lambda self: self.run.state.phase == "training")
    @rule(data=st.data(), codecs_only=st.booleans())
    def switch(self, data, codecs_only):
        state = self.run.state
        if codecs_only:
            stages = tuple(replace(stage, codec_forward="int8") for stage in state.plan.stages)
            plan = replace(state.plan, stages=stages)
        else:
            names = data.draw(st.lists(st.sampled_from(sorted(state.members)), min_size=1, max_size=3, unique=True))
            plan = plan_over(names, 99)
        self.late.append(runstate.Switch(state.epoch, plan, "it is faster"))
        self.do(self.late[-1])

    @rule()
    def join(self):
        self.names += 1
        self.do(runstate.Joined(self.names, Peer(f"p{self.names}", 1e9, 1 << 30), 1.0, "h:1", "cpu"))

    @precondition(lambda self: len(self.run.state.members) > 2)
    @rule(data=st.data(), leave=st.booleans())
    def lose(self, data, leave):
        name = data.draw(st.sampled_from(sorted(self.run.state.members)))
        self.do(runstate.Said(name, protocol.Leaving()) if leave else runstate.Lost(name, "lost"))

    @precondition(lambda self: self.run.state.phase == "planning")
    @rule()
    def plan(self):
        names = [peer.name for peer in self.run.last(runstate.Propose).peers][:3]
        self.late.append(runstate.PlanChosen(plan_over(names, self.run.state.epoch)))
        self.do(self.late[-1])

    @precondition(lambda self: self.run.state.phase == "training" and self.unknown())
    @rule(data=st.data())
    def introduce(self, data):
        """A peer that joined while the run trains answers."""
        state, name = self.run.state, data.draw(st.sampled_from(self.unknown()))
        self.late.append(runstate.Said(name, protocol.Surveyed(state.epoch, (), 0.0, ())))
        self.do(self.late[-1])
        assert self.run.commands[-1] == runstate.Consider(name)

    def unknown(self):
        return sorted(name for name, member in self.run.state.members.items() if not member.known)

    def due(self, i, name):
        """What a stage would say now."""
        state = self.run.state
        ready = replace(report(i, name, state.done), seconds=state.epoch)
        for message in [
            protocol.Loaded(state.epoch, i, 0),
            *(protocol.Saved(state.epoch, step, i) for step in state.saving),
            *(protocol.Scored(state.epoch, step, (1.0,)) for step in state.evaluating),
            protocol.Ready(state.epoch, ready),
        ]:
            self.late.append(runstate.Said(name, message))
            self.do(self.late[-1])

    @precondition(lambda self: self.run.state.plan is not None)
    @rule(data=st.data())
    def speak(self, data):
        i, stage = data.draw(st.sampled_from(list(enumerate(self.run.state.plan.stages))))
        self.due(i, stage.peer)

    @rule(times=st.integers(1, 4), write=st.booleans())
    def go_on(self, times, write):
        """All is well for some steps."""
        for _ in range(times):
            if self.run.state.phase == "surveying":
                self.look()
            if self.run.state.phase == "planning":
                self.plan()
            for i, stage in enumerate(self.run.state.plan.stages if self.run.state.plan else ()):
                self.due(i, stage.peer)
            if write:
                self.write()

    @precondition(lambda self: self.run.state.after == "texts")
    @rule()
    def read(self):
        self.do(runstate.Continued(()))

    @precondition(lambda self: self.run.state.writing)
    @rule()
    def write(self):
        for step in sorted(self.run.state.writing):
            self.do(runstate.CheckpointWritten(step, Path("x")))

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def repeat(self, data):
        event = data.draw(st.sampled_from(self.late[-20:]))
        before = self.run.state.epoch, len(self.run.ledger)
        about = getattr(event, "message", event)
        old = getattr(about, "epoch", self.run.state.epoch) < self.run.state.epoch
        self.do(event)
        if old:
            assert before == (self.run.state.epoch, len(self.run.ledger))

    @rule(seconds=st.sampled_from([1.0, 8.0]))
    def wait(self, seconds):
        """Some heartbeats are missed."""
        self.run.now_s += seconds
        for name in sorted(self.run.state.members)[1:]:
            self.do(runstate.Said(name, protocol.Progress(0, 0, "")))
        self.do(runstate.Tick())

    @precondition(lambda self: self.names > 6)
    @rule()
    def stop(self):
        self.do(runstate.UserStop())

    @invariant()
    def consistent(self):
        state, ledger = self.run.state, self.run.ledger
        assert [row.step for row in ledger] == list(range(len(ledger)))
        assert [row.epoch for row in ledger] == sorted(row.epoch for row in ledger)
        if state.phase != "ended":
            assert len(ledger) == state.done or state.phase == "draining"
        assert state.checkpoint <= len(ledger) <= state.settings.steps
        assert self.finishes == (state.phase == "ended")
        assert state.epoch >= self.best[0]
        self.best = (state.epoch, state.done)
        if state.phase == "training":
            assert {stage.peer for stage in state.plan.stages} <= set(state.members)
            assert state.plan.epoch == state.epoch
            spare = {name for name in self.unknown() if state.stage_of(name) is None}
            assert {(state.epoch, name) for name in spare} <= self.asked


Swarm.TestCase.settings = hypothesis_settings(max_examples=150, stateful_step_count=60, deadline=None)
TestSwarm = Swarm.TestCase
