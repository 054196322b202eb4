"""One stage of a model on real tensors: forward, and backward with gradients that come from elsewhere. I/O-free, but
it computes.

Remote autodiff: a received value enters autograd through a node of its own. Backward starts from the loss and from
the values whose gradients other stages sent. Autograd adds those first and then this stage's own contributions in
reverse op order, which is the order of one process that runs the whole graph: sums are equal to the last bit.

With `recompute` a microbatch keeps what it received, and buffers as they were before it, and runs forward again for
its backward (activation checkpointing, Chen et al. 2016, arXiv:1604.06174). Both runs are under autograd, since
kernels may be chosen by whether gradients are wanted: the same calls and the same seeds give the same bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .graph.interpret import Program, RandomKey
from .graph.ir import StageGraph
from .graph.serial import constant_tensor


class _Slot:
    """Holds a received value until autograd has taken it, then the gradient until it is sent."""

    __slots__ = ("grad", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.grad: torch.Tensor | None = None


class _Enter(torch.autograd.Function):
    """A value that came from another stage. Unlike a leaf, its node takes part in autograd's ordered summing, and
    unlike a view of a leaf, it may be used by any op."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, slot: _Slot) -> torch.Tensor:
        ctx.slot = slot
        tensor, slot.tensor = slot.tensor, None  # no cycle: tensor -> node -> slot -> tensor
        assert tensor is not None
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        ctx.slot.grad = grad
        return None, None


class _Live:
    """A microbatch that autograd can take backward."""

    __slots__ = ("loss", "roots", "slots")

    def __init__(self) -> None:
        self.slots: dict[str, _Slot] = {}
        self.roots: dict[str, torch.Tensor] = {}
        self.loss: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Kept:
    """A microbatch whose forward will run again. `buffers` are those that the forward changes, as they were."""

    key: RandomKey
    received: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


class StageRunner:
    """A stage's tensors and programs.

    `tensors` holds parameters, buffers and constants by name, on `device`; parameters are leaves, and gradients
    accumulate in their `.grad`. `num_microbatches` scales the loss: gradients are those of the mean. `recompute`
    trades a second forward for the memory of live microbatches.
    """

    def __init__(
        self, graph: StageGraph, *, seed: int, num_microbatches: int, device: torch.device, recompute: bool = False
    ) -> None:
        self.graph = graph
        self.tensors: dict[str, torch.Tensor] = {}
        self._seed = seed
        self._num_microbatches = num_microbatches
        self._device = device
        self._recompute = recompute
        self._live: dict[int, _Live | _Kept] = {}
        self._anchor = torch.ones((), requires_grad=True)
        keep = {s.value for s in graph.sends} | set(graph.outputs.values()) | {r.value for r in graph.receives}
        self._keep = keep | ({graph.loss} if graph.loss is not None else set())
        self._program = Program(graph.ops, keep=self._keep, device=device, autocast=graph.autocast)
        self._evaluation = Program(graph.ops, keep=self._keep, device=device, autocast=graph.autocast, evaluate=True)
        for name, constant in graph.constants.items():
            self.tensors[name] = constant_tensor(constant, device)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Puts a parameter or buffer in place; the tensor is used as it is, not copied."""
        if name in self.graph.parameters:
            tensor = tensor.detach().requires_grad_(self.graph.parameters[name].requires_grad)
        self.tensors[name] = tensor

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The trainable parameters that this stage owns."""
        return {n: self.tensors[n] for n, p in self.graph.parameters.items() if p.requires_grad}

    def forward(
        self, step: int, microbatch: int, received: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """Runs one microbatch.

        Args:
            received: model inputs and values of other stages, by name.

        Returns:
            The values to send, by name, and the loss (a scalar, detached) if it is made here.
        """
        key, buffers = RandomKey(self._seed, step, microbatch), dict[str, torch.Tensor]()
        if self._recompute:
            buffers = {n: self.tensors[n].clone() for n, b in self.graph.buffers.items() if b.mutated}
        live, values = self._run(key, received, {})
        self._live[microbatch] = _Kept(key, dict(received), buffers) if self._recompute else live
        return values, None if live.loss is None else live.loss.detach()

    def _run(
        self, key: RandomKey, received: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> tuple[_Live, dict[str, torch.Tensor]]:
        """The forward pass under autograd; `buffers` are used, and changed, instead of the stage's own."""
        live, env = _Live(), {**self.tensors, **buffers, **received}
        for receive in self.graph.receives:
            if receive.grad:
                slot = live.slots[receive.value] = _Slot(received[receive.value].detach())
                env[receive.value] = _Enter.apply(self._anchor, slot)
        self._program.run(env, key)
        live.roots = {name: env[name] for name in self.graph.grads_from if env[name].requires_grad}
        live.loss = None if self.graph.loss is None else env[self.graph.loss]
        return live, {s.value: env[s.value].detach() for s in self.graph.sends if not s.once}

    def backward(self, microbatch: int, grads: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """Adds one microbatch's gradients to the parameters'.

        Args:
            grads: by value name, what the later holders of the value have summed so far, or None.

        Returns:
            By the name of each received value that needs one, the gradient to pass on, or None where none flows.
        """
        live = self._live.pop(microbatch)
        if isinstance(live, _Kept):
            live, _ = self._run(live.key, live.received, live.buffers)
        roots: list[torch.Tensor] = []
        root_grads: list[torch.Tensor] = []
        for name, grad in grads.items():
            if grad is not None and name in live.roots:
                roots.append(live.roots[name])
                root_grads.append(grad)
        if live.loss is not None and live.loss.requires_grad:
            roots.append(live.loss)
            root_grads.append(torch.ones_like(live.loss) / self._num_microbatches)
        if roots:
            torch.autograd.backward(roots, root_grads)
        return {name: slot.grad for name, slot in live.slots.items()}

    @torch.no_grad()
    def evaluate(
        self, step: int, microbatch: int, received: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None, dict[str, torch.Tensor]]:
        """A forward pass without dropout, gradients or changed buffers: (values to send, loss, outputs)."""
        env = dict(self.tensors)
        env.update(received)
        self._evaluation.run(env, RandomKey(self._seed, step, microbatch))
        values = {s.value: env[s.value] for s in self.graph.sends if not s.once}
        loss = None if self.graph.loss is None else env[self.graph.loss]
        return values, loss, {outside: env[name] for outside, name in self.graph.outputs.items()}
