"""Control messages between coordinator and peers, as bytes: one kind byte, then msgpack. Pure.

A message is a frozen dataclass. On the wire a dataclass is a list: its class name, then its fields in order.
Reading is strict: the exact number of fields, each of the exact type, no more bytes than the kind may have.
Whatever breaks that raises `RemoteProtocolError` and costs the sender its connection.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints, overload

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from .base import LinkUse, StageReport, TensorSpec, Trial
from .blocks import BlockTime
from .errors import RemoteProtocolError

CHUNK_BYTES = 1 << 20
"""Tensors travel beside the messages in chunks of this size: gRPC's best rate at little memory."""

MESSAGE_BYTES = 64 << 20
"""The most a peer takes in one message (a stage's graph); the coordinator takes far less."""


@dataclass(frozen=True, slots=True)
class NamedSpec:
    """A tensor by name, with the shape and dtype the sender of the record has in mind. `digest` is the SHA-256 of its
    bytes, in hex, where it is of the weights that no step changes; such tensors are in no checkpoint."""

    name: str
    spec: TensorSpec
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Hello:
    """A peer asks to join. `flops_per_s` is measured, duty cap included; other peers dial `address`; peers of one
    `kind` are alike but for their speed."""

    version: int
    run: str
    token: bytes
    name: str
    flops_per_s: float
    memory_bytes: int
    duty: float
    address: str
    kind: str


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What a peer saw of the links to it, and how long the blocks of the survey took, while it did `flops_per_s`."""

    epoch: int
    links: tuple[LinkUse, ...]
    flops_per_s: float
    times: tuple[BlockTime, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The stage of this epoch is built and has its weights; `shared_bytes` of them came from other peers' caches."""

    epoch: int
    stage: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Ready:
    """All gradients of the step are there; state k-1 is still in place."""

    epoch: int
    report: StageReport


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of a trial."""

    epoch: int
    trial: Trial


@dataclass(frozen=True, slots=True)
class Scored:
    """Held-out losses after `step` steps, by microbatch, from the stage that ends in the loss."""

    epoch: int
    step: int
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Continued:
    """The likeliest tokens, as `Continue` asks for them, from the stage that makes the logits."""

    epoch: int
    step: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """The stage's whole state after `step` steps has reached the coordinator."""

    epoch: int
    step: int
    stage: int


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The peer has a tensor that it was to fetch beforehand; `shared_bytes` of it came from other peers' caches."""

    epoch: int
    name: str
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A heartbeat: what the peer does, and what it waits for. One without a stage also says what it can do now
    (`flops_per_s`, 0: not measured again), and what came over the links to it."""

    epoch: int
    step: int
    state: str
    flops_per_s: float = 0.0
    links: tuple[LinkUse, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The stage cannot go on; `reason` is one line for the user."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """The peer's owner wants it back: finish the step, hand over, let it go."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The peer is in; heartbeats are due every `heartbeat_s`."""

    run: str
    heartbeat_s: float


@dataclass(frozen=True, slots=True)
class Survey:
    """Send test frames to everybody in `roster` (perhaps nobody else), take theirs, and say what the links are like.
    Then time `blocks` of the model, as stage graphs' bytes."""

    epoch: int
    roster: dict[str, str]
    blocks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A parameter (with its optimizer state) or buffer that the stage takes over as it is now, from peer `src`,
    which may be the stage's own."""

    name: str
    src: str


@dataclass(frozen=True, slots=True)
class Gift:
    """A parameter or buffer of the old epoch's stage that other peers take over."""

    name: str
    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Holder:
    """The peer at `address` has the tensors called `names`, and is the one to ask for them."""

    address: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """The old epoch is over: become `stage` of this one.

    `graph` is a stage graph's bytes, `actions` its schedule as words, `train` the job's training section as
    JSON, `seed` the run's. `names` is the peer of each stage and `roster` the address of each peer. `fetch` are
    the tensors to fetch, from `holders` or else from the coordinator, `moves` those that come from the stages before;
    a parameter or buffer that is among neither is made from its own init. `gifts` are given to others first. `step`
    steps are done. `codecs` are all that the others may compress with while this epoch lasts.
    """

    epoch: int
    step: int
    stage: int
    graph: bytes
    actions: tuple[str, ...]
    train: str
    seed: int
    names: tuple[str, ...]
    roster: dict[str, str]
    fetch: tuple[NamedSpec, ...]
    holders: tuple[Holder, ...]
    moves: tuple[Move, ...]
    gifts: tuple[Gift, ...]
    codec_forward: str
    codec_backward: str
    codecs: tuple[str, ...]
    recompute: bool


@dataclass(frozen=True, slots=True)
class Release:
    """The peer has no stage in this epoch. It gives away what the others take over, and waits for a plan."""

    epoch: int
    step: int
    roster: dict[str, str]
    gifts: tuple[Gift, ...]


@dataclass(frozen=True, slots=True)
class Meet:
    """Link up with these, too: they joined after the epoch began."""

    epoch: int
    roster: dict[str, str]


@dataclass(frozen=True, slots=True)
class Train:
    """Run the stage's actions of step number `step`, then say `Ready`."""

    step: int


@dataclass(frozen=True, slots=True)
class Try:
    """Before step number `step`: run its first microbatch without codecs and with them, then say `Tried`."""

    step: int


@dataclass(frozen=True, slots=True)
class Codecs:
    """From now on compress with these, by stage: the values that it sends, and the gradients that it sends."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Step `step` is in the ledger: apply its gradients times `clip` at rate `lr`, or drop them if `skip`."""

    step: int
    clip: float
    lr: float
    skip: bool


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Pass `count` held-out microbatches forward, after `step` steps."""

    step: int
    count: int


@dataclass(frozen=True, slots=True)
class Continue:
    """Pass one microbatch forward, as that of an evaluation after `step` steps, and say what follows: in each row,
    after the token at that one of `places`."""

    step: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Send the stage's state after `step` steps, while the next step computes; its commit waits for that."""

    step: int


@dataclass(frozen=True, slots=True)
class Gradients:
    """Send the gradients of step number `step`, as its commit applied them."""

    step: int


Instruction = Train | Try | Codecs | Commit | Evaluate | Continue | Checkpoint | Gradients


@dataclass(frozen=True, slots=True)
class Probe:
    """Send a test frame of `nbytes` to `dst`."""

    epoch: int
    dst: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Fetch these into the cache while the stage computes, as `Prepare` would have it, and say `Prefetched` of each: a
    stage of the next epoch may need them. What an earlier message asked for is given up."""

    epoch: int
    tensors: tuple[NamedSpec, ...]
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class Instruct:
    """Work for the peer's queue, in order."""

    epoch: int
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """Go; `reason` is one line for the volunteer. A refused peer gets this instead of `Welcome`."""

    reason: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Fetch:
    """A peer asks for tensors of this epoch; the answer is their raw bytes, one after the other, in chunks, without the
    first `skip` bytes."""

    run: str
    token: bytes
    peer: str
    epoch: int
    names: tuple[str, ...]
    skip: int


@dataclass(frozen=True, slots=True)
class FetchShared:
    """A peer asks another one for tensors by the SHA-256 of their bytes; the answer is like that to `Fetch`."""

    run: str
    token: bytes
    digests: tuple[str, ...]
    skip: int


@dataclass(frozen=True, slots=True)
class Store:
    """Opens an upload of a stage's tensors: raw bytes, one after the other, in chunks, follow. `gradients`
    says that they are those of step number `step`; otherwise they are the state after `step` steps."""

    run: str
    token: bytes
    epoch: int
    stage: int
    step: int
    gradients: bool
    tensors: tuple[NamedSpec, ...]


FromPeer = (
    Hello | Surveyed | Loaded | Ready | Tried | Scored | Continued | Saved | Prefetched | Progress | Failed | Leaving
)
FromCoordinator = Welcome | Survey | Prepare | Release | Meet | Probe | Prefetch | Instruct | Leave
Transfer = Fetch | FetchShared | Store
Message = FromPeer | FromCoordinator | Transfer

_KIB, _MIB = 1 << 10, 1 << 20
_LIMITS: Mapping[type[Any], int] = {
    Hello: 4 * _KIB, Loaded: _KIB, Ready: 3 * _MIB, Scored: _MIB, Saved: _KIB, Progress: 32 * _KIB,
    Failed: 64 * _KIB, Leaving: _KIB, Welcome: _KIB, Prepare: MESSAGE_BYTES, Instruct: 64 * _KIB,
    Leave: 64 * _KIB, Fetch: 3 * _MIB, Store: 3 * _MIB, Survey: MESSAGE_BYTES, Surveyed: 3 * _MIB, Release: 3 * _MIB,
    Probe: _KIB, Tried: _KIB, FetchShared: _MIB, Continued: 64 * _KIB, Prefetch: 3 * _MIB, Prefetched: 4 * _KIB,
    Meet: 3 * _MIB,
}  # fmt: skip
"""The most bytes of each kind. The order is the kind byte."""

_KINDS = tuple(_LIMITS)

_pack: Callable[..., bytes] = cast(Any, msgpack).packb
_unpack: Callable[..., Any] = cast(Any, msgpack).unpackb


def encode(message: Message) -> bytes:
    """The bytes of a message. Raises `RemoteProtocolError` if it is larger than its kind may be."""
    kind = type(message)
    data = bytes([_KINDS.index(kind)]) + _pack(message, default=_fields)
    if len(data) > _LIMITS[kind]:
        raise RemoteProtocolError(f"a {kind.__name__} of {len(data)} bytes is over {_LIMITS[kind]}")
    return data


M = TypeVar("M")


@overload
def decode(data: bytes, accepted: type[M]) -> M: ...
@overload
def decode(data: bytes, accepted: types.UnionType) -> Any: ...
def decode(data: bytes, accepted: Any) -> Any:
    """The inverse of `encode`. `accepted` is a message class or a union of them, such as `FromPeer`."""
    kind = _KINDS[data[0]] if data and data[0] < len(_KINDS) else None
    if kind is None or kind not in (get_args(accepted) or (accepted,)):
        raise RemoteProtocolError("a message of a kind that is not expected here")
    if len(data) > _LIMITS[kind]:
        raise RemoteProtocolError(f"a {kind.__name__} of {len(data)} bytes is over {_LIMITS[kind]}")
    try:
        return _reader(kind)(_unpack(data[1:], max_ext_len=0))
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"a malformed {kind.__name__}: {error}") from None


def _fields(value: Any) -> list[Any]:
    kind = cast(type[Any], type(value))
    return [kind.__name__, *(getattr(value, name) for name in _field_names(kind))]


@cache
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


Reader = Callable[[Any], Any]


@cache
def _reader(hint: Any) -> Reader:
    """A function that checks a value against a type hint and gives it the hint's form."""
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _record(cast(type[Any], hint))
    if origin in (Union, types.UnionType) and args[1:] == (types.NoneType,):
        return _optional(_reader(args[0]))
    if origin in (Union, types.UnionType):
        return _one_of(args)
    if origin in (tuple, list):
        if origin is tuple and args[-1:] != (Ellipsis,):
            raise TypeError(f"no reader for {hint}")  # no message has one
        return _many(origin, _reader(args[0]))
    if origin is dict:
        return _mapping(_reader(args[0]), _reader(args[1]))
    return _scalar(hint)


def _scalar(kind: type[Any]) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise ValueError(f"{type(value).__name__} where {kind.__name__} belongs")

    return read


def _optional(item: Reader) -> Reader:
    return lambda value: None if value is None else item(value)


def _many(kind: type[Any], item: Reader) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not list:
            raise ValueError(f"{type(value).__name__} where a list belongs")
        return kind(map(item, cast(list[Any], value)))

    return read


def _mapping(key: Reader, item: Reader) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise ValueError(f"{type(value).__name__} where a map belongs")
        return {key(k): item(v) for k, v in cast(dict[Any, Any], value).items()}

    return read


def _record(kind: type[Any]) -> Reader:
    hints = get_type_hints(kind)
    readers = tuple(_reader(hints[name]) for name in _field_names(kind))
    size, name = len(readers) + 1, kind.__name__

    def read(value: Any) -> Any:
        items = cast(list[Any], value)
        if type(value) is not list or len(items) != size or items[0] != name:
            raise ValueError(f"something else where a {name} of {size - 1} fields belongs")
        return kind(*(reader(item) for reader, item in zip(readers, items[1:], strict=True)))

    return read


def _one_of(kinds: tuple[type[Any], ...]) -> Reader:
    readers = {kind.__name__: _record(kind) for kind in kinds}

    def read(value: Any) -> Any:
        items = cast(list[Any], value)
        reader = readers.get(items[0]) if type(value) is list and items and type(items[0]) is str else None
        if reader is None:
            raise ValueError(f"none of {', '.join(readers)}")
        return reader(value)

    return read
