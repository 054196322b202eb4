"""Rows turned to their principal axes, and rounded to one error on all axes: the fewest bytes there are. Pure.

    way      u8: 0, the axes are those sent before; 1, axes follow; 2, what follows is a payload of `simple`
    mark     u32: CRC-32 of the axes in use, as they were sent
    axes     if they follow: r u16, exponents i8 for each axis, its d elements times 2**exponent as `numbers`
    step     f32
    exponent i8: elements are taken times 2**-exponent
    sizes    tc, tcu: a byte s for each row as `numbers` (less 64): elements are first divided by 2**(7 - (s + 1/2)/4)
    values   for each axis, those of all rows, as `numbers`                               (little-endian)

Rows are those of `row_width`, in parts of 1024 elements at most. The r axes sent, as columns, become the d in use by
a complete QR decomposition of Householder reflections (LAPACK's, in float64).

    tcu-E   for activations, which are normalized for each token before they are used, so the rows' sizes are sent
            apart: a relative squared error of E for each row. Unbiased: on all d axes q = floor(v / step + u + 1/2) is
            read as (q - u) * step, with step**2 / 12 = E times the mean square; the dither u of element i of the values
            is that of `dither`
    tcm-E   for gradients, which are added up: the same with one size for the message
    tc-E    as tcu, but axis by axis rounded to the nearest, and axes with less variance than their share of the error
            are left out: the least error for so few bits (reverse water-filling, T. Cover and J. Thomas, "Elements of
            Information Theory", 10.3). What begins small does not pass: for models that no longer learn new features

New axes are sent with the first message, and when those before cannot hold the error; both ends keep them. Where they
would cost more than they save in 4 messages, all that follow are by `simple`, as are those of few or short rows. Axes
fit for a step of training, and are of little use later, when the weights have moved on.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..base import TensorSpec
from ..errors import RemoteProtocolError
from . import numbers
from .base import Codec, Message, State
from .entropy import ENTROPY
from .fast import number_kernels as kernels
from .hadamard import HADAMARD
from .lossy import Lossy, at_most_raw, row_width
from .models import BINS
from .noise import words
from .rounded import exponent_of
from .scales import reaches, scales_of

_Array = numbers.Array
_SAME, _NEW, _SIMPLE = 0, 1, 2
_WIDEST, _LEAST_ROWS = 1024, 32
_SHARED = 4
"""Axes should pay within so many messages: those of a step."""
_FINEST, _MOST = 10, 2.0**29
_FINE = next(codec for codec in HADAMARD if codec.name == "hd6u")


@dataclass(frozen=True, slots=True)
class Transform(Lossy):
    kind: str = "tc"
    error: float = 0.001
    bits: float = 1.0
    """Typical bits per element, axes included: of activations and gradients in training from scratch."""
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.kind}-{f'{self.error:.4f}'[2:].rstrip('0')}")
        object.__setattr__(self, "unbiased", self.kind != "tc")

    @property
    def sized(self) -> bool:
        """The rows' sizes are sent apart."""
        return self.kind != "tcm"

    @property
    def simple(self) -> Codec:
        """For what has few or short rows: no less exact."""
        fine = [codec for codec in ENTROPY if codec.whole != self.sized and codec.error <= self.error]
        return max(fine, key=lambda codec: codec.error) if fine else _FINE

    def write(
        self, x: torch.Tensor, peak: float, spec: TensorSpec, state: State, message: Message
    ) -> tuple[Sequence[torch.Tensor | bytes], State]:
        width = _width(spec)
        if not width or peak == 0 or "poor" in state:
            return self._simply(x, spec, message), state
        exponent = exponent_of(peak)
        rows = x.view(-1, width) * math.ldexp(1.0, -exponent)
        sizes = b""
        if self.sized:
            codes, divisors = _sizes(rows)
            rows = rows / divisors[:, None]
            sizes = numbers.write(codes.astype(np.int32)[None] - 64)
        total = rows.square().mean().item()
        step = float(np.float32(math.sqrt(12 * self.error * total)))
        turn = state.get("turn")
        axes, coefficients = b"", None
        if turn is not None and len(turn) == width:
            coefficients, step = self._project(rows, turn, int(state["rank"]), total, step)
        if coefficients is None:
            axes, turn, rank = self._axes(rows, step)
            state = {"turn": turn, "rank": torch.tensor(rank), "mark": torch.tensor(zlib.crc32(axes))}
            coefficients, step = self._project(rows, turn, rank, total, step, final=True)
            assert coefficients is not None
        if self.unbiased:
            values, bins = rounded(coefficients, step, message.key)
        else:
            nearest = (coefficients * (1 / step)).round_().clamp_(-_MOST, _MOST).to(torch.int32)
            values, bins = nearest.cpu().numpy(), None
        coded = numbers.write(values, bins)
        saved = self.simple.size_bytes(TensorSpec(spec.packed.shape, "float32")) - len(sizes) - len(coded)
        if len(axes) > _SHARED * saved:
            return self._simply(x, spec, message), {"poor": torch.tensor(True)}
        head = bytes([_NEW if axes else _SAME]) + int(state["mark"]).to_bytes(4, "little") + axes
        head += np.float32(step).astype("<f4").tobytes() + exponent.to_bytes(1, "little", signed=True)
        return [head, sizes, coded], state

    def _simply(self, x: torch.Tensor, spec: TensorSpec, message: Message) -> list[bytes]:
        inner, _ = self.simple.encode(x.view(spec.packed.shape), {}, message)
        return [bytes([_SIMPLE]), *map(bytes, inner)]

    def read(
        self, body: memoryview, spec: TensorSpec, device: torch.device, state: State, message: Message
    ) -> tuple[torch.Tensor, State]:
        width, numel = _width(spec), spec.packed.numel
        if body.nbytes and body[0] == _SIMPLE:
            own = TensorSpec(spec.packed.shape, "float32")
            if not self.simple.accepts(own, body.nbytes - 1):
                raise RemoteProtocolError("a message has another length")
            x, _ = self.simple.decode(memoryview(bytearray(body[1:])), own, device, {}, message)
            return x.view(-1), state
        if body.nbytes < 10 or not width or body[0] not in (_SAME, _NEW):
            raise RemoteProtocolError(f"{body.nbytes} bytes came that are no message in principal axes")
        at = 5
        mark = int.from_bytes(body[1:5], "little")
        if body[0] == _NEW:
            turn, rank, used = _read_axes(body[5:], width)
            at += used
            state = {"turn": turn.to(device), "rank": torch.tensor(rank), "mark": torch.tensor(zlib.crc32(body[5:at]))}
        if "mark" not in state or int(state["mark"]) != mark or len(state["turn"]) != width or body.nbytes < at + 5:
            raise RemoteProtocolError("a message came in principal axes that were never sent")
        turn = state["turn"].to(device)
        step = np.frombuffer(body[at : at + 4], "<f4")[0]
        down = math.ldexp(1.0, int.from_bytes(body[at + 4 : at + 5], "little", signed=True))
        at += 5
        rows = numel // width
        scale: Any = down
        if self.sized:
            codes, used = numbers.read(body[at:], 1, rows)
            at += used
            scale = down * _divisors(np.clip(codes[0] + 64, 0, 127)).to(device)[:, None]
        rank = width if self.unbiased else int(state["rank"])
        u, bins = dither(message.key, rank * rows) if self.unbiased else (None, None)
        values, used = numbers.read(body[at:], rank, rows, None if bins is None else bins.reshape(rank, rows))
        if at + used != body.nbytes:
            raise RemoteProtocolError("a message in principal axes has another length")
        v = torch.as_tensor(values, device=device).float() if u is None else restored(values, u, device)
        return (_turned_back(v, turn[:, :rank], float(step)) * scale).reshape(-1), state

    def coded_bytes(self, spec: TensorSpec) -> int:
        numel, width = spec.packed.numel, _width(spec)
        if not width:
            return 1 + self.simple.size_bytes(TensorSpec(spec.packed.shape, "float32"))
        lanes = 0 if numel < 1 else 64
        return 30 + lanes + 2 * width + math.ceil(numel * self.bits / 8)

    def accepts(self, spec: TensorSpec, nbytes: int) -> bool:
        return at_most_raw(spec, nbytes)

    def _project(
        self, rows: torch.Tensor, turn: torch.Tensor, rank: int, total: float, step: float, final: bool = False
    ) -> tuple[torch.Tensor | None, float]:
        """(axes, rows), and the step that gives the error; None if these axes cannot."""
        if self.unbiased:
            return _turned(rows, turn), step
        coefficients = _turned(rows, turn[:, :rank])
        variance = coefficients.square().mean(1).double().cpu().numpy() / rows.shape[1]
        outside = max(total - float(variance.sum()), 0.0)
        if not final and outside > 0.5 * self.error * total:
            return None, step
        share = _water(variance, max(self.error * total - outside, 0.25 * self.error * total))
        return coefficients, float(np.float32(math.sqrt(12 * share * rows.shape[1])))

    def _axes(self, rows: torch.Tensor, step: float) -> tuple[bytes, torch.Tensor, int]:
        """(as they are sent, all d of them as columns, how many were sent)."""
        width = rows.shape[1]
        sample = rows[:: max(len(rows) // (4 * width), 1)]
        linalg: Any = torch.linalg  # it has no types
        variance, axes = linalg.eigh(_times(sample.T, sample) / len(sample))
        variance, axes = variance.flip(0).clamp_min(0).double().cpu().numpy(), axes.flip(1).T.double().cpu().numpy()
        least = step**2 / 12 * (0.25 if self.unbiased else 0.5)
        rank = max(int((variance > least).sum()), 1)
        # an axis off by a part of 2**-exponent in each element leaks that part of its variance to all others
        fine = np.ceil(np.log2(np.maximum(32 * np.sqrt(variance[:rank]) / step, 1))).clip(3, _FINEST).astype(np.int64)
        codes = np.rint(axes[:rank] * np.exp2(fine)[:, None]).astype(np.int32)
        sent = rank.to_bytes(2, "little") + fine.astype(np.int8).tobytes() + numbers.write(codes)
        return sent, _completed(codes, fine).to(rows.device), rank


def _read_axes(data: memoryview, width: int) -> tuple[torch.Tensor, int, int]:
    """(all axes as columns, how many were sent, bytes that they took)."""
    rank = int.from_bytes(data[:2], "little")
    fine = np.frombuffer(data[2 : 2 + rank], np.int8).astype(np.int64)
    if not 0 < rank <= width or len(fine) != rank:
        raise RemoteProtocolError(f"{rank} axes came for rows of {width} elements")
    codes, used = numbers.read(data[2 + rank :], rank, width)
    return _completed(codes, fine), rank, 2 + rank + used


def _completed(codes: _Array, fine: _Array) -> torch.Tensor:
    """(d, d) float32, columns orthonormal; the first r span what (r, d) codes * 2**-fine do."""
    axes = torch.as_tensor(codes * np.exp2(-fine.astype(np.float64))[:, None])
    linalg: Any = torch.linalg  # not NumPy's, whose threads spin beside those of torch: 2 ms became 170
    return linalg.qr(axes.T, mode="complete").Q.float()


def _times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, in float32 where a caller's autocast would have it in bfloat16."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def _turned(rows: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """(axes, rows): the coefficients of rows."""
    return _times(turn.T, rows.T)


def _turned_back(coefficients: torch.Tensor, turn: torch.Tensor, step: float) -> torch.Tensor:
    """(rows, elements) of coefficients in steps, (axes, rows)."""
    return _times(coefficients.T, turn.T * step)


def _sizes(rows: torch.Tensor) -> tuple[_Array, torch.Tensor]:
    """A byte for the root mean square of each row, in quarters of an octave, and what to divide by."""
    codes = (scales_of(rows.square().mean(1).sqrt()) >> 1).clamp(max=127).cpu().numpy()
    return codes, _divisors(codes).to(rows.device)


def _divisors(codes: _Array) -> torch.Tensor:
    """2**(7 - (s + 1/2)/4)."""
    return reaches()[1::2][torch.as_tensor(codes.astype(np.int64)).clamp(max=126)]


def rounded(v: torch.Tensor, step: float, key: int) -> tuple[_Array, _Array]:
    """floor(v / step + u + 1/2), mirrored where u is negative, and the quarters of |u|: int32 and uint8 like v."""
    u, bins = dither(key, v.numel())
    if native := kernels(v.device):
        values = np.empty(v.shape, np.int32)
        native.round_dithered(v.contiguous().view(-1).numpy(), 1 / step, u, values.reshape(-1))
        return values, bins.reshape(v.shape)
    shift = torch.as_tensor(u, device=v.device).view(v.shape)
    q = (v * (1 / step) + shift + 0.5).floor_()
    q = torch.where(shift < 0, -q, q).clamp_(-_MOST, _MOST)
    return q.to(torch.int32).cpu().numpy(), bins.reshape(v.shape)


def restored(values: _Array, u: _Array, device: torch.device) -> torch.Tensor:
    """v / step, float32: the inverse of `rounded`."""
    if native := kernels(device):
        v = torch.empty(values.shape)
        native.restore(values.reshape(-1), u, v.view(-1).numpy())
        return v
    q, shift = torch.as_tensor(values, device=device).float(), torch.as_tensor(u, device=device).view(values.shape)
    return torch.where(shift < 0, -q, q) - shift


def dither(key: int, count: int) -> tuple[_Array, _Array]:
    """(u in (-1/2, 1/2), its quarter): the low halves of the words with counters from 0, then the high ones."""
    if native := kernels(torch.device("cpu")):
        drawn, quarters = np.empty(count, np.float32), np.empty(count, np.uint8)
        native.dithers(key, drawn, quarters)
        return drawn, quarters
    half = (count + 1) // 2
    word = words(key, 0, half, torch.device("cpu"))
    halves = torch.cat([word & 0xFFFF, (word >> 16) & 0xFFFF])[:count]
    u = (halves.float() - 32767.5) * 2.0**-16
    return u.numpy(), (u.abs() * (2 * BINS)).to(torch.uint8).numpy()


def _water(variance: _Array, error: float) -> float:
    """The level w with sum(min(variance, w)) = error."""
    rising = np.sort(variance)
    below = np.concatenate([[0.0], np.cumsum(rising)])
    for i in range(len(rising)):
        level = (error - below[i]) / (len(rising) - i)
        if level <= rising[i]:
            return max(level, 1e-12 * error)
    return float(max(rising[-1], error))


def _width(spec: TensorSpec) -> int:
    """Elements in a row, or 0 where rows are too few or too short."""
    numel, width = spec.packed.numel, row_width(spec)
    parts = -(-width // _WIDEST)
    width = width // parts if width % parts == 0 else 0
    return width if width >= 16 and numel // width >= max(_LEAST_ROWS, width // 2) else 0


TRANSFORM = tuple(
    Transform(kind=kind, error=error, bits=bits)
    for kind, rungs in (
        ("tc", ((0.001, 2.2), (0.005, 1.7))),
        ("tcu", ((0.001, 2.4), (0.0025, 2.15), (0.005, 1.95), (0.01, 1.75), (0.02, 1.55))),
        ("tcm", ((0.05, 1.75), (0.1, 1.5), (0.2, 1.3), (0.4, 1.08))),
    )
    for error, bits in rungs
)
