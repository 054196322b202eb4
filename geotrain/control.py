"""The coordinator's decisions: apply(state, event, now) -> state, commands. Pure.

A run gathers peers, surveys their links, plans, prepares (every stage gets its weights), trains, drains and ends. A
step is a two-phase transaction: when every stage is ready, the commit goes to the ledger first and to the stages
after. Whatever names an older epoch is ignored, so a zombie changes nothing. When a peer of the plan is lost, the
others are planned again as a new epoch and all go on from the newest complete checkpoint, or from the start. When a
better plan is found while all is well, the step is finished, the stages hand their state over, and nothing is lost. A
peer that joins meanwhile is measured beside the training, and is one more to find a better plan with.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from . import events, protocol
from .base import COORDINATOR, Plan, StageReport
from .replan import change
from .runstate import (
    Adopt,
    Broken,
    CheckpointWritten,
    Command,
    CommitRow,
    Consider,
    Continue,
    Continued,
    Dismiss,
    Emit,
    Event,
    Feed,
    Finish,
    Instruct,
    Joined,
    LedgerCommit,
    LedgerRollback,
    Lost,
    MarkBest,
    Member,
    PlanChosen,
    PlanRefused,
    Prepare,
    Propose,
    Refuse,
    Said,
    State,
    Survey,
    Switch,
    Tick,
    UserStop,
    Welcome,
    WriteCheckpoint,
)

Result = tuple[State, list[Command]]


def apply(state: State, event: Event, now_s: float) -> Result:
    """What follows from an event. Total: an event that makes no sense now changes nothing."""
    if state.phase == "ended":
        return state, [Refuse(event.session, "the run is over")] if isinstance(event, Joined) else []
    match event:
        case Joined():
            return _joined(state, event, now_s)
        case Said(name, message) if name in state.members:
            member = replace(state.members[name], heard_s=now_s)
            return _said(_with_member(state, name, member), name, message, now_s)
        case Lost(name, reason) if name in state.members:
            return _lost(state, name, reason, now_s)
        case PlanChosen(plan) if state.phase == "planning" and plan.epoch == state.epoch:
            stages = frozenset(range(len(plan.stages)))
            state = replace(state, phase="preparing", plan=plan, waiting=stages)
            return state, [Prepare(plan, state.done), _loading(state)]
        case Switch(epoch, plan) if state.phase == "training" and epoch == state.epoch:
            peers_are_here = all(stage.peer in state.members for stage in plan.stages)
            return (replace(state, switch=event) if peers_are_here else state), []
        case PlanRefused(epoch, reason) if state.phase == "planning" and epoch == state.epoch:
            return _finish(state, reason, now_s, failed=True)
        case CheckpointWritten(step, path, nbytes) if step in state.writing:
            state = replace(state, writing=state.writing - {step}, checkpoint=max(step, state.checkpoint))
            return _then(_drained(state, now_s), Emit(events.Checkpointed(step, path, nbytes)))
        case Continued(texts) if state.after == "texts":
            return _then(_over(state, now_s), *(Emit(events.Continued(prompt, text)) for prompt, text in texts))
        case UserStop():
            return _stop(state, now_s)
        case Broken(reason):
            return _finish(state, reason, now_s, failed=True)
        case Tick():
            return _tick(state, now_s)
        case _:
            return state, []


def _joined(state: State, event: Joined, now_s: float) -> Result:
    name = event.peer.name
    if name in state.members or name == COORDINATOR:
        reason = f"the name {name} is taken in this run; join with another --name"
        return state, [Refuse(event.session, reason)]
    member = Member(event.peer, event.duty, event.address, event.kind, now_s)
    joined = events.PeerJoined(name, event.peer.flops_per_s, event.peer.memory_bytes, event.duty)
    state, commands = _gathered(_with_member(state, name, member), now_s)
    return state, [Welcome(event.session, name), Emit(joined), *commands, *_meet(state, [name])]


def _gathered(state: State, now_s: float) -> Result:
    """Survey and plan as soon as enough peers are there."""
    if state.phase != "gathering":
        return state, []
    missing = state.settings.named - state.members.keys()
    if len(state.members) >= state.settings.peers and not missing:
        return _survey(state, now_s)
    return state, [_waiting(who_is_here(state))]


def who_is_here(state: State) -> str:
    """In words, of those that the run waits for."""
    missing = state.settings.named - state.members.keys()
    named = f"; the plan needs {', '.join(sorted(missing))}" if missing else ""
    return f"{len(state.members)} of {state.settings.peers} peers have joined{named}"


def _survey(state: State, now_s: float) -> Result:
    """Measure the links, if there are any that nobody has measured, then plan."""
    new = [name for name, member in state.members.items() if not member.surveyed]
    if not (state.settings.survey and new and len(state.members) > 1):
        return _propose(state)
    names = tuple(state.members)
    members = {name: replace(member, surveyed=True) for name, member in state.members.items()}
    state = replace(state, phase="surveying", epoch=state.epoch + 1, members=members)
    state = replace(state, surveying=frozenset(names), survey_s=now_s)
    return state, [_waiting("the links are measured"), Survey(state.epoch, names)]


def _meet(state: State, names: Iterable[str]) -> list[Command]:
    """While the run trains: let those of these peers that no plan was made with say how fast they are."""
    if state.phase != "training" or not state.settings.survey:
        return []
    new = [name for name in names if not state.members[name].known and state.stage_of(name) is None]
    return [Survey(state.epoch, (name,)) for name in new]


def _surveyed(state: State, name: str) -> Result:
    if state.phase == "training" and not state.members[name].known:
        return _with_member(state, name, replace(state.members[name], known=True)), [Consider(name)]
    if state.phase != "surveying":
        return state, []
    state = replace(state, surveying=state.surveying - {name})
    return (state, []) if state.surveying else _propose(state)


def _propose(state: State) -> Result:
    members = {name: replace(member, known=True) for name, member in state.members.items()}
    state = replace(state, phase="planning", epoch=state.epoch + 1, members=members)
    peers = tuple(member.peer for member in members.values())
    return state, [_waiting("the plan is being made"), Propose(state.epoch, peers)]


def _said(state: State, name: str, message: protocol.FromPeer, now_s: float) -> Result:
    stage = state.stage_of(name)
    match message:
        case protocol.Progress():
            return state, [Emit(events.PeerProgress(name, message.step, message.state))]
        case protocol.Leaving():
            return _leaving(state, name, now_s)
        case protocol.Surveyed(epoch) if epoch == state.epoch:
            return _surveyed(state, name)
        case protocol.Failed(epoch) if state.after == "texts" and stage is not None and epoch == state.epoch:
            return _over(state, now_s)
        case protocol.Failed(epoch, reason) if stage is not None and epoch == state.epoch:
            return _finish(state, f"stage {stage} on {name} failed: {reason}", now_s, failed=True)
        case protocol.Loaded(epoch, of) if of == stage and epoch == state.epoch:
            return _loaded(state, of, now_s)
        case protocol.Tried(epoch, trial) if trial.step == state.done == state.tried_at and epoch == state.epoch:
            return _tried(state, now_s), []
        case protocol.Ready(epoch, report) if report.stage == stage and epoch == state.epoch:
            return _ready(state, replace(report, peer=name), now_s)
        case protocol.Scored(epoch, step, losses) if stage is not None and epoch == state.epoch:
            if step not in state.evaluating or not losses:
                return state, []
            return _scored(replace(state, evaluating=state.evaluating - {step}), step, losses, now_s)
        case protocol.Saved(epoch, step, of) if of == stage and epoch == state.epoch:
            return _saved(state, step, of)
        case _:
            return state, []


def _scored(state: State, step: int, losses: Sequence[float], now_s: float) -> Result:
    loss = sum(losses) / len(losses)
    commands: list[Command] = [Emit(events.Evaluated(step, loss))]
    if state.best is None or loss < state.best[1]:
        state = replace(state, best=(step, loss), worse=0)
        if state.settings.keep_best and step > 0:
            commands.append(MarkBest(step, loss))
    else:
        state = replace(state, worse=state.worse + 1)
    return _then(_drained(state, now_s), *commands)


def _loaded(state: State, stage: int, now_s: float) -> Result:
    if state.phase != "preparing":
        return state, []
    state = replace(state, waiting=state.waiting - {stage})
    if state.waiting:
        return state, [_loading(state)]
    state = replace(state, phase="training", ready={}, committed_s=now_s)
    instructions: list[protocol.Instruction] = []
    if state.moved_at is None:
        state = _evaluate(state, instructions)
    state = _try(replace(state, tried_at=None), instructions)
    if state.done < state.settings.steps:
        instructions.append(protocol.Train(state.done))
    else:  # there is nothing to train: what there is is saved
        assert state.plan is not None
        saving = {state.done: frozenset(range(len(state.plan.stages)))}
        state = replace(state, phase="draining", after="done", saving=saving)
        instructions.append(protocol.Checkpoint(state.done))
    return state, [
        Emit(events.Prepared(state.epoch, state.done)),
        Feed(state.epoch, state.done),
        Instruct(state.epoch, tuple(instructions)),
        *_meet(state, state.members),
    ]


def _ready(state: State, report: StageReport, now_s: float) -> Result:
    plan = state.plan
    if plan is None or state.phase != "training" or report.step != state.done:
        return state, []
    state = replace(state, ready={**state.ready, report.stage: report})
    return _commit(state, plan, now_s) if len(state.ready) == len(plan.stages) else (state, [])


def _commit(state: State, plan: Plan, now_s: float) -> Result:
    """Every stage is ready: the step happens, or is skipped everywhere if a gradient is not finite."""
    settings, step = state.settings, state.done
    reports = tuple(state.ready[i] for i in range(len(plan.stages)))
    norms = {name: norm for report in reports for name, norm in report.norms.items()}
    total, factor = settings.clip({name: norms[name] for name in settings.parameters if name in norms})
    skip = not (all(report.finite for report in reports) and math.isfinite(total))
    losses = next((tuple(report.losses) for report in reports if report.losses), ())
    loss = sum(losses) / len(losses) if losses else math.nan
    clip, lr = 0.0 if skip else factor, settings.lr_at(step)
    seconds = now_s - (now_s if state.committed_s is None else state.committed_s)

    state = replace(state, done=step + 1, ready={}, committed_s=now_s, trained_s=state.trained_s + seconds)
    leaving = any(member.leaving and state.needs(name) for name, member in state.members.items())
    if state.moved_at is not None and state.done >= state.moved_at + 2:
        state = replace(state, givers=frozenset())  # what is needed to apply a step was there for the one before
    if state.done == settings.steps or _enough(state):
        after = "done"
    elif state.stopping:
        after = "interrupted"
    elif leaving:
        after = "replan"
    elif _moves(state, plan) and not state.givers:
        after = "move"
    else:
        after = None

    instructions: list[protocol.Instruction] = []
    instructions.append(protocol.Commit(step, clip, lr, skip))
    if settings.keep_gradients and after == "done":
        instructions.append(protocol.Gradients(step))
    if after in (None, "done", "move"):
        state = _evaluate(state, instructions)
    if after not in (None, "move") or settings.checkpoint_due(state.done):
        state = replace(state, saving={**state.saving, state.done: frozenset(range(len(plan.stages)))})
        instructions.append(protocol.Checkpoint(state.done))
    adopted: list[Command] = []
    if after is None and state.switch is not None and not _moves(state, plan):
        plan, reason = state.switch.plan.with_epoch(state.epoch), state.switch.reason
        forward = tuple(stage.codec_forward for stage in plan.stages)
        instructions.append(protocol.Codecs(forward, tuple(stage.codec_backward for stage in plan.stages)))
        state = replace(state, plan=plan, switch=None, tried_at=None)
        adopted.append(Adopt(plan, reason))
    if after is None:
        state = _try(state, instructions)
        instructions.append(protocol.Train(state.done))
    else:
        state = replace(state, phase="draining", after=after)
    committed = events.StepCommitted(
        state.done, settings.steps, loss, losses, seconds, settings.tokens_per_step, total, lr, skip, reports
    )
    commands: list[Command] = [
        LedgerCommit(CommitRow(step, state.epoch, loss, total, clip, lr, skip, seconds), losses),
        Instruct(state.epoch, tuple(instructions)),
        Emit(committed),
        *adopted,
    ]
    return _then(_drained(state, now_s), *commands)


def _moves(state: State, plan: Plan) -> bool:
    """Whether another plan waits that takes more than other codecs."""
    return state.switch is not None and change(plan, state.switch.plan) in ("windows", "layers")


def _try(state: State, instructions: list[protocol.Instruction]) -> State:
    """See what the plan's codecs do, if they lose anything, and they are new or it is time."""
    stages = state.plan.stages if state.plan is not None else ()
    lossy = any({stage.codec_forward, stage.codec_backward} != {"identity"} for stage in stages)
    settings, last = state.settings, state.tried_at
    again = last is None or state.done >= last + settings.try_every
    dear = last is not None and state.trials_s > settings.try_share * state.trained_s
    if not lossy or not again or dear:
        return state
    instructions.append(protocol.Try(state.done))
    return replace(state, tried_at=state.done, trial_s=0.0)


def _tried(state: State, now_s: float) -> State:
    """A stage is done with a trial, which holds up the step that it comes before: the last one tells what it took."""
    taken_s = now_s - (now_s if state.committed_s is None else state.committed_s)
    return replace(state, trial_s=taken_s, trials_s=state.trials_s + taken_s - state.trial_s)


def _evaluate(state: State, instructions: list[protocol.Instruction]) -> State:
    if not state.settings.evaluation_due(state.done):
        return state
    instructions.append(protocol.Evaluate(state.done, state.settings.evaluate_microbatches))
    return replace(state, evaluating=state.evaluating | {state.done})


def _saved(state: State, step: int, stage: int) -> Result:
    if stage not in state.saving.get(step, ()):
        return state, []
    left = state.saving[step] - {stage}
    others = {other: stages for other, stages in state.saving.items() if other != step}
    if left:
        return replace(state, saving={**others, step: left}), []
    return replace(state, saving=others, writing=state.writing | {step}), [WriteCheckpoint(step)]


def _drained(state: State, now_s: float) -> Result:
    """When nothing is on its way any more, do what the draining was for."""
    if state.phase != "draining" or state.after == "texts" or not state.drained:
        return state, []
    if state.after == "replan":
        return _replan(state, now_s)
    if state.after == "move":
        return _move(state)
    if state.after == "done" and state.settings.continues:
        return replace(state, after="texts"), [_waiting("the model continues the prompts"), Continue(state.done + 1)]
    return _over(state, now_s)


def _over(state: State, now_s: float) -> Result:
    """All is trained and saved, or as much of it as the user wants."""
    early = state.done < state.settings.steps and _enough(state)
    reason = f"the held-out loss has not fallen in {state.worse} evaluations" if early else "done"
    return _finish(state, "interrupted" if state.after == "interrupted" else reason, now_s, failed=False)


def _enough(state: State) -> bool:
    return 0 < state.settings.patience <= state.worse


def _move(state: State) -> Result:
    """Everything is committed and nothing on its way: the stages of the next plan take over from those of this one."""
    switch = state.switch
    assert switch is not None
    givers = frozenset(stage.peer for stage in state.plan.stages) if state.plan else frozenset[str]()
    plan = switch.plan.with_epoch(state.epoch + 1)
    stages = frozenset(range(len(plan.stages)))
    state = replace(state, epoch=plan.epoch, phase="preparing", plan=plan, waiting=stages, switch=None, after=None)
    state = replace(state, moved_at=state.done, givers=givers)
    return state, [Prepare(plan, state.done, switch), _loading(state)]


def _replan(state: State, now_s: float) -> Result:
    """Go on from the newest checkpoint with those who stay; before any training, wait for more instead."""
    leavers = [name for name, member in state.members.items() if member.leaving]
    staying = {name: member for name, member in state.members.items() if not member.leaving}
    before: list[Command] = []
    for name in leavers:
        before += [Dismiss(name, "the step is saved and handed over"), Emit(events.PeerGone(name, "left"))]
    if state.done > state.checkpoint:
        before.append(LedgerRollback(state.checkpoint, state.epoch + 1))
    state = replace(state, members=staying, plan=None, done=state.checkpoint, ready={}, after=None, switch=None)
    state = replace(state, moved_at=None, givers=frozenset())
    if state.committed_s is None:
        return _then(_gathered(replace(state, phase="gathering", gathering_s=now_s), now_s), *before)
    if not staying:
        reason = f"no peer is left; resume it from step {state.checkpoint} when there are some"
        return _then(_finish(state, reason, now_s, failed=True), *before)
    return _then(_survey(state, now_s), *before)


def _lost(state: State, name: str, reason: str, now_s: float) -> Result:
    stage, leaving = state.stage_of(name), state.members[name].leaving
    members = {other: member for other, member in state.members.items() if other != name}
    state = replace(state, members=members)
    gone = Emit(events.PeerGone(name, "left" if leaving else reason))
    if state.phase == "gathering":
        return _then(_gathered(state, now_s), gone)
    if state.after == "texts" and stage is not None:
        return _then(_over(state, now_s), gone)
    if state.phase == "surveying":
        return _then(_surveyed(state, name) if members else _replan(state, now_s), gone)
    if stage is None and state.switch is not None and any(s.peer == name for s in state.switch.plan.stages):
        return _then(_stay(state), gone)
    harmless = state.phase == "draining" and state.after != "move" and not (state.saving or state.evaluating)
    if not (state.needs(name) or state.phase == "planning") or harmless:
        return state, [gone]
    state = replace(state, saving={}, evaluating=frozenset())
    if state.writing:
        after = "interrupted" if state.stopping else "replan"
        return replace(state, phase="draining", after=after), [gone]
    if state.stopping:
        return _then(_finish(state, "interrupted", now_s, failed=False), gone)
    return _then(_replan(state, now_s), gone)


def _stay(state: State) -> Result:
    """A peer of the plan to go over to is gone: go on with the plan that there is."""
    state = replace(state, switch=None)
    if state.after != "move":
        return state, []
    state = replace(state, phase="training", after=None)
    return state, [Instruct(state.epoch, (protocol.Train(state.done),)), *_meet(state, state.members)]


def _leaving(state: State, name: str, now_s: float) -> Result:
    """A peer's owner wants it back. One that is needed is let go when the step is finished and saved."""
    state = _with_member(state, name, replace(state.members[name], leaving=True))
    if state.needs(name) and state.phase in ("training", "draining"):
        return state, []
    return _then(_lost(state, name, "left", now_s), Dismiss(name, "thank you"))


def _stop(state: State, now_s: float) -> Result:
    state = replace(state, stopping=True)
    if state.phase == "draining" and state.after == "move":
        state, commands = _stay(state)
        return state, [*commands, _waiting("the step is finished and saved, then the run ends")]
    if state.after == "texts":
        return _over(state, now_s)
    if state.phase == "draining":
        return (replace(state, after="interrupted") if state.after == "replan" else state), []
    if state.phase == "training":
        return state, [_waiting("the step is finished and saved, then the run ends")]
    return _finish(state, "interrupted", now_s, failed=False)


def _tick(state: State, now_s: float) -> Result:
    settings = state.settings
    if state.phase == "gathering" and now_s - state.gathering_s > settings.wait_s:
        reason = f"after {settings.wait_s:.0f} s {who_is_here(state)}; give them the ticket or lower pipeline.peers"
        return _finish(state, reason, now_s, failed=True)
    if state.phase == "surveying" and now_s - state.survey_s > settings.survey_s:
        return _propose(replace(state, surveying=frozenset()))
    commands: list[Command] = []
    for name, member in state.members.items():
        if name in state.members and state.phase != "ended" and now_s - member.heard_s > settings.silence_s:
            reason = f"silent for {settings.silence_s:.0f} s"
            commands.append(Dismiss(name, reason))
            state, more = _lost(state, name, reason, now_s)
            commands += more
    return state, commands


def _finish(state: State, reason: str, now_s: float, failed: bool) -> Result:
    ended = events.Ended(state.done, reason, now_s - state.started_s)
    return replace(state, phase="ended"), [Emit(ended), Finish(reason, failed)]


def _with_member(state: State, name: str, member: Member) -> State:
    return replace(state, members={**state.members, name: member})


def _waiting(reason: str) -> Emit:
    return Emit(events.Waiting(reason))


def _loading(state: State) -> Emit:
    stages = len(state.plan.stages) if state.plan else 0
    return _waiting(f"{stages - len(state.waiting)} of {stages} stages have their weights")


def _then(result: Result, *first: Command) -> Result:
    """The result with these commands before its own."""
    return result[0], [*first, *result[1]]
