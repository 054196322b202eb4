"""Codecs at the cuts of a model in one process: what crosses is encoded and decoded, forward and backward."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from geotrain.base import Direction, FrameKey
from geotrain.codecs import State, get_codec, message_key
from geotrain.codecs.base import Message
from geotrain.graph.serial import tensor_spec

CPU = torch.device("cpu")


@dataclass
class Way:
    """One direction of one cut, with the codec's state at both ends."""

    codec: str
    seed: int
    value: str
    direction: Direction
    lasting: bool
    sender: State | None = None
    receiver: State | None = None
    nbytes: int = 0
    elements: int = 0
    errors: list[float] = field(default_factory=list)

    def cross(self, x: Tensor, step: int, rows: tuple[int, ...]) -> Tensor:
        codec, spec = get_codec(self.codec), tensor_spec(x)
        if self.sender is None or self.receiver is None or not self.lasting:
            self.sender = self.receiver = codec.init(spec)
        key = message_key(self.seed, FrameKey(0, step, 0, self.value, self.direction))
        payload, self.sender = codec.encode(x, self.sender, Message(key, rows))
        data = memoryview(bytearray(b"".join(payload)))
        y, self.receiver = codec.decode(data, spec, CPU, self.receiver, Message(key, rows))
        self.nbytes += data.nbytes
        self.elements += x.numel()
        if step % 10 == 0:
            self.errors.append(float((y - x).square().sum() / x.square().sum().clamp_min(1e-30)))
        return y


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, crossings: "Crossings", cut: int) -> Tensor:
        ctx.crossings, ctx.cut = crossings, cut
        return crossings.forward[cut].cross(x, crossings.step, crossings.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        crossings = ctx.crossings
        return crossings.backward[ctx.cut].cross(grad, crossings.step, crossings.rows), None, None


class Crossings:
    """Cuts behind some modules, which a message crosses in each step. `step` and `rows` (the samples) are of the
    message that crosses next; evaluations do not cross. `lasting`: codecs remember from step to step, as those of a
    run do not."""

    def __init__(
        self, modules: Sequence[nn.Module], forward: str, backward: str, seed: int, *, lasting: bool = False
    ) -> None:
        self.forward = [Way(forward, seed, f"x{i}", "F", lasting) for i in range(len(modules))]
        self.backward = [Way(backward, seed, f"x{i}", "B", lasting) for i in range(len(modules))]
        self.step, self.rows = 0, ()
        self._on = True
        for i, module in enumerate(modules):
            module.register_forward_hook(lambda _m, _a, out, i=i: self._out(out, i))

    @contextmanager
    def off(self) -> Iterator[None]:
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def _out(self, out: Any, cut: int) -> Any:
        if not self._on:
            return None
        x = out[0] if isinstance(out, tuple) else out
        y = _Cross.apply(x, self, cut)
        return (y, *out[1:]) if isinstance(out, tuple) else y

    def figures(self) -> dict[str, float]:
        """Bytes for each element and the mean relative squared error, both ways."""
        found: dict[str, float] = {}
        for name, ways in (("forward", self.forward), ("backward", self.backward)):
            found[f"{name} bytes"] = sum(w.nbytes for w in ways) / max(sum(w.elements for w in ways), 1)
            found[f"{name} error"] = statistics.mean([e for w in ways for e in w.errors] or [0.0])
        return found
