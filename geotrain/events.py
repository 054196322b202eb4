"""What a run tells the outside: one record a thing that happened. The live view, the report, `--json` and
`events.jsonl` in the run folder are all made from these. Pure."""

from dataclasses import dataclass, field
from pathlib import Path

from .base import Link, Peer, Plan, StageReport
from .flows import LinkLoad


@dataclass(frozen=True, slots=True)
class PeerJoined:
    name: str
    flops_per_s: float
    memory_bytes: int
    duty: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing moves until `reason` is over, such as `2 of 4 peers have joined`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan was chosen. `stage_ops`: op count by stage; `stage_blocks`: a phrase by stage, such as
    `blocks.0-blocks.2`; `parameters`: how many the model has; `reason`: why the plan before it was given up while
    the run went on (empty for a plan that starts from weights on disk, or fresh). The simulator's word of a step:
    `predicted_s` seconds, what it waits for most (`bottleneck`, in words), and what crosses which link (`loads`).
    `peers` and `links` as they were measured (speeds in FLOP/s of this model), whether the plan uses them or not.
    `budget_shares`: by stage, how much of the loss budget the codecs of its values and of its gradients take."""

    plan: Plan
    stage_ops: tuple[int, ...]
    stage_blocks: tuple[str, ...]
    parameters: int
    reason: str = ""
    predicted_s: float = 0.0
    bottleneck: str = ""
    loads: tuple[LinkLoad, ...] = ()
    peers: tuple[Peer, ...] = ()
    links: tuple[Link, ...] = ()
    budget_shares: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Considered:
    """After `step` steps something was not as planned, and the plan stays all the same; `reason` says why."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tried:
    """What the codecs did to a microbatch of step number `step`: `error` |g' - g|^2 / |g|^2 of its gradients,
    `loss_change` of its loss; so they cost the fraction `cost` of extra steps, of the `budget`."""

    step: int
    error: float
    loss_change: float
    cost: float
    budget: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """Every stage has its weights; training starts (or goes on) at `step`."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """A step is in the ledger. `loss`: mean over microbatches; `seconds`: from the last commit to this one;
    `skipped`: some gradient was not finite, so no weight changed."""

    step: int
    steps: int
    loss: float
    losses: tuple[float, ...]
    seconds: float
    tokens: int
    grad_norm: float
    lr: float
    skipped: bool
    stages: tuple[StageReport, ...]


@dataclass(frozen=True, slots=True)
class Evaluated:
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Checkpointed:
    step: int
    path: Path
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came to a peer that loads its stage: weights that no step changes, which stay in its cache, and the rest,
    from the coordinator; and such weights from other peers."""

    name: str
    base_bytes: int
    state_bytes: int
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Continued:
    """What the trained model says after a prompt."""

    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class PeerProgress:
    """A peer's heartbeat: what it does now, and what it waits for."""

    name: str
    step: int
    state: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over. `reason` is `done`, `interrupted`, or why it failed."""

    step: int
    reason: str
    seconds: float = field(default=0.0)


RunEvent = (
    PeerJoined | Waiting | Planned | Considered | Tried | Prepared | StepCommitted | Evaluated | Checkpointed
    | Fetched | Continued | PeerProgress | PeerGone | Ended
)  # fmt: skip
