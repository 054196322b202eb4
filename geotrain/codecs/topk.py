"""The largest elements only. Pure.

    least   f32: the smallest kept magnitude
    places  the kept ones, as `indices` writes them
    values  bf16: u16 for each, the upper half of its float32
            4 bits: a sign (1, minus) over 3 bits of level; level i is least * (peak / least)**(i / 7), where the peak
            is the next f32; two to a byte, the first one in the low half                       (little-endian)

    topk-D     4-bit values; topkb-D has bf16 ones
    topke-D    the same as topk-D with error feedback: what was lost is added to the next message of the same shape
    adatopk-D  as FusionLLM publishes it (https://arxiv.org/abs/2410.12707): float32 values and int64 places, 12 bytes
               for each kept element, which is why its ratio has a factor of 3; the baseline

D is the density in percent: of n elements, ceil(n * D / 100) are kept. Of equal ones the first are kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from ..base import TensorSpec
from ..errors import RemoteProtocolError
from . import indices
from .base import Message, State
from .lossy import Lossy, at_most_raw
from .rounded import widened

_Array = indices.Array


@dataclass(frozen=True, slots=True)
class TopK(Lossy):
    percent: int = 10
    kind: str = "topk"
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.kind}-{self.percent}")

    def init(self, spec: TensorSpec) -> State:
        return {"residual": torch.zeros(spec.packed.numel)} if self.kind == "topke" else {}

    def write(
        self, x: torch.Tensor, peak: float, spec: TensorSpec, state: State, message: Message
    ) -> tuple[Sequence[torch.Tensor | bytes], State]:
        residual = state.get("residual")
        if residual is not None and residual.numel() == x.numel():
            x = (x + residual.to(x.device)).nan_to_num_()
        where = _largest(x, self._count(x.numel()))
        kept = x[where]
        places = where.cpu().numpy()
        if self.kind == "adatopk":
            return [kept, places.astype("<i8").tobytes()], state
        magnitudes = kept.abs()
        ends = torch.stack([magnitudes.min(), magnitudes.max()]).cpu().numpy().astype("<f4")
        head = ends[:1].tobytes() + indices.write(places)
        if self.kind == "topkb":
            return [head, _halves(kept)], state
        codes = _levels(kept.cpu().numpy(), ends)
        if residual is not None:
            rest = x.clone()
            rest[where] -= torch.as_tensor(_values(codes, ends), device=x.device)
            state = {"residual": rest}
        return [head, ends[1:].tobytes(), _nibbles(codes)], state

    def read(
        self, body: memoryview, spec: TensorSpec, device: torch.device, state: State, message: Message
    ) -> tuple[torch.Tensor, State]:
        numel = spec.packed.numel
        count = self._count(numel)
        if self.kind == "adatopk":
            if body.nbytes != 12 * count:
                raise RemoteProtocolError(f"{body.nbytes} bytes came for {count} kept elements")
            values = np.frombuffer(body[: 4 * count], "<f4")
            places = np.frombuffer(body[4 * count :], "<i8")
            if (places < 0).any() or (places >= numel).any():
                raise RemoteProtocolError("a kept element lies beyond the end")
        else:
            places, used = indices.read(body[4:], numel, count)
            rest = body[4 + used :]
            size = 2 * count if self.kind == "topkb" else 4 + (count + 1) // 2
            if len(places) != count or rest.nbytes != size:
                raise RemoteProtocolError("a message of kept elements has another length")
            if self.kind == "topkb":
                values = widened(torch.as_tensor(np.frombuffer(rest, "<i2").copy())).numpy()
            else:
                ends = np.frombuffer(bytes(body[:4]) + bytes(rest[:4]), "<f4")
                codes = np.frombuffer(rest[4:], np.uint8)
                values = _values(np.stack([codes & 15, codes >> 4], 1).reshape(-1)[:count], ends)
        x = torch.zeros(numel, device=device)
        x[torch.as_tensor(places.astype(np.int64)).to(device)] = torch.as_tensor(values.astype("f4")).to(device)
        return x, state

    def coded_bytes(self, spec: TensorSpec) -> int:
        """With the places of random ones."""
        numel = spec.packed.numel
        count = self._count(numel)
        if self.kind == "adatopk":
            return 12 * count
        low = max(0, round(math.log2(0.69 * numel / count)))
        places = math.ceil(count * (1 + low) / 8 + (numel - count) / 2**low / 8)
        return 9 + places + (2 * count if self.kind == "topkb" else 4 + (count + 1) // 2)

    def accepts(self, spec: TensorSpec, nbytes: int) -> bool:
        return at_most_raw(spec, nbytes)

    def _count(self, numel: int) -> int:
        return -(-numel * self.percent // 100)


def _largest(x: torch.Tensor, count: int) -> torch.Tensor:
    """Rising places of the `count` largest magnitudes."""
    magnitudes, first = x.abs(), x.numel() - count
    if x.device.type == "cpu":  # several times as fast as `kthvalue`
        least = torch.as_tensor(np.partition(magnitudes.numpy(), first)[first])
    else:
        least = magnitudes.kthvalue(first + 1).values
    where = (magnitudes >= least).nonzero().view(-1)
    if len(where) > count:  # of those that are as large as the least the first ones
        equal = (magnitudes[where] == least).nonzero().view(-1)
        kept = torch.ones_like(where, dtype=torch.bool)
        kept[equal[count - len(where) :]] = False
        where = where[kept]
    return where


def _halves(x: torch.Tensor) -> torch.Tensor:
    bits = x.clamp(-3.38e38, 3.38e38).view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(torch.int16)


def _levels(values: _Array, ends: _Array) -> _Array:
    """Codes, uint8: the nearest of the eight magnitudes."""
    levels = _magnitudes(ends)
    middle = levels[:-1] / 2 + levels[1:] / 2
    return (np.searchsorted(middle, np.abs(values)) | ((values < 0) << 3)).astype(np.uint8)


def _values(codes: _Array, ends: _Array) -> _Array:
    return _magnitudes(ends)[codes & 7] * np.where(codes & 8, np.float32(-1), np.float32(1))


def _magnitudes(ends: _Array) -> _Array:
    """(8,) float32, from the least to the peak."""
    with np.errstate(all="ignore"):
        least, peak = (cast(Any, ends)).astype(np.float64)
        least = max(least, peak * 1e-6)  # a message of fewer elements than are to be kept
        levels = least * (peak / least) ** (np.arange(8) / 7) if peak > 0 else np.zeros(8)
    return np.nan_to_num(levels, nan=0.0, posinf=3e38, neginf=-3e38).astype(np.float32)


def _nibbles(codes: _Array) -> bytes:
    pairs = np.append(codes, np.uint8(0))[: len(codes) + len(codes) % 2].reshape(-1, 2)
    return (pairs[:, 0] | (pairs[:, 1] << 4)).tobytes()


TOPK = (
    *(TopK(kind="topk", percent=percent) for percent in (1, 10)),
    *(TopK(kind=kind, percent=10) for kind in ("topkb", "topke")),
    *(TopK(kind="adatopk", percent=percent) for percent in (1, 5, 10)),
)
