"""Words and records that everything else uses. A leaf of the import graph. Pure.

Shapes are tuples of ints, dtypes are torch's names without the prefix (`float32`), sizes are bytes, times are
seconds, rates are bytes per second, unless the name says otherwise.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, Literal, cast

from .errors import PlanError

PROTOCOL_VERSION = 1
"""Changes with the frame layout, the graph format or the control messages; peers refuse another version."""

COORDINATOR = "coordinator"
"""The coordinator's name among the peers of a transport: it sends model inputs."""

ONCE = -1
"""The microbatch number of what is sent once a step: parameters shared by several stages."""

MAX_GAPS = 4
"""A tensor may come in a layout that spans so many times the memory of its elements: a slice of a fused projection does
(3 times). The sender chooses the layout, so it must not choose how much is allocated."""

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor, enough to size a buffer. `stride` (in elements) is None when it is contiguous:
    a kernel may round differently on another memory layout, so layouts travel with tensors."""

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def dims_in_memory(self) -> tuple[int, ...]:
        """Dimensions from the slowest-moving to the fastest; of a contiguous tensor 0, 1, 2, ..."""
        if self.stride is None:
            return tuple(range(len(self.shape)))
        stride = self.stride
        return tuple(sorted(range(len(self.shape)), key=lambda d: -stride[d]))

    @property
    def packed(self) -> "TensorSpec":
        """What travels: the elements in memory order without gaps, a repeated (stride 0) dimension once."""
        if self.stride is None:
            return self
        shape = (1 if self.stride[d] == 0 else self.shape[d] for d in self.dims_in_memory)
        return TensorSpec(tuple(shape), self.dtype)


@dataclass(frozen=True, slots=True)
class Peer:
    """A process on someone's machine, as the planner sees it.

    `flops_per_s` is measured with the duty cap applied; `memory_bytes` is what the owner allows. All links from a
    peer share its uplink, all links to it its downlink; infinite where nothing is known. `region` groups peers.
    """

    name: str
    flops_per_s: float
    memory_bytes: int
    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    region: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two peers."""

    src: str
    dst: str
    rate_bytes_per_s: float
    latency_s: float


ActionKind = Literal["F", "B", "I", "W"]
_ACTION = re.compile(r"^(\d+)([FBIW])(\d+)$")


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work of a stage: `2F0` is stage 2, forward, microbatch 0.

    F forward, B full backward, I input gradient, W weight gradient: the letters of
    `torch.distributed.pipelining`.
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(word: str) -> "Action":
        """The inverse of `str`. Raises `PlanError` for anything else."""
        match = _ACTION.match(word)
        if match is None:
            raise PlanError(f"{word!r} is not an action; write stage, one of F B I W, microbatch, as in 2F0")
        stage, kind, microbatch = match.groups()
        return Action(int(stage), kind, int(microbatch))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Stage:
    """Ops `[first_op, end_op)` of the graph, run by one peer. `window` bounds its live microbatches.

    `codec_forward` is for the values that the stage sends, `codec_backward` for the gradients that it sends: a codec
    belongs to the sender. `recompute`: a microbatch keeps only what it received, and runs forward again for backward.
    """

    peer: str
    first_op: int
    end_op: int
    window: int
    compute_seconds: float = 0.0
    memory_bytes: int = 0
    codec_forward: str = "identity"
    codec_backward: str = "identity"
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Who runs what. A value: made by `geotrain.planner`, kept in a file, checked before launch.

    `graph_hash` ties it to one graph; `epoch` is its version number in a run. `period_seconds` is the time between
    two microbatches at the bottleneck; no plan can make a step shorter than `lower_bound_seconds`; `benched` peers
    are left out, and `notes` say why.
    """

    graph_hash: str
    schedule: Literal["gpipe", "1f1b"]
    microbatches: int
    stages: tuple[Stage, ...]
    epoch: int = 1
    step_seconds: float = 0.0
    period_seconds: float = 0.0
    lower_bound_seconds: float = 0.0
    benched: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """The inverse of `to_json`. Raises `PlanError` with what is missing, unknown or of a wrong type."""
        try:
            loaded: Any = json.loads(text)
            if not isinstance(loaded, dict):
                raise TypeError("a plan is an object with a list of stages")
            record = cast(dict[str, Any], loaded)
            _check_names(Plan, "it", record)
            rows: list[dict[str, Any]] = record.pop("stages")
            for i, row in enumerate(rows):
                _check_names(Stage, f"stage {i}", row)
            lists = {name: tuple(record.pop(name, ())) for name in ("benched", "notes")}
            plan = Plan(stages=tuple(Stage(**row) for row in rows), **lists, **record)
        except (ValueError, TypeError) as error:
            raise PlanError(f"this is not a plan file: {error}; write one with `geotrain plan`") from None
        for where, row, kinds in [
            *((f"stage {i}", s, _STAGE_TYPES) for i, s in enumerate(plan.stages)), ("the plan", plan, _PLAN_TYPES),
        ]:  # fmt: skip
            for name, kind in kinds.items():
                value = getattr(row, name)
                if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                    raise PlanError(f"this is not a plan file: {where} has {name}={value!r}")
        return plan

    def with_epoch(self, epoch: int) -> "Plan":
        return replace(self, epoch=epoch)


def _check_names(kind: type[Plan] | type[Stage], what: str, row: Mapping[str, Any]) -> None:
    """Raises `ValueError`."""
    needed = {f.name for f in fields(kind) if f.default is MISSING}
    wrong = [f"lacks {name!r}" for name in sorted(needed - set(row))]
    wrong += [f"has {name!r}, which is not of a plan" for name in sorted(set(row) - {f.name for f in fields(kind)})]
    if wrong:
        raise ValueError(f"{what} {' and '.join(wrong[:3])}")


_STAGE_TYPES: dict[str, Any] = {
    "peer": str,
    "first_op": int,
    "end_op": int,
    "window": int,
    "codec_forward": str,
    "codec_backward": str,
    "recompute": bool,
}
_PLAN_TYPES: dict[str, Any] = {"graph_hash": str, "schedule": str, "microbatches": int, "epoch": int}

Direction = Literal["F", "B", "E", "M"]
"""F: a forward value (an activation, a model input, a shared parameter); B: a gradient; E: a forward value of
an evaluation pass; M: a part of a stage's state that moves to another peer, or of a link's survey."""


RAW_TRIAL, CODED_TRIAL = 1, 2
"""A microbatch is now and then run twice beside the step, without codecs and with them, to see what they do to its
gradients. These are the attempts in the keys of its frames."""


@dataclass(frozen=True, slots=True)
class FrameKey:
    """What a frame is; unique among the frames one peer receives in a run. Stale epochs are dropped. `attempt` tells a
    trial's frames from the step's own: see `RAW_TRIAL`."""

    epoch: int
    step: int
    microbatch: int
    value: str
    direction: Direction
    attempt: int = 0


@dataclass(slots=True)
class Frame:
    """One tensor on its way. `payload` is the codec's output, one or more buffers that are joined on the wire;
    `absent` means there is no tensor (no gradient flows here) and the payload is empty. `sent_s`: when it began to
    leave, on the sender's monotonic clock."""

    key: FrameKey
    codec: str
    spec: TensorSpec
    payload: list[Any]
    absent: bool = False
    sent_s: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(memoryview(part).nbytes for part in self.payload)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one peer's time: `activity` is compute, encode, wait, apply or idle; `label` says of what
    (an action, or the value waited for and from whom). Seconds on that peer's monotonic clock, from the step's
    start."""

    activity: str
    label: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What crossed one directed link in a step, as its receiver saw it.

    `timed_bytes` took `busy_s` on the link; the rest of `nbytes` came in frames too short to time. `delay_s` is the
    least time on the way, by the clocks of both ends, so it holds their offset; None if nothing came.
    """

    src: str
    dst: str
    nbytes: int
    timed_bytes: int
    busy_s: float
    delay_s: float | None


@dataclass(frozen=True, slots=True)
class CodecUse:
    """What a stage encoded with one codec in one direction in a step: `elements` of `raw_bytes` in `wire_bytes`.
    `not_finite` of its messages held a NaN or an infinity, and travelled as they were.

    Of `samples` messages with `sampled_bytes` before encoding, decoded again by the sender in `decode_s`: `error`, the
    sum of their relative squared errors |x - y|^2 / |x|^2, and `gain`, the sum of <x, y> / <x, x> (1 each if unbiased).
    """

    direction: str
    codec: str
    elements: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    sampled_bytes: int = 0
    samples: int = 0
    error: float = 0.0
    gain: float = 0.0
    not_finite: int = 0

    def plus(self, other: "CodecUse") -> "CodecUse":
        """Both together; direction and codec are this one's."""
        sums = [f.name for f in fields(self) if f.name not in ("direction", "codec")]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in sums})


@dataclass(frozen=True, slots=True)
class Trial:
    """What the codecs do to one stage's gradients of one microbatch: squared norms of the gradients without codecs, of
    those with them, and of the difference. `losses`: of the microbatch, without and with, where the stage makes it."""

    step: int
    stage: int
    raw: float
    coded: float
    difference: float
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a stage tells when it has all gradients of a step.

    `norms`: gradient norm by parameter name, so that the coordinator can add them in the model's own order and
    clip exactly as one process does. `losses`: by microbatch, from the stage that ends in the loss.
    """

    step: int
    stage: int
    peer: str
    finite: bool
    norms: dict[str, float]
    losses: list[float]
    seconds: float
    spans: tuple[Span, ...]
    links: tuple[LinkUse, ...]
    memory_bytes: int
    codecs: tuple[CodecUse, ...] = ()
