"""Without loss, smaller than it lies in memory: whole numbers in few bytes, tensors of mostly zeros. Pure.

    kind    u8
      0, raw      the elements as the identity codec writes them
      1, range    least i64 | width u8 | byte 0 of all elements less the least, byte 1 of all, ...: whole numbers
      2, sparse   places (see `indices`) of the elements with a bit set | those elements; of truths the places only
      3, rows     places of the rows with a bit set | those rows; of the dimension that moves slowest in memory
                                                                                              (little-endian)

What is smallest is sent. Token numbers take as many bytes as the largest needs; the gradient of an embedding takes its
used rows. `rows-C`, for gradients of embeddings with loss, is

    kind    u8: 4 | length of the places u32 | places of the rows with an element that is not 0 | those rows by codec C

where that is smaller than 3/4 of all rows would be, and else what C writes.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from ..base import TensorSpec
from ..errors import RemoteProtocolError
from ..graph.ops import to_dtype
from ..graph.serial import tensor_spec
from . import indices
from .base import Codec, Message, Payload, State
from .identity import from_raw, pack, raw, unpack
from .lossy import FLOATS, as_bytes
from .rounded import BF16, INT8

_RAW, _RANGE, _SPARSE, _ROWS, _CODED = range(5)
WHOLE = {"int64", "int32", "int16", "uint8", "int8"}


@dataclass(frozen=True, slots=True)
class Pack:
    name: str = "pack"
    lossless: bool = True
    unbiased: bool = True

    def init(self, spec: TensorSpec) -> State:
        return {}

    def encode(self, tensor: torch.Tensor, state: State, message: Message) -> tuple[Payload, State]:
        spec = tensor_spec(tensor)
        flat = pack(tensor)
        best = _range(flat) if spec.dtype in WHOLE and flat.numel() else None
        most = spec.packed.nbytes if best is None else min(len(best), spec.packed.nbytes)
        for kind, width in ((_SPARSE, 1), (_ROWS, _row(spec))):
            if flat.numel() and flat.element_size() <= 8 and (kind == _SPARSE or width > 1):
                elements = _bits(flat).view(-1, width)
                taken = (elements != 0).any(1)
                if int(taken.sum()) * width * flat.element_size() < most or spec.dtype == "bool":
                    coded = bytes([kind]) + indices.write(taken.nonzero().view(-1).cpu().numpy())
                    if not (spec.dtype == "bool" and kind == _SPARSE):
                        coded += bytes(_memory(elements[taken]))
                    if len(coded) < most:
                        best, most = coded, len(coded)
        return ([memoryview(best)] if best is not None and len(best) <= spec.packed.nbytes else
                [memoryview(bytes([_RAW])), *raw(tensor)]), state  # fmt: skip

    def decode(
        self, payload: memoryview, spec: TensorSpec, device: torch.device, state: State, message: Message
    ) -> tuple[torch.Tensor, State]:
        kind = payload[0] if payload.nbytes else -1
        body, numel = payload[1:], spec.packed.numel
        if kind == _RAW:
            return from_raw(memoryview(bytearray(body)), spec, device), state
        if kind == _RANGE and spec.dtype in WHOLE:
            return unpack(_from_range(body, spec).to(device), spec), state
        if kind not in (_SPARSE, _ROWS) or not numel:
            raise RemoteProtocolError(f"{payload.nbytes} bytes came that are no tensor written by {self.name}")
        width = _row(spec) if kind == _ROWS else 1
        dtype = to_dtype(spec.dtype)
        truths = spec.dtype == "bool" and kind == _SPARSE
        most = numel if truths else body.nbytes // (width * dtype.itemsize)
        places, used = indices.read(body, numel // width, most)
        x = torch.zeros(numel // width, width, dtype=dtype)
        if truths:
            values = torch.ones(len(places), 1, dtype=torch.bool)
        else:
            size = len(places) * width * x.element_size()
            if body.nbytes - used != size:
                raise RemoteProtocolError(f"{body.nbytes - used} bytes came for elements of {size} bytes")
            values = as_bytes(body[used:], torch.device("cpu")).clone().view(dtype).view(len(places), width)
        x[torch.as_tensor(places)] = values
        return unpack(x.view(-1).to(device), spec), state

    def size_bytes(self, spec: TensorSpec) -> int:
        """Of what nothing is known about."""
        return 1 + spec.packed.nbytes

    def accepts(self, spec: TensorSpec, nbytes: int) -> bool:
        return 0 < nbytes <= 1 + spec.packed.nbytes


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of zeros are left out; the others travel by another codec."""

    inner: Codec
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"rows-{self.inner.name}")

    @property
    def lossless(self) -> bool:
        return self.inner.lossless

    @property
    def unbiased(self) -> bool:
        return self.inner.unbiased

    def init(self, spec: TensorSpec) -> State:
        return {}

    def encode(self, tensor: torch.Tensor, state: State, message: Message) -> tuple[Payload, State]:
        spec = tensor_spec(tensor)
        if spec.dtype in FLOATS and spec.packed.numel:
            rows = pack(tensor).view(-1, _row(spec))
            taken = (rows != 0).any(1)
            used = rows[taken]
            if 4 * len(used) < 3 * len(rows):
                places = indices.write(taken.nonzero().view(-1).cpu().numpy())
                inner, _ = self.inner.encode(used, self.inner.init(tensor_spec(used)), message)
                coded = [memoryview(bytes([_CODED]) + len(places).to_bytes(4, "little") + places), *inner]
                if sum(part.nbytes for part in coded) <= spec.packed.nbytes:
                    return coded, state
        payload, _ = self.inner.encode(tensor, self.inner.init(spec), message)
        return payload, state

    def decode(
        self, payload: memoryview, spec: TensorSpec, device: torch.device, state: State, message: Message
    ) -> tuple[torch.Tensor, State]:
        if not payload.nbytes or payload[0] != _CODED:
            if not self.inner.accepts(spec, payload.nbytes):
                raise RemoteProtocolError(f"{payload.nbytes} bytes came that are no tensor written by {self.name}")
            return self.inner.decode(payload, spec, device, self.inner.init(spec), message)[0], state
        if spec.dtype not in FLOATS or not spec.packed.numel:
            raise RemoteProtocolError(f"{payload.nbytes} bytes came that are no tensor written by {self.name}")
        width, body = _row(spec), payload[1:]
        length = int.from_bytes(body[:4], "little")
        count = spec.packed.numel // width
        places, used = indices.read(body[4 : 4 + length], count, count)
        part = TensorSpec((len(places), width), spec.dtype)
        rest = memoryview(bytearray(body[4 + length :]))
        if used != length or not self.inner.accepts(part, rest.nbytes):
            raise RemoteProtocolError("a message of rows has another length")
        rows, _ = self.inner.decode(rest, part, device, self.inner.init(part), message)
        x = torch.zeros(count, width, dtype=to_dtype(spec.dtype), device=device)
        x[torch.as_tensor(places).to(device)] = rows
        return unpack(x.view(-1), spec), state

    def size_bytes(self, spec: TensorSpec) -> int:
        return self.inner.size_bytes(spec)

    def accepts(self, spec: TensorSpec, nbytes: int) -> bool:
        return 0 < nbytes <= 1 + spec.packed.nbytes


def _range(flat: torch.Tensor) -> bytes:
    least, most = int(flat.min()), int(flat.max())
    width = (max((most - least).bit_length(), 1) + 7) // 8
    shifted = flat.to(torch.int64) - least  # may wrap, and wraps back
    planes = np.asarray(cast(Any, shifted.cpu().numpy())).astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width]
    head = bytes([_RANGE]) + least.to_bytes(8, "little", signed=True) + bytes([width])
    return head + np.ascontiguousarray(planes.T).tobytes()


def _from_range(body: memoryview, spec: TensorSpec) -> torch.Tensor:
    numel = spec.packed.numel
    width = body[8] if body.nbytes > 8 else 0
    if not 0 < width <= 8 or body.nbytes != 9 + width * numel:
        raise RemoteProtocolError("a message of whole numbers was cut")
    whole = np.zeros((numel, 8), np.uint8)
    whole[:, :width] = np.frombuffer(body[9:], np.uint8).reshape(width, numel).T
    least = int.from_bytes(body[:8], "little", signed=True)
    return (torch.as_tensor(whole.view("<i8").reshape(-1)) + least).to(to_dtype(spec.dtype))


def _row(spec: TensorSpec) -> int:
    """Elements in a row: all but the dimension that moves slowest in memory."""
    packed = spec.packed
    return packed.numel // packed.shape[0] if packed.shape and packed.shape[0] else 1


def _bits(flat: torch.Tensor) -> torch.Tensor:
    """As whole numbers, which are zero only where no bit is set."""
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def _memory(x: torch.Tensor) -> memoryview:
    return memoryview(cast(Any, x.contiguous().view(-1).view(torch.uint8).cpu().numpy()))


PACK = Pack()
ROWS = (Rows(BF16), Rows(INT8))
