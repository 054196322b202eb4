"""What lossy codecs share: elements as float32 in memory order, a flag byte, and a way out. Pure.

    flag    u8: 0, the codec's own bytes follow; 1, the elements follow as the identity codec writes them
    body

The way out is taken by what holds a NaN or an infinity (it travels as it is, is never spread, and changes no state),
by dtypes other than float32, bfloat16 and float16, and by what the codec would not make smaller. What comes out of a
body is finite, whatever the bytes: NaN becomes 0, and the rest is held within the dtype's range.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..base import TensorSpec
from ..errors import RemoteProtocolError
from ..graph.ops import to_dtype
from ..graph.serial import tensor_spec
from .base import Message, Payload, State
from .identity import from_raw, pack, raw, unpack

CODED, RAW = 0, 1
FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Lossy(ABC):
    """A codec is `write`, `read` and `coded_bytes`; the rest is here. One whose size depends on the values overrides
    `accepts` with `at_most_raw`."""

    name: str
    lossless: bool = False
    unbiased: bool = False

    @abstractmethod
    def write(
        self, x: torch.Tensor, peak: float, spec: TensorSpec, state: State, message: Message
    ) -> tuple[Sequence[torch.Tensor | bytes], State]:
        """`x`: float32, one dimension, memory order, finite, at least one element, any device; not to be changed.
        `peak` is its largest magnitude. Returns the body as uint8 tensors or bytes, which are joined."""

    @abstractmethod
    def read(
        self, body: memoryview, spec: TensorSpec, device: torch.device, state: State, message: Message
    ) -> tuple[torch.Tensor, State]:
        """A new float32 tensor of `spec.packed.numel` elements, in memory order. Raises `RemoteProtocolError`."""

    @abstractmethod
    def coded_bytes(self, spec: TensorSpec) -> int:
        """Size of the body for a float tensor that is not empty."""

    def init(self, spec: TensorSpec) -> State:
        return {}

    def encode(self, tensor: torch.Tensor, state: State, message: Message) -> tuple[Payload, State]:
        spec = tensor_spec(tensor)
        if spec.dtype in FLOATS and self.size_bytes(spec) <= spec.packed.nbytes:
            x = pack(tensor).float()
            low, high = torch.aminmax(x)
            peak = torch.maximum(-low, high).item()
            if peak <= torch.finfo(torch.float32).max:
                body, after = self.write(x, peak, spec, state, message)
                payload = [memoryview(bytes([CODED])), *map(as_view, body)]
                if sum(part.nbytes for part in payload) <= spec.packed.nbytes:
                    return payload, after
        return [memoryview(bytes([RAW])), *raw(tensor)], state

    def decode(
        self, payload: memoryview, spec: TensorSpec, device: torch.device, state: State, message: Message
    ) -> tuple[torch.Tensor, State]:
        if payload.nbytes and payload[0] == RAW:
            return from_raw(memoryview(bytearray(payload[1:])), spec, device), state  # copied: elements are aligned
        coded = payload.nbytes and payload[0] == CODED and payload.nbytes <= spec.packed.nbytes
        if not coded or not self.accepts(spec, payload.nbytes) or spec.dtype not in FLOATS:
            raise RemoteProtocolError(f"{payload.nbytes} bytes came that are no tensor written by {self.name}")
        x, state = self.read(payload[1:], spec, device, state, message)
        most = torch.finfo(to_dtype(spec.dtype)).max
        x = x.nan_to_num_(0.0, most, -most)
        if spec.dtype != "float32":
            x = x.clamp_(-most, most).to(to_dtype(spec.dtype))
        return unpack(x, spec), state

    def size_bytes(self, spec: TensorSpec) -> int:
        packed = spec.packed
        coded = self.coded_bytes(spec) if spec.dtype in FLOATS and packed.numel else packed.nbytes
        return 1 + (coded if coded < packed.nbytes else packed.nbytes)

    def accepts(self, spec: TensorSpec, nbytes: int) -> bool:
        return nbytes in (self.size_bytes(spec), 1 + spec.packed.nbytes)


def at_most_raw(spec: TensorSpec, nbytes: int) -> bool:
    """`accepts` of a codec whose size depends on the values: never more than the way out takes."""
    return 0 < nbytes <= 1 + spec.packed.nbytes


def in_rows(x: torch.Tensor, width: int) -> torch.Tensor:
    """(ceil(n / width), width): the last row is filled up with zeros, which makes a copy."""
    fill = -x.numel() % width
    return (torch.nn.functional.pad(x, (0, fill)) if fill else x).view(-1, width)


def as_bytes(body: memoryview, device: torch.device) -> torch.Tensor:
    """A body, or part of one, as uint8."""
    if not body.nbytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(body if not body.readonly else bytearray(body), dtype=torch.uint8).to(device)


def row_width(spec: TensorSpec, least: int = 1) -> int:
    """Elements in a row: the dimension that moves fastest in memory; everything is one row where that is under `least`.

    In activations and their gradients this is the channels of a token.
    """
    packed = spec.packed
    width = packed.shape[-1] if packed.shape else 1
    return width if width >= least else packed.numel


def as_view(part: torch.Tensor | bytes) -> memoryview:
    """The inverse of `as_bytes`."""
    if isinstance(part, bytes):
        return memoryview(part)
    return memoryview(cast(Any, part.contiguous().view(-1).view(torch.uint8).cpu().numpy()))
