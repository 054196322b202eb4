"""What a codec is: two pure functions over explicit state. Pure.

    encode(tensor, state, message) -> (payload, state)
    decode(payload, spec, device, state, message) -> (tensor, state)

The payload is a list of buffers that the wire joins. The state (a residual, a basis, a cache) is a mapping of named
tensors that the caller holds: one for each value and direction, at each end. `message` is what both ends know of a
message without being told, so the same message after the same state always gives the same bytes, and a replay sends
what was sent before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash

from ..base import FrameKey, TensorSpec

Payload = list[memoryview]
State = Mapping[str, torch.Tensor]
"""Empty for a codec without memory."""


@dataclass(frozen=True, slots=True)
class Message:
    """`key` seeds what is random in a message; `rows` are the samples that its first dimension holds, by number in
    the data set, or empty where they are not known."""

    key: int
    rows: tuple[int, ...] = ()


def message_key(seed: int, key: FrameKey) -> int:
    """64 random bits of one message of a run. The epoch is left out: who computes a value does not change its bytes."""
    words = f"{seed}/{key.step}/{key.microbatch}/{key.value}/{key.direction}"
    return xxhash.xxh3_64_intdigest(words.encode())


class Codec(Protocol):
    """`lossless`: decode(encode(x)) is x, bit for bit. `unbiased`: over all keys its mean is x. `size_bytes` is the
    exact payload size of a finite tensor, or, of a codec whose size depends on the values, what is typical;
    `accepts` says which sizes a receiver may be sent at all, before it allocates."""

    @property
    def name(self) -> str: ...
    @property
    def lossless(self) -> bool: ...
    @property
    def unbiased(self) -> bool: ...
    def init(self, spec: TensorSpec) -> State: ...
    def encode(self, tensor: torch.Tensor, state: State, message: Message) -> tuple[Payload, State]: ...
    def decode(
        self, payload: memoryview, spec: TensorSpec, device: torch.device, state: State, message: Message
    ) -> tuple[torch.Tensor, State]:
        """Raises `RemoteProtocolError` for bytes that are no payload of such a tensor."""
        ...

    def size_bytes(self, spec: TensorSpec) -> int: ...
    def accepts(self, spec: TensorSpec, nbytes: int) -> bool: ...
