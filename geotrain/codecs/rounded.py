"""Fewer bits for each element, by rounding it where it stands. Pure.

    bf16    u16 for each element: the upper half of its float32, rounded to nearest even
    int8    exponent i8 | scale u16 for each row | code i8 for each element            (little-endian)

int8: elements are taken times 2**-exponent, so that the largest lies in [1, 2): nothing underflows in a gradient of
1e-9, nothing overflows. A row's scale is its largest magnitude as bfloat16, rounded up, 0 below 2**-100. Its step is
scale * (1 / 127), a code is element * (1 / step), rounded to nearest even: products and 1 / step in float32. Rows are
those of `row_width`, or of 64 elements where those are short.

|error| of an element is at most 2**-9 of it, or 2**-134 (bf16); 1/252 of the largest in its row, and 2**-100 of the
largest in the message (int8).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..base import TensorSpec
from .base import Message, State
from .fast import kernels
from .lossy import Lossy, as_bytes, in_rows, row_width

SHORT = 32
"""Rows under this many elements would pay more for their scales than they gain."""


@dataclass(frozen=True, slots=True)
class Bf16(Lossy):
    name: str = "bf16"

    def write(
        self, x: torch.Tensor, peak: float, spec: TensorSpec, state: State, message: Message
    ) -> tuple[Sequence[torch.Tensor | bytes], State]:
        most = torch.finfo(torch.bfloat16).max
        bits = (x.clamp(-most, most) if peak > most else x).view(torch.int32)
        if native := kernels(x.device):
            halves = torch.empty(x.numel(), dtype=torch.int16)
            native.upper_halves(bits.numpy(), halves.numpy())
        else:  # not `to`: some machines take denormal numbers for zeros there
            halves = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(torch.int16)
        return [halves], state

    def read(
        self, body: memoryview, spec: TensorSpec, device: torch.device, state: State, message: Message
    ) -> tuple[torch.Tensor, State]:
        return widened(as_bytes(body, device).clone().view(torch.int16)), state

    def coded_bytes(self, spec: TensorSpec) -> int:
        return 2 * spec.packed.numel


@dataclass(frozen=True, slots=True)
class Int8(Lossy):
    name: str = "int8"

    def write(
        self, x: torch.Tensor, peak: float, spec: TensorSpec, state: State, message: Message
    ) -> tuple[Sequence[torch.Tensor | bytes], State]:
        exponent = exponent_of(peak)
        width, up = _width(spec), math.ldexp(1.0, -exponent)
        if native := kernels(x.device):
            scales = torch.empty(-(-x.numel() // width), dtype=torch.int16)
            codes = torch.empty(x.numel(), dtype=torch.int8)
            native.encode_rows(x.numpy(), up, width, scales.numpy(), codes.numpy())
        else:
            rows = in_rows(x * up, width)
            largest = rows.abs().amax(1)
            scales = (largest.view(torch.int32) + 0xFFFF) >> 16
            scales = torch.where(largest < _LEAST, 0, scales).to(torch.int16)
            inverse = torch.where(scales == 0, 0.0, 1.0 / _steps(scales))
            codes = (rows * inverse[:, None]).round_().clamp_(-127, 127).to(torch.int8).view(-1)[: x.numel()]
        return [exponent.to_bytes(1, "little", signed=True), scales, codes], state

    def read(
        self, body: memoryview, spec: TensorSpec, device: torch.device, state: State, message: Message
    ) -> tuple[torch.Tensor, State]:
        numel, width = spec.packed.numel, _width(spec)
        down = math.ldexp(1.0, int.from_bytes(body[:1], "little", signed=True))
        end = 1 + 2 * -(-numel // width)
        steps = _steps(as_bytes(body[1:end], device).clone().view(torch.int16))
        codes = as_bytes(body[end:], device).view(torch.int8)
        if native := kernels(device):
            x = torch.empty(numel)
            native.decode_rows(codes.numpy(), steps.numpy(), down, width, x.numpy())
        else:
            x = (in_rows(codes.float(), width) * steps[:, None] * down).view(-1)[:numel]
        return x, state

    def coded_bytes(self, spec: TensorSpec) -> int:
        numel = spec.packed.numel
        return 1 + 2 * -(-numel // _width(spec)) + numel


def exponent_of(peak: float) -> int:
    """e with 2**e <= peak < 2**(e + 1), within what a float32 can be multiplied by."""
    return min(max(math.frexp(peak)[1] - 1, -126), 127)


def widened(bits: torch.Tensor) -> torch.Tensor:
    """int16, bfloat16 bits -> float32."""
    return (bits.to(torch.int32) << 16).view(torch.float32)


_LEAST = 2.0**-100


def _width(spec: TensorSpec) -> int:
    width = row_width(spec)
    return width if width >= SHORT else 64


def _steps(scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 bits as int16 -> float32 value of one code."""
    return widened(scales) * (1 / 127)  # not divided: CUDA would round that otherwise


BF16, INT8 = Bf16(), Int8()
