"""The change since a sample was last seen: samples that come again are near to what they were. Pure.

    known   1 bit for each sample (an index of the first dimension), lowest first: it was seen before
    length  u32 of the next part                                                (little-endian)
    news    the other samples, by the codec for new ones
    change  the known ones less what both ends remember of them, by the codec for changes

Both ends remember what the receiver had decoded, as bfloat16, by the sample's number (S. Wang et al., "AQ-SGD",
https://arxiv.org/abs/2206.01299). Of messages that do not tell their samples nothing is remembered, and all of it is
new. `MEMORY_BYTES` are remembered of one value at most; the samples that were seen first are forgotten first. What
takes the way out of `lossy` changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..base import TensorSpec
from ..errors import RemoteProtocolError
from .base import Codec, Message, State
from .channels import CHANNELS
from .hadamard import HADAMARD
from .lossy import Lossy, at_most_raw, row_width

MEMORY_BYTES = 1 << 30
_BY_NAME = {codec.name: codec for codec in (*HADAMARD, *CHANNELS)}


@dataclass(frozen=True, slots=True)
class Delta(Lossy):
    name: str = "delta2"
    news: Codec = _BY_NAME["ch-004"]
    change: Codec = _BY_NAME["hd2"]

    def write(
        self, x: torch.Tensor, peak: float, spec: TensorSpec, state: State, message: Message
    ) -> tuple[Sequence[torch.Tensor | bytes], State]:
        shape = _shape(spec)
        samples = x.view(shape)
        known = _known(shape, state, message)
        before = _before(state, message, known, shape, x.device)
        news, _ = self.news.encode(samples[~known], {}, message)
        change, _ = self.change.encode(samples[known] - before, {}, message)
        first, second = b"".join(news), b"".join(change)
        body = np.packbits(known.numpy(), bitorder="little").tobytes() + len(first).to_bytes(4, "little")
        body += first + second
        return [body], self._read(memoryview(bytearray(body)), shape, x.device, state, message)[1]

    def read(
        self, body: memoryview, spec: TensorSpec, device: torch.device, state: State, message: Message
    ) -> tuple[torch.Tensor, State]:
        samples, state = self._read(body, _shape(spec), device, state, message)
        return samples.view(-1), state

    def _read(
        self, body: memoryview, shape: tuple[int, int, int], device: torch.device, state: State, message: Message
    ) -> tuple[torch.Tensor, State]:
        count = shape[0]
        start = -(-count // 8)
        known = _known(shape, state, message)
        told = np.unpackbits(np.frombuffer(body[:start], np.uint8), count=count, bitorder="little")
        length = int.from_bytes(body[start : start + 4], "little")
        first, second = body[start + 4 : start + 4 + length], body[start + 4 + length :]
        if body.nbytes < start + 4 or first.nbytes != length or (told != known.numpy()).any():
            raise RemoteProtocolError("a change came to samples that are not the ones remembered here")
        samples = torch.empty(shape, device=device)
        for codec, part, rows in ((self.news, first, ~known), (self.change, second, known)):
            inner = TensorSpec((int(rows.sum()), *shape[1:]), "float32")
            if not codec.accepts(inner, part.nbytes):
                raise RemoteProtocolError("a part of a message has another length")
            samples[rows] = codec.decode(memoryview(bytearray(part)), inner, device, {}, message)[0]
        samples[known] += _before(state, message, known, shape, device)
        samples = samples.nan_to_num_()
        return samples, _remembered(samples, state, message)

    def coded_bytes(self, spec: TensorSpec) -> int:
        """Of samples that were seen before."""
        shape = _shape(spec)
        inner, none = TensorSpec(shape, "float32"), TensorSpec((0, *shape[1:]), "float32")
        return -(-shape[0] // 8) + 4 + self.news.size_bytes(none) + self.change.size_bytes(inner)

    def accepts(self, spec: TensorSpec, nbytes: int) -> bool:
        return at_most_raw(spec, nbytes)


def _shape(spec: TensorSpec) -> tuple[int, int, int]:
    """(samples, rows of each, channels)."""
    packed = spec.packed
    count = packed.shape[0] if packed.shape else 1
    width = row_width(spec) if len(packed.shape) > 1 else packed.numel // count
    return count, packed.numel // (count * width), width


def _known(shape: tuple[int, int, int], state: State, message: Message) -> torch.Tensor:
    """Which samples are remembered, of this size."""
    if len(message.rows) != shape[0]:
        return torch.zeros(shape[0], dtype=torch.bool)
    return torch.tensor([(was := state.get(str(row))) is not None and was.shape == shape[1:] for row in message.rows])


def _before(
    state: State, message: Message, known: torch.Tensor, shape: tuple[int, int, int], device: torch.device
) -> torch.Tensor:
    rows = [state[str(row)] for i, row in enumerate(message.rows) if i < len(known) and known[i]]
    return torch.stack(rows).to(device).float() if rows else torch.empty((0, *shape[1:]), device=device)


def _remembered(samples: torch.Tensor, state: State, message: Message) -> State:
    if len(message.rows) != len(samples):
        return state
    kept = samples.to(torch.bfloat16).nan_to_num_()
    after = {name: tensor for name, tensor in state.items() if name not in set(map(str, message.rows))}
    after |= {str(row): sample.clone() for row, sample in zip(message.rows, kept, strict=True)}
    most = max(MEMORY_BYTES // max(2 * samples[0].numel(), 1), len(samples))
    return dict(list(after.items())[-most:])


DELTA = Delta()
