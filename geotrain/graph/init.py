"""Init programs: ops, and literals for the data that came from outside torch, that make one tensor. Pure."""

import base64
from typing import Any

import torch

from ..errors import GraphFormatError
from .interpret import Program, RandomKey
from .ir import LITERAL, Dtype, Op
from .ops import dtype_name, to_dtype

_CPU = torch.device("cpu")


def run_program(ops: tuple[Op, ...], key: RandomKey | None = None, device: torch.device = _CPU) -> torch.Tensor:
    """The tensor that a program makes. Raises `GraphFormatError`, or what torch raises, for one that cannot run."""
    env: dict[str, Any] = {op.name: literal(op).to(device) for op in ops if op.target == LITERAL}
    last = ops[-1].name
    rest = [op for op in ops if op.target != LITERAL]
    with torch.no_grad():
        Program(rest, keep=(last,), device=device).run(env, key)
    if not isinstance(env[last], torch.Tensor):
        raise GraphFormatError(f"init op {last!r} gives several tensors")
    return env[last]


def literal_args(data: torch.Tensor) -> tuple[Any, ...]:
    """(shape, dtype, base64 of the little-endian bytes) of a contiguous CPU tensor."""
    raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return (tuple(data.shape), Dtype(dtype_name(data.dtype)), base64.b64encode(raw).decode())


def literal(op: Op) -> torch.Tensor:
    """The inverse of `literal_args`."""
    try:
        shape, dtype, text = op.args
        raw = bytearray(base64.b64decode(text, validate=True))
        data = torch.frombuffer(raw, dtype=to_dtype(dtype.name)) if raw else torch.empty(0)
        return data.reshape(shape).to(to_dtype(dtype.name))
    except (ValueError, TypeError, AttributeError, RuntimeError):
        raise GraphFormatError(f"init op {op.name!r} holds data that does not fit its shape") from None
