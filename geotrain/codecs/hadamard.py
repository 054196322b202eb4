"""Rotated blocks in b bits: hd8 to hd1 decode to the nearest level, hd8u to hd1u are unbiased. Pure.

    exponent  i8: elements are taken times 2**-exponent, so that the largest lies in [1, 2)
    scales    u8 for each block: 0 to 254, reach 2**(7 - scale/8); 255, the block is zero
    codes     b bits for each coefficient: for each tile (see `tiles`) planes of 8, 4, 4+2, 2+1, 2 or 1 bits, lowest
              bits first; in a plane of w bits over n coefficients, byte i has those of i, i + nw/8, i + 2nw/8 ...

With step = 2 * reach / (2**b - 1), code = floor(v / step + 2**(b-1) + u), and v is read as (code + 1/2 - 2**(b-1) - u)
* step. The dither u, uniform in (-1/2, 1/2) and known to both ends, makes the error uniform and independent of v, so
its mean is zero; nearest ones have u = 0. The reach is the least that covers the block's largest coefficient. Below
4 bits nearest ones cover less, for less error: 0.798, 1.494 or 2.053 of the block's root mean square (the best uniform
levels for Gaussian noise), where that is smaller.

Relative squared error of a block, typically (of Gaussian noise) and at most:

    bits      8       6       4     3      2     1
    nearest   3.9e-5  6.4e-4  .011  .037   .12   .36
    unbiased  3.9e-5  6.4e-4  .011  .052   .28   2.5
    at most   .0012   .020    .34   1.6*   8.5*  77*      (*nearest ones: 2)

beside 2**-20 of the message's largest element, which may be lost anywhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..base import TensorSpec
from . import tiles
from .base import Message, State
from .fast import kernels
from .lossy import Lossy, as_bytes
from .rounded import exponent_of
from .scales import reaches, scales_of
from .tiles import BLOCK, LANES, TILE, blocks_of

_PLANES = {8: (8,), 6: (4, 2), 4: (4,), 3: (2, 1), 2: (2,), 1: (1,)}
_COVER = {3: 2.053, 2: 1.494, 1: 0.798}


@dataclass(frozen=True, slots=True)
class Hadamard(Lossy):
    bits: int = 4
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"hd{self.bits}{'u' if self.unbiased else ''}")

    def write(
        self, x: torch.Tensor, peak: float, spec: TensorSpec, state: State, message: Message
    ) -> tuple[Sequence[torch.Tensor | bytes], State]:
        exponent = exponent_of(peak)
        up = math.ldexp(1.0, -exponent)
        sign = tiles.signs(message.key, x.device)
        steps = self._steps()
        inverse = torch.where(steps > 0, 1.0 / steps, 0.0).to(x.device)
        if native := kernels(x.device):
            scales = torch.empty(blocks_of(x.numel()), dtype=torch.uint8)
            codes = torch.empty(scales.numel() * 8 * self.bits, dtype=torch.uint8)
            native.encode_blocks(
                x.numpy(), up, sign.numpy(), inverse.numpy(), self.bits, self._cover, self.unbiased, message.key,
                scales.numpy(), codes.numpy(),
            )  # fmt: skip
            return [exponent.to_bytes(1, "little", signed=True), scales, codes], state
        all_scales: list[torch.Tensor] = []
        all_codes: list[torch.Tensor] = []
        for first, part in tiles.tiles(x):
            count, width = part.shape
            lanes = width // BLOCK
            v = tiles.rotate(part * up * sign[:width])
            reach = v.abs().view(count, BLOCK, lanes).amax(1)
            if self._cover:
                reach = torch.minimum(reach, tiles.energies(v, lanes).sqrt() * (self._cover / 8))
            scale = scales_of(reach)
            v = v * inverse[scale].repeat(1, BLOCK) + self._offset(message, first, count, width, x.device)
            code = v.clamp_(0, 2**self.bits - 1).to(torch.uint8)
            all_scales.append(scale.to(torch.uint8).view(-1))
            all_codes.append(_pack(code, self.bits).view(-1))
        return [exponent.to_bytes(1, "little", signed=True), *all_scales, *all_codes], state

    def read(
        self, body: memoryview, spec: TensorSpec, device: torch.device, state: State, message: Message
    ) -> tuple[torch.Tensor, State]:
        numel = spec.packed.numel
        down = math.ldexp(1.0, int.from_bytes(body[:1], "little", signed=True) - 6)
        sign = tiles.signs(message.key, device)
        end = 1 + blocks_of(numel)
        scales, codes = as_bytes(body[1:end], device), as_bytes(body[end:], device)
        steps = self._steps().to(device)
        if native := kernels(device):
            x = torch.empty(numel)
            native.decode_blocks(
                scales.numpy(), codes.numpy(), steps.numpy(), self.bits, self.unbiased, message.key, sign.numpy(),
                down, x.numpy(),
            )  # fmt: skip
            return x, state
        parts: list[torch.Tensor] = []
        for first, count, lanes in tiles.spans(numel):
            width = lanes * BLOCK
            start = first * LANES
            step = steps[scales[start : start + count * lanes].long()].view(count, lanes).repeat(1, BLOCK)
            start = first * TILE // 8 * self.bits
            packed = codes[start : start + count * width // 8 * self.bits].view(count, -1)
            v = _unpack(packed, self.bits) - (2 ** (self.bits - 1) - 0.5)
            if self.unbiased:
                v = v - tiles.dither(message.key, first, count, width, device)
            parts.append((tiles.rotate_back(v * step) * sign[:width] * down).view(-1))
        return torch.cat(parts)[:numel], state

    def coded_bytes(self, spec: TensorSpec) -> int:
        return 1 + blocks_of(spec.packed.numel) * (1 + BLOCK // 8 * self.bits)

    @property
    def _cover(self) -> float:
        """Reach over the root mean square of a block; 0 to cover all."""
        return 0.0 if self.unbiased else _COVER.get(self.bits, 0.0)

    def _steps(self) -> torch.Tensor:
        """(256,) float32: the step of each scale."""
        return reaches() * (2.0 / (2**self.bits - 1))

    def _offset(self, message: Message, first: int, count: int, width: int, device: torch.device) -> torch.Tensor | int:
        middle = 2 ** (self.bits - 1)
        return tiles.dither(message.key, first, count, width, device) + middle if self.unbiased else middle


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(tiles, n) uint8 -> (tiles, n * bits / 8) uint8."""
    planes: list[torch.Tensor] = []
    for width in _PLANES[bits]:
        parts = (codes & (2**width - 1)).view(len(codes), 8 // width, -1)
        plane = parts[:, 0]
        for i in range(1, 8 // width):
            plane = plane | (parts[:, i] << (width * i))
        planes.append(plane)
        codes = codes >> width if width < 8 else codes
    return planes[0] if len(planes) == 1 else torch.cat(planes, 1)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `_pack`, as float32."""
    numel = packed.shape[1] * 8 // bits
    codes = torch.zeros((), dtype=torch.float32, device=packed.device)
    done = start = 0
    for width in _PLANES[bits]:
        plane = packed[:, start : start + numel * width // 8]
        parts = [(plane >> (width * i)) & (2**width - 1) for i in range(8 // width)]
        codes = codes + torch.cat(parts, 1) * float(2**done)
        done, start = done + width, start + numel * width // 8
    return codes


HADAMARD = tuple(Hadamard(bits=bits, unbiased=unbiased) for bits in (8, 6, 4, 3, 2, 1) for unbiased in (False, True))
