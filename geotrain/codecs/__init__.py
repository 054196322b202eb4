"""How tensors are written for a link. Pure."""

from ..errors import PlanError
from .base import Codec, Message, Payload, State, message_key
from .entropy import ENTROPY
from .hadamard import HADAMARD
from .identity import IDENTITY
from .rounded import BF16, INT8
from .sync import SYNC

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        IDENTITY,
        BF16,
        INT8,
        *HADAMARD,
        *ENTROPY,
        *SYNC,
    )
}


def get_codec(name: str) -> Codec:
    """Raises `PlanError` for a name that is none of `CODECS`."""
    if name not in CODECS:
        raise PlanError(f"no codec is called {name!r}; there are {', '.join(CODECS)}")
    return CODECS[name]


__all__ = ["CODECS", "Codec", "Message", "Payload", "State", "get_codec", "message_key"]
