"""Rotated blocks, rounded with dither and entropy-coded: the fewest bytes for an error, and unbiased. Pure.

    exponent  i8: elements are taken times 2**-exponent, so that the largest lies in [1, 2)
    length    u32 of the next part
    sizes     for each block (see `tiles`) its root mean square r: rms in (2**(7 - (r + 1)/4), 2**(7 - r/4)], 127 for a
              block of zeros; differences to the block before (64 at first), modulo 128, by rANS
    values    q = floor(v / step + u + 1/2) for each coefficient in the order of `tiles`, by rANS (see `models`);
              read as (q - u) * step                                                                (little-endian)

One step serves a group of blocks: it is the nearest in 1/8 octaves to sqrt(12 E m), where m is the group's mean square,
from sigma = 2**(7 - (r + 1/2)/4), the nominal size of a block; but sigma / 8 at least. So small blocks cost next to
nothing, and the bytes are the fewest for the error of the group. The class of a block, 4 * log2(sigma / step) rounded
down and from -28 to 12, chooses the tables; blocks of zeros have their own.

    ec-E    a group is a row (see `row_width`; a block where that is no multiple of 64): E for each token. For
            activations: what reads them normalizes each token, so all are equally important.
    ecm-E   a group is the message. For gradients, which are added up.

E is written as its decimals: ec-02 is 0.02. The dither makes the error uniform and independent of v, with a mean of
zero; its mean square is step**2 / 12, within 30 % of E times the group's, for any input.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from ..base import TensorSpec
from ..errors import RemoteProtocolError
from . import rans, tiles
from .base import Message, State
from .fast import entropy_kernels as kernels
from .lossy import Lossy, at_most_raw, row_width
from .models import BINS, ZERO_SYMBOL, delta_tables, gaussian_tables
from .rounded import exponent_of
from .scales import EIGHTHS, reaches, scales_of
from .tiles import BLOCK, LANES, TILE, blocks_of

_NONE = 127
_LEAST, _MOST = -28, 12
"""Classes, in quarters of an octave: sigma is 2**-7 to 2**3 steps."""

_Array = rans.Array


@dataclass(frozen=True, slots=True)
class Entropy(Lossy):
    error: float = 0.02
    whole: bool = False
    bits: float = 0.0
    """Typical bits per element."""
    unbiased: bool = True
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"ec{'m' * self.whole}-{f'{self.error:.4f}'[2:].rstrip('0')}")

    def write(
        self, x: torch.Tensor, peak: float, spec: TensorSpec, state: State, message: Message
    ) -> tuple[Sequence[torch.Tensor | bytes], State]:
        exponent = exponent_of(peak)
        v, energy = _rotated(x, math.ldexp(1.0, -exponent), message.key)
        scale = scales_of(energy.sqrt() / 8).cpu().numpy()
        size = np.where(scale == 255, _NONE, np.minimum(scale >> 1, _NONE - 1)).astype(np.uint8)
        steps, group = self._steps(size, spec)
        symbols, which = _quantized(v, steps, group, message.key)
        before = np.concatenate([np.array([64], np.uint8), size[:-1]])
        sizes = rans.encode((size - before + 64) & 127, np.zeros(len(size), np.uint8), delta_tables())
        values = rans.encode(symbols, which, _tables())
        head = exponent.to_bytes(1, "little", signed=True) + len(sizes).to_bytes(4, "little")
        return [head, sizes, values], state

    def read(
        self, body: memoryview, spec: TensorSpec, device: torch.device, state: State, message: Message
    ) -> tuple[torch.Tensor, State]:
        end = 5 + int.from_bytes(body[1:5], "little")
        if body.nbytes < end:
            raise RemoteProtocolError("an entropy-coded message was cut")
        blocks = blocks_of(spec.packed.numel)
        change = rans.decode(body[5:end], np.zeros(blocks, np.uint8), delta_tables())
        size = (np.cumsum(change.astype(np.int64) - 64) + 64).astype(np.uint8) & 127
        steps, group = self._steps(size, spec)
        which = _which(group, message.key)
        symbols = rans.decode(body[end:], which, _tables())
        down = math.ldexp(1.0, int.from_bytes(body[:1], "little", signed=True) - 6)
        return _restored(symbols, steps, message.key, down, spec.packed.numel, device), state

    def coded_bytes(self, spec: TensorSpec) -> int:
        blocks = blocks_of(spec.packed.numel)
        lanes = rans.lanes_of(blocks * BLOCK) + rans.lanes_of(blocks)
        return 5 + 4 * lanes + math.ceil(blocks * (BLOCK * self.bits + 2.4) / 8)

    def accepts(self, spec: TensorSpec, nbytes: int) -> bool:
        return at_most_raw(spec, nbytes)

    def _steps(self, size: _Array, spec: TensorSpec) -> tuple[_Array, _Array]:
        """(blocks,) float32 steps and uint8 classes, from the sizes r."""
        width, sigma = row_width(spec), _sigmas()
        if self.whole:
            count = np.bincount(size, minlength=128)
            mean = np.array([sum(int(n) * float(s) ** 2 for n, s in zip(count, sigma, strict=True)) / len(size)])
        else:
            rows = sigma[size].astype(np.float64).reshape(-1, width // BLOCK if width % BLOCK == 0 else 1)
            mean = np.zeros(len(rows))
            for column in rows.T:  # one after the other, so that all machines round alike
                mean = mean + column * column
            mean = mean / rows.shape[1]
        # 2**(1/16) less, so that the least step above is the nearest
        wanted = np.sqrt(12 * self.error * mean) * 0.9576033
        one = scales_of(torch.as_tensor(wanted.astype(np.float32))).numpy().repeat(len(size) // len(mean))
        group = (one - 2 * size.astype(np.int64)) >> 1
        steps = np.where(group > _MOST, sigma[size] / np.float32(8), reaches().numpy()[one])
        group = np.clip(group, _LEAST, _MOST) - _LEAST + 1
        steps[size == _NONE], group[size == _NONE] = 0, 0
        return steps.astype(np.float32), group.astype(np.uint8)


@lru_cache(maxsize=1)
def _tables() -> rans.Tables:
    return gaussian_tables((0.0, *(EIGHTHS[i % 4 * 2] * 2.0 ** (i // 4) for i in range(_LEAST, _MOST + 1))))


def _sigmas() -> _Array:
    """(128,) float32: the nominal root mean square of each size."""
    sigma = reaches().numpy()[1::2].copy()
    sigma[_NONE] = 0
    return sigma


def _rotated(x: torch.Tensor, up: float, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Coefficients in the order of `tiles`, and each block's sum of squares."""
    sign = tiles.signs(key, x.device)
    if native := kernels(x.device):
        v, energy = torch.empty(blocks_of(x.numel()) * BLOCK), torch.empty(blocks_of(x.numel()))
        native.rotate_blocks(x.numpy(), up, sign.numpy(), v.numpy(), energy.numpy())
        return v, energy
    parts = [tiles.rotate(part * up * sign[: part.shape[1]]) for _, part in tiles.tiles(x)]
    energies = [tiles.energies(part, part.shape[1] // BLOCK) for part in parts]
    return torch.cat([p.view(-1) for p in parts]), torch.cat([e.reshape(-1) for e in energies])


def _quantized(v: torch.Tensor, steps: _Array, group: _Array, key: int) -> tuple[_Array, _Array]:
    """Symbols, and the table of each: uint8, one for each coefficient."""
    inverse = np.divide(1, steps, out=np.zeros_like(steps), where=steps > 0)
    if native := kernels(v.device):
        symbols, which = np.empty(v.numel(), np.uint8), np.empty(v.numel(), np.uint8)
        native.quantize_blocks(v.numpy(), inverse, group, key, symbols, which)
        return symbols, which
    parts: list[torch.Tensor] = []
    for first, count, lanes in tiles.spans(v.numel()):
        width, start = lanes * BLOCK, first * LANES
        u = tiles.dither(key, first, count, width, v.device)
        scale = torch.as_tensor(inverse[start : start + count * lanes], device=v.device).view(count, lanes)
        own = v[first * TILE : first * TILE + count * width].view(count, width)
        q = (own * scale.repeat(1, BLOCK) + (u + 0.5)).floor_()
        q = torch.where(u < 0, -q, q).clamp_(-ZERO_SYMBOL, ZERO_SYMBOL) + ZERO_SYMBOL
        parts.append(q.to(torch.uint8).view(-1).cpu())
    return torch.cat(parts).numpy(), _which(group, key)


def _which(group: _Array, key: int) -> _Array:
    """The table of each coefficient: by its block's class and its dither."""
    if native := kernels(torch.device("cpu")):
        which = np.empty(len(group) * BLOCK, np.uint8)
        native.choose_tables(group, key, which)
        return which
    parts: list[torch.Tensor] = []
    for first, count, lanes in tiles.spans(len(group) * BLOCK):
        u = tiles.dither(key, first, count, lanes * BLOCK, torch.device("cpu"))
        start = first * LANES
        own = torch.as_tensor(group[start : start + count * lanes]).view(count, lanes).repeat(1, BLOCK)
        parts.append((own * BINS + (u.abs() * (2 * BINS)).to(torch.uint8)).view(-1))
    return torch.cat(parts).numpy()


def _restored(symbols: _Array, steps: _Array, key: int, down: float, numel: int, device: torch.device) -> torch.Tensor:
    sign = tiles.signs(key, device)
    if native := kernels(device):
        x = torch.empty(numel)
        native.restore_blocks(symbols, steps, key, sign.numpy(), down, x.numpy())
        return x
    values, step = torch.as_tensor(symbols, device=device), torch.as_tensor(steps, device=device)
    parts: list[torch.Tensor] = []
    for first, count, lanes in tiles.spans(numel):
        width, start = lanes * BLOCK, first * LANES
        u = tiles.dither(key, first, count, width, device)
        q = values[first * TILE : first * TILE + count * width].view(count, width).float() - ZERO_SYMBOL
        v = (torch.where(u < 0, -q, q) - u) * step[start : start + count * lanes].view(count, lanes).repeat(1, BLOCK)
        parts.append((tiles.rotate_back(v) * sign[:width] * down).view(-1))
    return torch.cat(parts)[:numel]


ENTROPY = tuple(
    Entropy(error=error, whole=whole, bits=bits)
    for whole, error, bits in (
        (False, 0.0025, 4.6), (False, 0.005, 4.1), (False, 0.01, 3.6), (False, 0.02, 3.1), (False, 0.05, 2.5),
        (False, 0.1, 2.0), (True, 0.02, 3.1), (True, 0.05, 2.5), (True, 0.1, 2.0), (True, 0.2, 1.6), (True, 0.4, 1.2),
        (True, 0.8, 0.9),
    )
)  # fmt: skip
