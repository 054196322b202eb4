"""What all transports over streams share: who links with whom, hello, frames in and out, and the end. I/O (asyncio).

A stream carries one pair's frames of one epoch, both ways. Whoever dials says hello first (protocol version, run,
epoch, names, and a proof of the run's token, which itself never travels); the other side answers with a proof of its
own, or with the reason why it refuses.
"""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, Protocol, cast

import msgpack

from .. import wire
from ..base import PROTOCOL_VERSION, Frame, LinkUse
from ..errors import GeotrainError, PeerLost, RemoteProtocolError
from ..meter import Meter
from ..topology import Topology
from .base import Admit, OnFrame, OnLost, dials
from .shaping import Shaper, Write

CHUNK_BYTES = 1 << 20
"""No message is larger: gRPC's best rate at little memory."""

_JOINED_BYTES = 64 << 10
"""Short frames that wait together leave in messages of up to so many bytes: a message costs as much as 50 KB do."""

HELLO_S = 20.0
"""A stream that has not said hello by then is dropped; a peer that cannot be reached for so long is lost."""

_ROSTER_S = 60.0
"""How long a hello waits for this side's roster: peers learn of a new epoch, and of each other, one after the other."""

_WAITING_HELLOS = 256
_HELLO_BYTES = 1024
_REFUSAL = b"!"


class Stream(Protocol):
    """A connection that keeps messages whole. Both raise `ConnectionError` when it is broken."""

    async def read(self) -> bytes:
        """The next message; empty at the end."""
        ...

    async def write(self, data: bytes) -> None:
        """Returns when there is room for more."""
        ...


class _Waiting(NamedTuple):
    """A frame that is to leave, and who waits for that."""

    frame: Frame
    future: asyncio.Future[None]

    @property
    def long(self) -> bool:
        return self.frame.nbytes >= wire.TIMED_BYTES


class _Link:
    """One peer in one epoch: the frames that wait to leave, and why it ended, if it has."""

    def __init__(self, peer: str, epoch: int) -> None:
        self.peer = peer
        self.epoch = epoch
        self.taken = False
        self.ended: str | None = None
        self.over = asyncio.Event()
        self.more = asyncio.Event()
        self.waiting: deque[_Waiting] = deque()
        self.moving: deque[_Waiting] = deque()
        """State that moves: it leaves while nothing else waits."""
        self.leaving: list[_Waiting] = []

    def add(self, waiting: _Waiting) -> None:
        (self.moving if waiting.frame.key.direction == "M" else self.waiting).append(waiting)
        self.more.set()

    def next(self) -> "list[_Waiting]":
        """The frame that has waited longest and, if it is short, short ones behind it that go into one message."""
        queue = self.waiting or self.moving
        self.leaving = [queue.popleft()]
        nbytes = self.leaving[0].frame.nbytes
        while queue and not self.leaving[0].long and not queue[0].long:
            nbytes += queue[0].frame.nbytes
            if nbytes > _JOINED_BYTES:
                break
            self.leaving.append(queue.popleft())
        return self.leaving

    def end(self, reason: str) -> None:
        self.ended = reason
        self.over.set()
        for waiting in (*self.leaving, *self.waiting, *self.moving):
            if not waiting.future.done():
                waiting.future.set_exception(PeerLost(reason))
        self.waiting.clear()
        self.moving.clear()


class StreamTransport:
    """All of a `Transport` but the streams themselves: a subclass dials in `connect` and calls `accept`.

    Args:
        run, token: the run's name and secret; who lacks them is refused.
        topology: whose rates and delays to keep, if any.
    """

    def __init__(
        self, name: str, *, run: str, token: bytes, on_frame: OnFrame, on_lost: OnLost, topology: Topology | None
    ) -> None:
        self.name = name
        self._run, self._token = run, token
        self._on_frame, self._on_lost = on_frame, on_lost
        self._shaper = None if topology is None else Shaper(topology, name)
        self._epoch = 0
        self._links: dict[str, _Link] = {}
        self._meters: dict[str, Meter] = {}
        self._admit: Admit = _nothing
        self._dialling: set[asyncio.Task[None]] = set()
        self._hellos = 0
        self._moved = asyncio.Event()
        self._closed = False

    def connect(self, address: str) -> AbstractAsyncContextManager[Stream]:
        """A stream to whoever listens at `address`."""
        raise NotImplementedError

    def set_roster(self, epoch: int, addresses: Mapping[str, str], admit: Admit) -> None:
        self._end_links(f"epoch {self._epoch} is over")
        self._epoch, self._admit = epoch, admit
        self._link(addresses)

    def add_to_roster(self, epoch: int, addresses: Mapping[str, str]) -> None:
        if epoch == self._epoch:
            self._link(addresses)

    def _link(self, addresses: Mapping[str, str]) -> None:
        for name, address in addresses.items():
            if name == self.name:
                continue
            if name in self._links:
                self._links[name].end(f"{name} has come anew")
            link = self._links[name] = _Link(name, self._epoch)
            if dials(self.name, name):
                task = asyncio.create_task(self._dial(link, address))
                self._dialling.add(task)
                task.add_done_callback(self._dialling.discard)
        self._wake_hellos()

    async def send(self, dst: str, frame: Frame) -> None:
        link = self._links.get(dst)
        if link is None or frame.key.epoch != link.epoch:
            raise PeerLost(f"{dst} is not linked in epoch {frame.key.epoch}")
        if link.ended is not None:
            raise PeerLost(link.ended)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        link.add(_Waiting(frame, future))
        await future

    def reshape(self, topology: Topology) -> None:
        """Keep to the rates and delays of another network from now on."""
        if self._shaper is not None:
            self._shaper.change(topology)

    def used(self) -> list[LinkUse]:
        return [meter.take() for meter in self._meters.values()]

    async def close(self) -> None:
        self._closed = True
        self._end_links(f"{self.name} has left")
        self._wake_hellos()
        if self._dialling:
            await asyncio.wait(self._dialling)

    def _end_links(self, reason: str) -> None:
        for link in self._links.values():
            link.end(reason)
        self._links = {}

    def _wake_hellos(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    # One stream.

    async def _dial(self, link: _Link, address: str) -> None:
        greeting = asyncio.create_task(self._dialled(link, address))
        over = asyncio.create_task(link.over.wait())
        await asyncio.wait((greeting, over), return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        greeting.cancel()
        reason = f"{link.peer} does not answer at {address}"
        try:
            reason = await greeting
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._lose(link, reason)

    async def _dialled(self, link: _Link, address: str) -> str:
        """The whole life of a stream that we open; returns why it ended."""
        hello = _Hello(PROTOCOL_VERSION, self._run, link.epoch, self.name, link.peer, secrets.token_bytes(16))
        async with self.connect(address) as stream:
            await asyncio.wait_for(stream.write(hello.to_bytes(self._token)), HELLO_S)
            answer = await asyncio.wait_for(stream.read(), _ROSTER_S + HELLO_S)
            if hmac.compare_digest(answer, hello.proof(self._token, "welcome")):
                return await self._carry(link, stream)
            if answer.startswith(_REFUSAL):  # as one proof of 256 does, too
                return f"{link.peer} refuses: {answer[1:_HELLO_BYTES].decode(errors='replace')}"
            return f"{link.peer} does not know the run's secret"

    async def accept(self, stream: Stream) -> None:
        """The whole life of a stream that somebody else opened."""
        try:
            data = await asyncio.wait_for(stream.read(), HELLO_S)
            try:
                hello = _Hello.from_bytes(data, self._token)
                link = await self._expected(hello)
            except RemoteProtocolError as error:
                await stream.write(_REFUSAL + str(error).encode()[: _HELLO_BYTES - 1])
                return
        except (ConnectionError, TimeoutError):
            return
        reason = f"the connection to {link.peer} ended"
        try:
            await stream.write(hello.proof(self._token, "welcome"))
            reason = await self._carry(link, stream)
        except ConnectionError:
            pass
        finally:  # a broken connection may cancel us
            self._lose(link, reason)

    async def _expected(self, hello: "_Hello") -> _Link:
        """The link that a hello is for; waits for the roster that names it. Raises `RemoteProtocolError`."""
        if hello.run != self._run or hello.dst != self.name:
            raise RemoteProtocolError(f"this is {self.name} of run {self._run!r}, not {hello.dst} of {hello.run!r}")
        if self._hellos >= _WAITING_HELLOS:
            raise RemoteProtocolError("too many peers wait to be linked")
        self._hellos += 1
        try:
            async with asyncio.timeout(_ROSTER_S):
                while not self._closed and (hello.epoch > self._epoch or self._lacks(hello)):
                    moved = self._moved
                    await moved.wait()
        except TimeoutError:
            pass  # the epochs differ, or nobody told of this peer
        finally:
            self._hellos -= 1
        link = self._links.get(hello.src)
        if hello.epoch != self._epoch:
            raise RemoteProtocolError(f"{self.name} is in epoch {self._epoch}, not in {hello.epoch}")
        if link is None or dials(self.name, hello.src):
            raise RemoteProtocolError(f"{hello.src} is not one that dials {self.name} in epoch {self._epoch}")
        if link.taken:
            raise RemoteProtocolError(f"{hello.src} is linked already")
        link.taken = True
        return link

    def _lacks(self, hello: "_Hello") -> bool:
        """Whether a peer of this epoch is not in the roster, or its link has ended."""
        link = self._links.get(hello.src)
        return hello.epoch == self._epoch and (link is None or link.ended is not None)

    async def _carry(self, link: _Link, stream: Stream) -> str:
        """Frames both ways, until one side ends it; returns why."""
        tasks = [asyncio.create_task(self._receive(link, stream)), asyncio.create_task(link.over.wait())]
        if self._shaper is None:
            tasks.append(asyncio.create_task(self._transmit(link, stream.write, CHUNK_BYTES)))
        else:
            shaped = self._shaper.out(link.peer, stream.write)
            size = self._shaper.piece_bytes(link.peer, CHUNK_BYTES)
            tasks.append(asyncio.create_task(self._transmit(link, shaped.write, size, shaped.idle)))
            tasks.append(asyncio.create_task(shaped.run()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        for task in done:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, GeotrainError):
                return str(error)
            if error is not None and not isinstance(error, ConnectionError):
                raise error
        return f"the connection to {link.peer} ended"

    async def _receive(self, link: _Link, stream: Stream) -> None:
        meter = self._meters.setdefault(link.peer, Meter(link.peer, self.name))

        def admit(header: wire.FrameHeader) -> None:
            if header.run != self._run or header.key.epoch != link.epoch:
                raise RemoteProtocolError(f"{link.peer} sends a frame of another run or epoch")
            self._admit(link.peer, header.key, header.codec, header.spec, header.nbytes, header.absent)
            meter.began(header.sent_s, time.monotonic())

        parser = wire.FrameParser(admit)
        while chunk := await stream.read():
            if self._shaper is not None:
                await self._shaper.into(link.peer, len(chunk))
            for frame in parser.feed(chunk):
                meter.ended(frame.nbytes, time.monotonic())
                if link.ended is None:
                    self._on_frame(link.peer, frame)

    async def _transmit(self, link: _Link, write: Write, size: int, idle: Any = None) -> None:
        while True:
            if not (link.waiting or link.moving):
                link.more.clear()
                await link.more.wait()
                if idle is not None:
                    idle()
            leaving = [waiting for waiting in link.next() if not waiting.future.done()]
            buffers = self._encoded(leaving)
            for piece in wire.pieces(buffers, size, header_ahead=bool(buffers) and leaving[0].long):
                await write(piece)
            for waiting in leaving:  # once begun, a frame is sent to its end, whether or not somebody still waits
                if not waiting.future.done():
                    waiting.future.set_result(None)

    def _encoded(self, leaving: list[_Waiting]) -> list[wire.Buffer]:
        buffers: list[wire.Buffer] = []
        for frame, future in leaving:
            frame.sent_s = time.monotonic()
            try:
                buffers += wire.encode(frame, self._run)
            except ValueError as error:
                future.set_exception(error)
        return buffers

    def _lose(self, link: _Link, reason: str) -> None:
        if link.ended is None:
            link.end(reason)
            self._on_lost(link.peer, reason)


@dataclass(frozen=True, slots=True)
class _Hello:
    """The first message of a stream: from whom, to whom, for which run and epoch."""

    version: int
    run: str
    epoch: int
    src: str
    dst: str
    nonce: bytes

    def proof(self, token: bytes, role: str) -> bytes:
        """What only those make who have the token."""
        return hmac.digest(token, cast(bytes, msgpack.packb([role, *astuple(self)])), hashlib.sha256)

    def to_bytes(self, token: bytes) -> bytes:
        return cast(bytes, msgpack.packb([*astuple(self), self.proof(token, "hello")]))

    @staticmethod
    def from_bytes(data: bytes, token: bytes) -> "_Hello":
        """Raises `RemoteProtocolError` with what is wrong."""
        try:
            if len(data) > _HELLO_BYTES:
                raise ValueError
            version, *rest = msgpack.unpackb(data, max_array_len=16, max_map_len=0, max_ext_len=0)
            if type(version) is int and version != PROTOCOL_VERSION:
                raise RemoteProtocolError(f"this run speaks protocol {PROTOCOL_VERSION}, not {version}")
            if [type(field) for field in (version, *rest)] != [int, str, int, str, str, bytes, bytes]:
                raise ValueError
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
            raise RemoteProtocolError("a stream begins with a hello") from None
        *fields, proof = rest
        hello = _Hello(version, *fields)
        if not hmac.compare_digest(proof, hello.proof(token, "hello")):
            raise RemoteProtocolError("the run's secret is wrong; use the ticket that the coordinator printed last")
        return hello


def _nothing(*_: object) -> None:
    raise RemoteProtocolError("no frame is expected")
