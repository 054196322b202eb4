"""How tensors are written for a link. Pure."""

from ..errors import PlanError
from .base import Codec, Payload, State
from .identity import IDENTITY

CODECS = {codec.name: codec for codec in (IDENTITY,)}


def get_codec(name: str) -> Codec:
    """Raises `PlanError` for a name that is none of `CODECS`."""
    if name not in CODECS:
        raise PlanError(f"no codec is called {name!r}; there are {', '.join(CODECS)}")
    return CODECS[name]


__all__ = ["CODECS", "Codec", "Payload", "State", "get_codec"]
