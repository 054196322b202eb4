"""Each channel and each token in its own size, dithered and entropy-coded: for pretrained models. Pure.

    exponent  i8: elements are taken times 2**-exponent
    channels  a byte c for each channel as `numbers` (less 64)
    rows      a byte r for each row as `numbers` (less 64)
    values    q = floor(v / step + u + 1/2) for each channel, those of all rows, as `numbers`; read as (q - u) * step

An element is divided by 2**(7 - (c + 1/2)/4) and then by 2**(7 - (r + 1/2)/4), which leaves v, and step is
sqrt(12 E). The dither u of value i is `transform`'s. Rows are those of `row_width`.

    ch-E     a squared error of E for each element, of the square of its channel's usual size in its row

In the streams of pretrained models a few channels and tokens are up to 100,000 times the others (M. Sun et al.,
https://arxiv.org/abs/2402.17762), and an error that is small beside those drowns the rest. So sizes are the usual ones,
which nothing rare moves: 1.647 * mean(|x|**(1/4))**4, the deviation of Gaussian noise, but 2**-12 of the largest at
least. What stands out takes more bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..base import TensorSpec
from ..errors import RemoteProtocolError
from . import numbers
from .base import Message, State
from .lossy import Lossy, at_most_raw, row_width
from .rounded import exponent_of
from .scales import reaches, scales_of
from .transform import dither, restored, rounded

_Array = numbers.Array
_SAMPLE = 1024
"""Rows that are looked at for the sizes of channels."""


@dataclass(frozen=True, slots=True)
class Channels(Lossy):
    error: float = 0.004
    bits: float = 4.4
    """Typical bits per element."""
    unbiased: bool = True
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"ch-{f'{self.error:.4f}'[2:].rstrip('0')}")

    def write(
        self, x: torch.Tensor, peak: float, spec: TensorSpec, state: State, message: Message
    ) -> tuple[Sequence[torch.Tensor | bytes], State]:
        exponent = exponent_of(peak)
        rows = x.view(-1, row_width(spec)) * math.ldexp(1.0, -exponent)
        channel = _sizes(_usual(rows[:: max(len(rows) // _SAMPLE, 1)], 0))
        rows = rows / _divisors(channel, x.device)
        row = _sizes(_usual(rows, 1))
        columns = (rows / _divisors(row, x.device)[:, None]).T.contiguous()
        values, bins = rounded(columns, math.sqrt(12 * self.error), message.key)
        sizes = [numbers.write(part.astype(np.int32)[None] - 64) for part in (channel, row)]
        return [exponent.to_bytes(1, "little", signed=True), *sizes, numbers.write(values, bins)], state

    def read(
        self, body: memoryview, spec: TensorSpec, device: torch.device, state: State, message: Message
    ) -> tuple[torch.Tensor, State]:
        numel, width = spec.packed.numel, row_width(spec)
        rows, at = numel // width, 1
        divisors: list[torch.Tensor] = []
        for count in (width, rows):
            sizes, used = numbers.read(body[at:], 1, count)
            divisors.append(_divisors(np.clip(sizes[0] + 64, 0, 126).astype(np.uint8), device))
            at += used
        u, bins = dither(message.key, numel)
        values, used = numbers.read(body[at:], width, rows, bins.reshape(width, rows))
        if at + used != body.nbytes:
            raise RemoteProtocolError("a message of sized channels has another length")
        down = math.ldexp(1.0, int.from_bytes(body[:1], "little", signed=True)) * math.sqrt(12 * self.error)
        columns = restored(values, u, device) * divisors[0][:, None]
        return (columns.T * (divisors[1] * down)[:, None]).reshape(-1), state

    def coded_bytes(self, spec: TensorSpec) -> int:
        numel, width = spec.packed.numel, row_width(spec)
        return 40 + math.ceil((width + numel / width + self.bits * numel) / 8) + width

    def accepts(self, spec: TensorSpec, nbytes: int) -> bool:
        return at_most_raw(spec, nbytes)


def _usual(rows: torch.Tensor, dim: int) -> torch.Tensor:
    magnitudes = rows.abs()
    usual = 1.647 * magnitudes.sqrt().sqrt().mean(dim).square().square()
    return torch.maximum(usual, magnitudes.amax(dim) * 2.0**-12)


def _sizes(sizes: torch.Tensor) -> _Array:
    """Bytes, in quarters of an octave; the least for what is zero."""
    return (scales_of(sizes) >> 1).clamp(max=126).to(torch.uint8).cpu().numpy()


def _divisors(sizes: _Array, device: torch.device) -> torch.Tensor:
    """2**(7 - (s + 1/2)/4)."""
    return reaches()[1::2][torch.as_tensor(sizes).long()].to(device)


CHANNELS = (Channels(error=0.001, bits=5.3), Channels(), Channels(error=0.01, bits=3.7))
