"""Runs ops in order on real tensors, under autograd, as eager PyTorch would. Pure (it computes, and seeds torch's
random generators before each random op).

Equality with the user's own model to the last bit rests on this: the same ATen calls in the same order with the
same arguments give the same autograd graph, and so the same gradients.
"""

import hashlib
import operator
from collections.abc import Callable, Collection, Generator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .ir import Arg, Op, Ref, op_refs, refs
from .ops import GETITEM, evaluation_form, from_arg, is_in_place, resolve, to_dtype


@dataclass(frozen=True, slots=True)
class RandomKey:
    """What random numbers depend on besides the op: never on who computes, or when, or how often."""

    seed: int
    step: int
    microbatch: int

    def for_op(self, number: int) -> int:
        """The seed of random op `number`: 63 bits of a hash of (seed, step, microbatch, number)."""
        text = f"{self.seed}/{self.step}/{self.microbatch}/{number}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _seed_generators(device: torch.device, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def seeded(seed: int, step: int, microbatch: int) -> Generator[None, None, None]:
    """Makes eager code draw the random numbers that a geotrain run draws: `with seeded(0, step, i): loss = model(x)`
    has the same dropout masks as microbatch `i` of that step, so that the two can be compared to the last bit.

    It reseeds torch's generators before the n-th random op of the block, as the run does before the n-th random op
    of the graph.
    """
    key, count = RandomKey(seed, step, microbatch), 0

    class Reseed(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            nonlocal count
            if torch.Tag.nondeterministic_seeded in func.tags and not _is_plain_attention(func, args, kwargs or {}):
                tensors = [a for a in args if isinstance(a, torch.Tensor)]
                _seed_generators(tensors[0].device if tensors else torch.device("cpu"), key.for_op(count))
                count += 1
            return func(*args, **(kwargs or {}))

    with Reseed():
        yield


def _is_plain_attention(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Fused attention carries the tag of random ops even when it drops nothing."""
    if not func._schema.name.startswith("aten::_scaled_dot_product"):
        return False
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return not given.get("dropout_p")


@dataclass(slots=True)
class _Step:
    name: str
    call: Callable[..., Any]
    args: list[Any]
    fill: list[tuple[int, str]]
    nested: list[tuple[int, Arg]]
    kwargs: dict[str, Any]
    fill_kwargs: list[tuple[str, Arg]]
    frees: tuple[str, ...]
    random: int | None


class Program:
    """Ops made ready to run many times.

    `keep` are results to leave in the environment; all others are dropped after their last use. With `evaluate`,
    the ops run in their evaluation form and change no buffer.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        *,
        keep: Collection[str],
        device: torch.device,
        autocast: str | None = None,
        evaluate: bool = False,
    ) -> None:
        self._device = device
        self._autocast = None if autocast is None else to_dtype(autocast)
        frees = _last_uses(ops, keep)
        self._segments: list[tuple[bool, bool, list[_Step]]] = []
        for op in ops:
            if not self._segments or self._segments[-1][:2] != (op.grad, op.autocast):
                self._segments.append((op.grad, op.autocast, []))
            self._segments[-1][2].append(self._prepare(op, frees[op.name], evaluate))

    def _prepare(self, op: Op, frees: tuple[str, ...], evaluate: bool) -> _Step:
        if evaluate and is_in_place(op.target):  # only buffers are changed in place: leave them, return them
            return _Step(op.name, _first, [None], _slots(op.args[:1]), [], {}, [], frees, None)
        if evaluate:
            op = evaluation_form(op)
        call: Callable[..., Any] = operator.getitem if op.target == GETITEM else resolve(op.target)
        tensors = _Nothing()
        args: list[Any] = []
        nested: list[tuple[int, Arg]] = []
        for i, arg in enumerate(op.args):
            holds = not isinstance(arg, Ref) and any(True for _ in refs(arg))
            args.append(None if holds or isinstance(arg, Ref) else from_arg(arg, tensors, self._device))
            if holds:
                nested.append((i, arg))
        kwargs = {k: from_arg(a, tensors, self._device) for k, a in op.kwargs.items() if not list(refs(a))}
        filled = [(k, a) for k, a in op.kwargs.items() if list(refs(a))]
        return _Step(op.name, call, args, _slots(op.args), nested, kwargs, filled, frees, op.random)

    def run(self, env: MutableMapping[str, Any], key: RandomKey | None = None) -> None:
        """Runs all ops, reading from and writing to `env` (value name -> tensor)."""
        with ExitStack() as stack:
            if self._autocast is not None:
                stack.enter_context(torch.autocast(self._device.type, self._autocast))
            for grad, autocast, steps in self._segments:
                if grad and (autocast or self._autocast is None):
                    self._run(steps, env, key)
                    continue
                with ExitStack() as inner:
                    if not grad:
                        inner.enter_context(torch.no_grad())
                    if not autocast:
                        inner.enter_context(torch.autocast(self._device.type, enabled=False))
                    self._run(steps, env, key)

    def _run(self, steps: list[_Step], env: MutableMapping[str, Any], key: RandomKey | None) -> None:
        device = self._device
        for step in steps:
            args, kwargs = step.args, step.kwargs
            if step.fill or step.nested:
                args = args.copy()
                for i, name in step.fill:
                    args[i] = env[name]
                for i, arg in step.nested:
                    args[i] = from_arg(arg, env, device)
            if step.fill_kwargs:
                kwargs = {**kwargs, **{k: from_arg(a, env, device) for k, a in step.fill_kwargs}}
            if step.random is not None and key is not None:
                _seed_generators(device, key.for_op(step.random))
            env[step.name] = step.call(*args, **kwargs)
            for name in step.frees:
                env.pop(name, None)


class _Nothing(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise AssertionError(f"{name} is filled in when the program runs")


def _first(value: Any) -> Any:
    return value


def _slots(args: Sequence[Arg]) -> list[tuple[int, str]]:
    return [(i, arg.name) for i, arg in enumerate(args) if isinstance(arg, Ref)]


def _last_uses(ops: Sequence[Op], keep: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Op name -> the values that no later op reads (and that need not be kept)."""
    seen = set(keep)
    frees: dict[str, tuple[str, ...]] = {}
    for op in reversed(ops):
        names = [n for n in dict.fromkeys((*op_refs(op), op.name)) if n not in seen]
        seen.update(names)
        frees[op.name] = tuple(names)
    return frees
