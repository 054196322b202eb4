"""The lossless codec: the elements as they lie in memory. Pure.

Only the memory layout needs care. A transposed tensor is sent in memory order and gets its strides back, and a
repeated (stride 0) dimension is sent once: a kernel that meets another layout may round differently, and split
training would no longer equal unsplit training to the last bit. No copy is made of a dense CPU tensor.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch

from ..base import TensorSpec
from ..errors import RemoteProtocolError
from ..graph.ops import to_dtype
from ..graph.serial import tensor_spec
from .base import Message, Payload, State


@dataclass(frozen=True, slots=True)
class Identity:
    name: str = "identity"
    lossless: bool = True
    unbiased: bool = True

    def init(self, spec: TensorSpec) -> State:
        return {}

    def encode(self, tensor: torch.Tensor, state: State, message: Message) -> tuple[Payload, State]:
        return raw(tensor), state

    def decode(
        self, payload: memoryview, spec: TensorSpec, device: torch.device, state: State, message: Message
    ) -> tuple[torch.Tensor, State]:
        return from_raw(payload, spec, device), state

    def size_bytes(self, spec: TensorSpec) -> int:
        return spec.packed.nbytes

    def accepts(self, spec: TensorSpec, nbytes: int) -> bool:
        return nbytes == spec.packed.nbytes


def raw(tensor: torch.Tensor) -> Payload:
    """The elements as they lie in memory, without gaps."""
    flat = pack(tensor).view(torch.uint8).cpu()
    return [memoryview(cast(Any, flat.numpy()))] if flat.numel() else []


def from_raw(payload: memoryview, spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """The inverse of `raw`, in the layout of `spec`. Raises `RemoteProtocolError`."""
    packed = spec.packed
    if payload.nbytes != packed.nbytes:
        raise RemoteProtocolError(f"{payload.nbytes} bytes came for a tensor of {packed.nbytes} bytes")
    dtype = to_dtype(spec.dtype)
    if not payload.nbytes:
        return torch.empty(spec.shape, dtype=dtype, device=device)
    return unpack(torch.frombuffer(payload, dtype=dtype).to(device), spec)


def pack(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in memory order, without gaps and without repeats: one dimension, on the tensor's device."""
    spec = tensor_spec(tensor)
    packed = tensor.detach()
    if spec.stride is not None:
        for d, stride in enumerate(spec.stride):
            if stride == 0:
                packed = packed.narrow(d, 0, 1)
        packed = packed.permute(spec.dims_in_memory)
    # as_strided, because the one element of an expanded scalar keeps its stride 0 through contiguous() and view()
    return packed.contiguous().as_strided((packed.numel(),), (1,))


def unpack(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The inverse of `pack`."""
    tensor = flat.view(spec.packed.shape)
    if spec.stride is None:
        return tensor
    order = spec.dims_in_memory
    tensor = tensor.permute([order.index(d) for d in range(len(order))]).expand(spec.shape)
    if tensor.stride() != spec.stride:
        tensor = _with_layout(tensor, spec)
    return tensor


def _with_layout(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The same elements with gaps between them, as in a slice of a larger tensor."""
    assert spec.stride is not None
    one_of_each = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in spec.stride)
    strided = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=tensor.device)
    strided[one_of_each].copy_(tensor[one_of_each])
    return strided


IDENTITY = Identity()
