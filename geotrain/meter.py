"""How fast a link is, from the frames that arrive over it. Pure.

The header of a long frame goes ahead of its payload, at once followed by it, so the time between both is the payload's
time on the link, whatever waited before. The least time from a header's sending to its arrival is the link's delay plus
the offset of the two clocks; clocks drift, so only the last while counts.
"""

from collections import deque

from .base import LinkUse
from .wire import TIMED_BYTES

_SLOT_S = 10.0
_SLOTS = 6


class Meter:
    """Counts what arrives over one directed link; `take` says what came since it was last asked."""

    def __init__(self, src: str, dst: str) -> None:
        self._src, self._dst = src, dst
        self._nbytes = self._timed_bytes = 0
        self._busy_s = 0.0
        self._delays: deque[tuple[float, float]] = deque(maxlen=_SLOTS)
        self._begun_s = 0.0

    def began(self, sent_s: float, now_s: float) -> None:
        """A frame's header is here."""
        self._begun_s = now_s
        delay_s = now_s - sent_s
        if not self._delays or now_s - self._delays[-1][0] > _SLOT_S:
            self._delays.append((now_s, delay_s))
        else:
            since_s, least_s = self._delays[-1]
            self._delays[-1] = since_s, min(least_s, delay_s)

    def ended(self, nbytes: int, now_s: float) -> None:
        """The frame whose header came last is complete, with a payload of `nbytes`."""
        self._nbytes += nbytes
        if nbytes >= TIMED_BYTES:
            self._timed_bytes += nbytes
            self._busy_s += now_s - self._begun_s

    def take(self) -> LinkUse:
        delay_s = min((least_s for _, least_s in self._delays), default=None)
        use = LinkUse(self._src, self._dst, self._nbytes, self._timed_bytes, self._busy_s, delay_s)
        self._nbytes = self._timed_bytes = 0
        self._busy_s = 0.0
        return use
