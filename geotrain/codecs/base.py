"""What a codec is: two pure functions over explicit state. Pure.

    encode(tensor, state) -> (payload, state)        decode(payload, spec, device, state) -> (tensor, state)

The payload is a list of buffers that the wire joins. The state (a residual, a basis, a cache) is a value that the
caller holds: one for each boundary and direction, at each end.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..base import TensorSpec

Payload = list[memoryview]
State = Any


class Codec(NamedTuple):
    """`init(spec)` gives the first state; `size_bytes(spec)` is the exact payload size, which receivers enforce and
    the planner asks."""

    name: str
    init: Callable[[TensorSpec], State]
    encode: Callable[[torch.Tensor, State], tuple[Payload, State]]
    decode: Callable[[memoryview, TensorSpec, torch.device, State], tuple[torch.Tensor, State]]
    size_bytes: Callable[[TensorSpec], int]
