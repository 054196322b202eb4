"""Fresh weights without a copy of them anywhere: how each tensor is made, as a small program. Pure.

`record` runs a model's constructor without memory and keeps, for every parameter and buffer, the ops that its
values came from. `materialize` runs them where the tensor is needed. An op that draws random numbers is seeded by
(run seed, its number in the whole constructor), always on the CPU: so any split, on any device, has the same
weights, and tensors that are copies of one another (tied, cloned layers, target networks) still are.

The values are those of the constructor's own distributions, but not the ones that eager mode would draw.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..base import TensorSpec
from ..errors import CaptureError, GraphFormatError
from .init import run_program
from .interpret import RandomKey
from .ir import Op
from .ops import dtype_name
from .tape import INSTEAD, Tape

_PROGRAM = "_geotrain_program"
_BEFORE_STEP_0 = -1


def record(make: Callable[[], nn.Module]) -> nn.Module:
    """Runs a model's constructor and returns the model on the meta device; `programs` tells how to fill it.

    The constructor may do what it would do with real weights: fill in place, through views, compute from data, ask
    for the values of tensors that are not random. Tensors that are plain attributes of a module become
    buffers that are not in the state dict, so that they travel too.

    Raises:
        CaptureError: it does what cannot be recorded, such as a loop until random values are good enough; the
            message names the op and the line.
    """
    tape = Tape()
    try:
        with mock.patch.object(nn.init, "_no_grad_trunc_normal_", _trunc_normal_), tape.recording():
            module = make()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        if "meta" not in str(error):
            raise
        text = " ".join(str(error).split())[:200]
        raise CaptureError(f"the model cannot be built without memory: {text}; {INSTEAD}") from error
    _move_to_meta(module, tape)
    return module


def programs(module: nn.Module) -> dict[str, tuple[Op, ...]]:
    """For each recorded parameter and buffer, under each of its names, the ops that make it. The last op's result is
    the tensor. The rest of the module (say a wrapper with real parameters) is left out."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: getattr(tensor, _PROGRAM) for name, tensor in named if hasattr(tensor, _PROGRAM)}


def materialize(
    init: tuple[Op, ...], spec: TensorSpec, name: str, seed: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The tensor that a program makes for the run seed. `name` is for messages.

    Raises:
        GraphFormatError: the program does not make what `spec` says, or would take far more memory than that; it
            came from the network, so this is found out before anything is allocated.
    """
    try:
        with _Allowance(spec.nbytes):
            shape = run_program(init, device=torch.device("meta"))
        if tuple(shape.shape) != spec.shape or dtype_name(shape.dtype) != spec.dtype:
            raise ValueError(f"it makes {dtype_name(shape.dtype)}{list(shape.shape)}")
        tensor = run_program(init, RandomKey(seed, _BEFORE_STEP_0, 0))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        text = " ".join(str(error).split())[:200]
        raise GraphFormatError(f"{name!r} cannot be initialized as {spec.dtype}{list(spec.shape)}: {text}") from None
    if tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
        tensor = tensor.clone(memory_format=torch.contiguous_format)  # a view of something else
    return tensor.to(device)


class _Allowance(TorchDispatchMode):
    """Adds up the memory that ops would take, and stops what takes far more than its result."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._left = 64 * nbytes + (64 << 20)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if all(r.alias_info is None for r in func._schema.returns):
            tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            self._left -= sum(t.numel() * t.element_size() for t in tensors)
        if self._left < 0:
            raise ValueError("it takes more memory than that is worth")
        return result


def _trunc_normal_(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """A truncated normal by the inverse of its distribution function; torch's own draws again until all fit."""

    def below(x: float) -> float:
        return (1.0 + math.erf((x - mean) / std / math.sqrt(2.0))) / 2.0

    with torch.no_grad():
        exact = tensor if tensor.dtype in (torch.float32, torch.float64) else torch.empty_like(tensor).float()
        exact.uniform_(2 * below(a) - 1, 2 * below(b) - 1, generator=generator)
        exact.erfinv_().mul_(std * math.sqrt(2.0)).add_(mean).clamp_(min=a, max=b)
        return tensor if exact is tensor else tensor.copy_(exact)


def _move_to_meta(module: nn.Module, tape: Tape) -> None:
    """Gives every tensor of the module its program, and puts those that hold data on the meta device."""
    moved: dict[int, torch.Tensor] = {}
    for path, part in module.named_modules():
        for name in [n for n, value in vars(part).items() if isinstance(value, torch.Tensor)]:
            value = vars(part).pop(name)
            part.register_buffer(name, value.detach(), persistent=False)
        for table, name, tensor in _tensors(part):
            if id(tensor) not in moved:
                moved[id(tensor)] = _with_program(tensor, tape, f"{path}.{name}" if path else name)
            table[name] = moved[id(tensor)]


def _tensors(part: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    for table in (part._parameters, part._buffers):
        for name, tensor in list(table.items()):
            if tensor is not None:
                yield table, name, tensor


def _with_program(tensor: torch.Tensor, tape: Tape, name: str) -> torch.Tensor:
    try:
        program = tape.program(tensor)
    except CaptureError as error:
        raise CaptureError(f"{name}: {error}") from None
    if not tensor.is_meta:
        empty = torch.empty_like(tensor, device="meta")
        tensor = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    setattr(tensor, _PROGRAM, program)
    return tensor
