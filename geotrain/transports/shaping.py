"""Keeps frames to the rates and delays of a topology, in user space: a home network without root. I/O (clock, sleep).

A piece departs when its link and its sender's uplink have passed it, and is written to the connection one delay later;
pieces in between are under way, so a delay costs no rate. The receiver's downlink passes what it reads, and while it
does not read, the connection's flow control stops the senders. Departures are counted from each other, not from when
a sleep happened to end, so that late wake-ups do not cost rate either.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable

from ..base import Link
from ..topology import Topology

Write = Callable[[bytes], Awaitable[None]]

_PIECE_S = 0.01
"""A piece takes so long on its link: short, that links share fairly; not so short that wake-ups cost much."""

_LEAST_PIECE = 4096
_EARLY_S = 0.001
"""Sleeps shorter than the event loop's clock are left out; the next departure makes up for it."""

_LATE_S = 0.25
"""A sender that lags further behind (the machine is busy) does not make up for it."""

_FAST = 1.25e9
"""Bytes per second: on a link without a rate, what is under way is bounded as on one of 10 Gbit/s."""

_CREDIT_S = 0.01
"""How much later than it could a piece may be read, without losing its place on the downlink."""


class Gate:
    """A rate that several links share: bytes pass one after the other."""

    def __init__(self, rate_bytes_per_s: float) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self._free_s = 0.0

    def passed_s(self, ready_s: float, nbytes: int) -> float:
        """When bytes that are ready at `ready_s` will have passed; takes that time from those that come later."""
        self._free_s = max(ready_s, self._free_s) + nbytes / self.rate_bytes_per_s
        return self._free_s


class Shaper:
    """What `name`, a peer of `topology` or not, has of the network."""

    def __init__(self, topology: Topology, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._topology = topology
        self._name = name
        self._clock = clock
        self._uplink = Gate(topology.up_bytes_per_s(name))
        self._downlink = Gate(topology.down_bytes_per_s(name))
        self._outs: dict[str, Out] = {}

    def change(self, topology: Topology) -> None:
        """From now on the network is another one."""
        self._topology = topology
        self._uplink.rate_bytes_per_s = topology.up_bytes_per_s(self._name)
        self._downlink.rate_bytes_per_s = topology.down_bytes_per_s(self._name)
        for dst, out in self._outs.items():
            out.change(topology.link(self._name, dst))

    def piece_bytes(self, dst: str, most: int) -> int:
        """The size of messages to `dst`."""
        rate = self._topology.link(self._name, dst).rate_bytes_per_s
        return int(max(_LEAST_PIECE, min(most, _PIECE_S * rate)))

    def out(self, dst: str, write: Write) -> "Out":
        self._outs[dst] = Out(self._uplink, self._topology.link(self._name, dst), write, self._clock)
        return self._outs[dst]

    async def into(self, src: str, nbytes: int) -> None:
        """Waits until bytes that were just read from `src` have passed the downlink."""
        if self._downlink.rate_bytes_per_s == math.inf:
            return
        now_s = self._clock()
        came_s = nbytes / self._topology.link(src, self._name).rate_bytes_per_s
        await _sleep_until(self._downlink.passed_s(now_s - max(came_s, _CREDIT_S), nbytes), now_s)


class Out:
    """The sending end of a shaped link: `write` as the caller sees it, and `run`, which does the writing."""

    def __init__(self, uplink: Gate, link: Link, write: Write, clock: Callable[[], float]) -> None:
        self._uplink, self._link = uplink, Gate(link.rate_bytes_per_s)
        self._connection, self._clock = write, clock
        self.change(link)
        self._departed_s = clock()
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._bytes_under_way = 0
        self._changed = asyncio.Event()

    def change(self, link: Link) -> None:
        """From now on the link has another rate and delay."""
        self._link.rate_bytes_per_s, self._delay_s = link.rate_bytes_per_s, link.latency_s
        self._most_under_way = min(link.rate_bytes_per_s, _FAST) * (link.latency_s + 8 * _PIECE_S)

    def idle(self) -> None:
        """Nothing was waiting for the link."""
        self._departed_s = self._clock()

    async def write(self, piece: bytes) -> None:
        """Returns when the piece has left; it arrives later."""
        while self._bytes_under_way > self._most_under_way:
            await self._wait()
        now_s = self._clock()
        ready_s = max(self._departed_s, now_s - _LATE_S)
        link_s, uplink_s = self._link.passed_s(ready_s, len(piece)), self._uplink.passed_s(ready_s, len(piece))
        self._departed_s = max(link_s, uplink_s)
        self._bytes_under_way += len(piece)
        self._under_way.append((self._departed_s + self._delay_s, piece))
        self._notify()
        await _sleep_until(self._departed_s, now_s)

    async def run(self) -> None:
        while True:
            while not self._under_way:
                await self._wait()
            arrives_s, piece = self._under_way[0]
            await _sleep_until(arrives_s, self._clock())
            await self._connection(piece)
            self._under_way.popleft()
            self._bytes_under_way -= len(piece)
            self._notify()

    async def _wait(self) -> None:
        changed = self._changed
        await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _sleep_until(then_s: float, now_s: float) -> None:
    if then_s - now_s > _EARLY_S:
        await asyncio.sleep(then_s - now_s)
