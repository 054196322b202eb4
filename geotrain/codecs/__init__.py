"""How tensors are written for a link. Pure."""

from collections.abc import Iterable

import torch

from ..errors import PlanError
from ..graph.serial import tensor_spec
from .base import Codec, Message, Payload, State, message_key
from .channels import CHANNELS
from .delta import DELTA
from .entropy import ENTROPY
from .hadamard import HADAMARD
from .identity import IDENTITY
from .rounded import BF16, INT8
from .sparse import PACK, ROWS
from .sync import SYNC
from .topk import TOPK
from .transform import TRANSFORM

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        IDENTITY,
        BF16,
        INT8,
        *HADAMARD,
        *ENTROPY,
        DELTA,
        PACK,
        *ROWS,
        *TOPK,
        *TRANSFORM,
        *CHANNELS,
        *SYNC,
    )
}


def get_codec(name: str) -> Codec:
    """Raises `PlanError` for a name that is none of `CODECS`."""
    if name not in CODECS:
        raise PlanError(f"no codec is called {name!r}; there are {', '.join(CODECS)}")
    return CODECS[name]


def warm_up(names: Iterable[str]) -> None:
    """Loads or compiles what these codecs need, a matter of seconds, so that no message waits for it."""
    x = torch.ones(68, 16)  # 17 blocks: a whole tile and a rest; rows enough for principal axes
    for codec in map(get_codec, names):
        state, message = codec.init(tensor_spec(x)), Message(0)
        payload, _ = codec.encode(x, state, message)
        codec.decode(memoryview(bytearray(b"".join(payload))), tensor_spec(x), x.device, state, message)


__all__ = ["CODECS", "Codec", "Message", "Payload", "State", "get_codec", "message_key", "warm_up"]
