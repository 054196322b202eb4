"""What a run is at a moment, what can happen to it, and what can be done about it: control's records. Pure.

Step numbers: `done` steps are committed, the step that runs is number `done`; a checkpoint or an evaluation
"at n" is the state after n steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from . import events, protocol
from .base import Peer, Plan, StageReport

Phase = Literal["gathering", "surveying", "planning", "preparing", "training", "draining", "ended"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the decisions depend on. `peers` must join within `wait_s`, those `named` among them; a peer silent
    for `silence_s` is lost.
    With `survey`, links to peers who are new are measured before a plan is made, for `survey_s` at most. What
    lossy codecs do is tried once when they are new, and again after `try_every` steps or, where trials would take more
    than the fraction `try_share` of the time, as many as keep them within that. The run is
    evaluated (if on any microbatches) at its start, its end and every so many steps, and saved at its end and
    every so many steps; with `keep_best` also where it is evaluated. It ends early when `patience` (if any)
    evaluations in a row have not lowered the held-out loss. If it `continues` texts, it does so
    last. `parameters` is the model's order, in which `clip` adds norms."""

    steps: int
    peers: int
    parameters: tuple[str, ...]
    lr_at: Callable[[int], float]
    clip: Callable[[Mapping[str, float]], tuple[float, float]]
    tokens_per_step: int = 0
    evaluate_every: int = 0
    evaluate_microbatches: int = 0
    checkpoint_every: int = 0
    keep_best: bool = False
    patience: int = 0
    keep_gradients: bool = False
    continues: bool = False
    named: frozenset[str] = frozenset()
    survey: bool = False
    try_every: int = 200
    try_share: float = 0.01
    wait_s: float = 300.0
    silence_s: float = 15.0
    survey_s: float = 30.0

    def evaluation_due(self, step: int) -> bool:
        """Whether the state after `step` steps is evaluated."""
        due = step in (0, self.steps) or (self.evaluate_every > 0 and step % self.evaluate_every == 0)
        return self.evaluate_microbatches > 0 and due

    def checkpoint_due(self, step: int) -> bool:
        """Whether the state after `step` steps is saved."""
        due = step == self.steps or (self.checkpoint_every > 0 and step % self.checkpoint_every == 0)
        return due or (self.keep_best and self.evaluation_due(step))


@dataclass(frozen=True, slots=True)
class Member:
    """A peer that is in. `heard_s`: when it last said anything; `surveyed`: the links to all others were measured;
    `known`: it has said how fast it is, and plans are made with it in mind."""

    peer: Peer
    duty: float
    address: str
    kind: str
    heard_s: float
    leaving: bool = False
    surveyed: bool = False
    known: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """Everything the coordinator decides by. `checkpoint` is the newest complete one (0: the fresh weights).

    `surveying` holds the peers who still look at their links, since `survey_s`; `waiting` the stages that still
    have to load; `ready` the reports of the running step; `saving` the
    stages whose part of a checkpoint is still on its way; `writing` the checkpoints being completed on disk;
    `evaluating` the evaluations without an answer. `after` says what follows when all these are empty. `switch` is
    the plan to go over to at the next commit. An epoch that began by going over, not from a checkpoint, did so at step
    number `moved_at`, and until its second step is done the stages' state may still be on its way from the `givers`.
    The plan's codecs were last put to trial before step number `tried_at`. That trial has taken `trial_s` so far, all
    have taken `trials_s`, and all steps, with these, `trained_s`.
    `best`: the evaluation with the least held-out loss, by step; `worse`: how many came since.
    `gathering_s` is when gathering began, `committed_s` when the last step was committed or training began.
    """

    settings: Settings
    started_s: float
    gathering_s: float
    phase: Phase = "gathering"
    epoch: int = 0
    members: Mapping[str, Member] = field(default_factory=dict[str, Member])
    plan: Plan | None = None
    done: int = 0
    checkpoint: int = 0
    surveying: frozenset[str] = frozenset()
    survey_s: float = 0.0
    waiting: frozenset[int] = frozenset()
    ready: Mapping[int, StageReport] = field(default_factory=dict[int, StageReport])
    saving: Mapping[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    writing: frozenset[int] = frozenset()
    evaluating: frozenset[int] = frozenset()
    after: Literal["done", "interrupted", "replan", "move", "texts"] | None = None
    switch: "Switch | None" = None
    moved_at: int | None = None
    givers: frozenset[str] = frozenset()
    tried_at: int | None = None
    trial_s: float = 0.0
    trials_s: float = 0.0
    trained_s: float = 0.0
    stopping: bool = False
    best: tuple[int, float] | None = None
    worse: int = 0
    committed_s: float | None = None

    def needs(self, name: str) -> bool:
        """Whether a step waits for this peer: it has a stage, or gave one away and not all of it may have come."""
        return self.stage_of(name) is not None or name in self.givers

    def stage_of(self, name: str) -> int | None:
        """The stage that a peer runs in the active plan."""
        stages = self.plan.stages if self.plan is not None else ()
        return next((i for i, stage in enumerate(stages) if stage.peer == name), None)

    @property
    def drained(self) -> bool:
        return not (self.saving or self.writing or self.evaluating)


# Events. Those with an epoch are ignored when it is not the active one.


@dataclass(frozen=True, slots=True)
class Joined:
    """A peer asks to be let in; `session` is its connection."""

    session: int
    peer: Peer
    duty: float
    address: str
    kind: str


@dataclass(frozen=True, slots=True)
class Said:
    """A message from a peer that is in."""

    name: str
    message: protocol.FromPeer


@dataclass(frozen=True, slots=True)
class Lost:
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class PlanChosen:
    plan: Plan


@dataclass(frozen=True, slots=True)
class PlanRefused:
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Switch:
    """A better plan for the running epoch `epoch` was found: go over to it after this step. `reason` is for people."""

    epoch: int
    plan: Plan
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    step: int
    path: Path
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Continued:
    """The texts are written: prompts, and what follows them."""

    texts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class UserStop:
    """The coordinator's user wants to end: the running step is finished and saved first."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The coordinator itself cannot go on, such as with a full disk."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    Joined | Said | Lost | PlanChosen | PlanRefused | Switch | CheckpointWritten | Continued | UserStop | Broken | Tick
)


# Commands, to be carried out in order.


@dataclass(frozen=True, slots=True)
class Welcome:
    """The connection is now the peer of that name."""

    session: int
    name: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """End a connection that is nobody's, and say why."""

    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Tell a peer to go, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Survey:
    """Let these peers measure the links between them, and what is not known of their kind of machine; each answers
    `Surveyed`."""

    epoch: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Consider:
    """A peer that joined while the run trains is known now: link it with the others, and see whether a plan with it is
    better; if so, answer `Switch`."""

    name: str


@dataclass(frozen=True, slots=True)
class Propose:
    """Make a plan of this epoch over these peers, and answer `PlanChosen` or `PlanRefused`."""

    epoch: int
    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make every stage of the plan ready to train after `step` steps: from the checkpoint there, or, if a `switch`
    says why, with the state that the stages of the plan before have."""

    plan: Plan
    step: int
    switch: Switch | None = None


@dataclass(frozen=True, slots=True)
class Adopt:
    """The epoch goes on with another plan that differs in codecs only."""

    plan: Plan
    reason: str


@dataclass(frozen=True, slots=True)
class Feed:
    """Send model inputs of this epoch, from step number `step` on."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Instruct:
    """The same instructions for every peer of the plan."""

    epoch: int
    instructions: tuple[protocol.Instruction, ...]


@dataclass(frozen=True, slots=True)
class CommitRow:
    """A row of the ledger: one committed step. `loss` is the mean over microbatches, `grad_norm` the norm
    before clipping by factor `clip` (0 where `skipped`); `seconds`: since the commit before."""

    step: int
    epoch: int
    loss: float
    grad_norm: float
    clip: float
    lr: float
    skipped: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class LedgerCommit:
    """Write the row and the microbatches' losses before any later command is carried out."""

    row: CommitRow
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LedgerRollback:
    """Forget the commits from step number `step` on; epoch `epoch` does them again."""

    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """All stages' parts have arrived: complete it on disk and answer `CheckpointWritten`."""

    step: int


@dataclass(frozen=True, slots=True)
class Continue:
    """Let the pipeline continue the job's texts; answer `Continued`. Frames may be of steps from `step` on."""

    step: int


@dataclass(frozen=True, slots=True)
class MarkBest:
    """No state had a lower held-out loss than the one after this step."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Emit:
    event: events.RunEvent


@dataclass(frozen=True, slots=True)
class Finish:
    """Dismiss everybody. `failed`: the run did not end as its user wanted."""

    reason: str
    failed: bool


Command = (
    Welcome | Refuse | Dismiss | Survey | Consider | Propose | Prepare | Adopt | Feed | Instruct | LedgerCommit
    | LedgerRollback | WriteCheckpoint | Continue | MarkBest | Emit | Finish
)  # fmt: skip
