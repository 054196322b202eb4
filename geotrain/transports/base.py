"""What carries frames between peers: one small interface, several implementations. Pure."""

from collections.abc import Callable, Mapping
from typing import Protocol

from ..base import COORDINATOR, Frame, FrameKey, LinkUse, TensorSpec

Admit = Callable[[str, FrameKey, str, TensorSpec, int, bool], None]
"""`admit(src, key, codec, spec, nbytes, absent)` returns if the frame is expected, and raises `RemoteProtocolError` if
not, which costs the sender its link. Asked before memory is allocated for the frame."""

OnFrame = Callable[[str, Frame], None]
"""`on_frame(src, frame)`: a frame came. On the event loop's thread, in the order of sending on each link."""

OnLost = Callable[[str, str], None]
"""`on_lost(name, reason)`: the link to a peer of the roster ended; once an epoch, and not if this side ended it."""


class Transport(Protocol):
    """Links to the peers of a roster. A link belongs to one epoch: a new roster ends the old links and their frames."""

    name: str

    async def start(self) -> str:
        """Listen; returns the `host:port` that others dial. Raises `UserError` if the address cannot be had."""
        ...

    def set_roster(self, epoch: int, addresses: Mapping[str, str], admit: Admit) -> None:
        """Link up with these peers (this one's own name is passed over), for this epoch."""
        ...

    def add_to_roster(self, epoch: int, addresses: Mapping[str, str]) -> None:
        """Link up with these, too, if this is the epoch. A link to one of them that is there ends: it has come anew."""
        ...

    async def send(self, dst: str, frame: Frame) -> None:
        """Returns when the frame has left, so that whoever waits for it keeps within the link's pace. Frames to one
        peer leave in the order of the calls. The payload must not change meanwhile. Raises `PeerLost`."""
        ...

    def used(self) -> list[LinkUse]:
        """What arrived over each link since this was last asked."""
        ...

    async def close(self) -> None:
        """End all links."""
        ...


def dials(name: str, other: str) -> bool:
    """Who of a pair dials: the smaller name, but never the coordinator."""
    return other == COORDINATOR or (name != COORDINATOR and name < other)
