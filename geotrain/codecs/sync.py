"""For the outer steps of replicas: 2 or 4 bits for each parameter, and nothing is lost in the long run. Pure.

What a message loses is kept and added to the next one of the same value (error feedback), so the sum of what arrives
differs from the sum of what was sent by the last loss only. For a flat vector of parameter changes:

    sync4    ec-005, 4.2 bits
    sync2    ec-1, 2.0 bits                                    (see `entropy`; the layout is theirs)

The sender's state is `residual`: float32, one for each element, in memory order. The receiver has none. A message that
is not finite travels as it is and leaves the residual alone.

F. Seide et al., Interspeech 2014; A. Douillard et al., https://arxiv.org/abs/2501.18512 (4 bits for outer gradients).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..base import TensorSpec
from .base import Message, State
from .entropy import ENTROPY, Entropy
from .lossy import Lossy, as_view


@dataclass(frozen=True, slots=True)
class Sync(Lossy):
    inner: Entropy = field(default=ENTROPY[0])
    unbiased: bool = True

    def write(
        self, x: torch.Tensor, peak: float, spec: TensorSpec, state: State, message: Message
    ) -> tuple[Sequence[torch.Tensor | bytes], State]:
        most = torch.finfo(torch.float32).max
        wanted = (x + state["residual"].to(x.device)).clamp_(-most, most) if state else x
        body, _ = self.inner.write(wanted, wanted.abs().max().item(), spec, {}, message)
        joined = b"".join(map(as_view, body))
        got, _ = self.inner.read(memoryview(joined), spec, x.device, {}, message)
        return [joined], {"residual": (wanted - got).clamp_(-most, most)}

    def read(
        self, body: memoryview, spec: TensorSpec, device: torch.device, state: State, message: Message
    ) -> tuple[torch.Tensor, State]:
        return self.inner.read(body, spec, device, {}, message)[0], state

    def coded_bytes(self, spec: TensorSpec) -> int:
        return self.inner.coded_bytes(spec)

    def accepts(self, spec: TensorSpec, nbytes: int) -> bool:
        return self.inner.accepts(spec, nbytes)


SYNC = tuple(Sync(name, inner=inner) for name, inner in zip(("sync4", "sync2"), (ENTROPY[1], ENTROPY[5]), strict=True))
