"""Frames over gRPC: one bidirectional stream a pair of peers and epoch. I/O.

Whoever dials says hello first (protocol version, run, epoch, names, and a proof of the run's token, which itself never
travels); the other side answers with a proof of its own, or with the reason why it refuses. Then both send frames, cut
into messages of at most 1 MiB.
"""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import grpc
import grpc.aio
import msgpack

from .. import wire
from ..base import PROTOCOL_VERSION, Frame, LinkUse
from ..errors import GeotrainError, PeerLost, RemoteProtocolError, UserError
from ..topology import Topology
from .base import Admit, OnFrame, OnLost, dials

_SERVICE = "geotrain.Frames"
_METHOD = "Exchange"
_EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]

CHUNK_BYTES = 1 << 20
"""gRPC's best rate at little memory."""

_HELLO_BYTES = 1024
_HELLO_S = 20.0
"""A stream that has not said hello by then is dropped; a peer that has not answered the dial by then is lost."""

_ROSTER_S = 60.0
"""How long a hello waits for this side's roster: peers learn of a new epoch one after the other."""

_WAITING_HELLOS = 256

_KEEPALIVE: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Without this one a stopped peer is noticed after 60 s, whatever the timeout above says.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_LIMITS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", CHUNK_BYTES),
    ("grpc.max_send_message_length", CHUNK_BYTES),
]
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_KEEPALIVE,
    *_LIMITS,
    ("grpc.so_reuseport", 0),  # or a second peer would quietly share the port
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
]
_CLIENT_OPTIONS: list[tuple[str, Any]] = [
    *_KEEPALIVE,
    *_LIMITS,
    ("grpc.use_local_subchannel_pool", 1),  # channels to one address would share a connection otherwise
    ("grpc.enable_http_proxy", 0),
]
_BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)

_Read = Callable[[], Awaitable[Any]]
_Write = Callable[[bytes], Awaitable[None]]


class _Link:
    """One peer in one epoch: the frames that wait to leave, and why it ended, if it has."""

    def __init__(self, peer: str, epoch: int) -> None:
        self.peer = peer
        self.epoch = epoch
        self.taken = False
        self.dialling: asyncio.Task[None] | None = None
        self.ended: str | None = None
        self.over = asyncio.Event()
        self.more = asyncio.Event()
        self.waiting: deque[tuple[Frame, asyncio.Future[LinkUse]]] = deque()

    def end(self, reason: str) -> None:
        self.ended = reason
        self.over.set()
        for _, future in self.waiting:
            if not future.done():
                future.set_exception(PeerLost(reason))
        self.waiting.clear()


class DirectTransport:
    """A `Transport` over gRPC.

    Args:
        run, token: the run's name and secret; who lacks them is refused.
        host, port: where `start` listens; port 0 takes any free one.
        server_credentials, channel_credentials: gRPC's, for TLS; without them connections are plain.
        topology: whose rates and delays to keep.
    """

    def __init__(
        self,
        name: str,
        *,
        run: str,
        token: bytes,
        on_frame: OnFrame,
        on_lost: OnLost,
        host: str = "127.0.0.1",
        port: int = 0,
        server_credentials: grpc.ServerCredentials | None = None,
        channel_credentials: grpc.ChannelCredentials | None = None,
        topology: Topology | None = None,
    ) -> None:
        self.name = name
        self._run, self._token = run, token
        self._on_frame, self._on_lost = on_frame, on_lost
        self._host, self._port = host, port
        self._server_credentials, self._channel_credentials = server_credentials, channel_credentials
        self._server: grpc.aio.Server | None = None
        self._epoch = 0
        self._links: dict[str, _Link] = {}
        self._admit: Admit = _nothing
        self._ending: set[asyncio.Task[None]] = set()
        self._hellos = 0
        self._moved = asyncio.Event()
        self._closed = False

    async def start(self) -> str:
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        self.mount(server)
        where = f"{self._host}:{self._port}"
        try:
            if self._server_credentials is None:
                port = server.add_insecure_port(where)
            else:
                port = server.add_secure_port(where, self._server_credentials)
        except RuntimeError:
            port = 0
        if not port:
            await server.stop(None)
            raise UserError(f"cannot listen on {where}: it is in use or not this machine's; choose another port")
        await server.start()
        self._server = server
        return f"{self._host}:{port}"

    def mount(self, server: grpc.aio.Server) -> None:
        """Serve on somebody else's server, which must take messages of 1 MiB, instead of `start`."""
        handlers: dict[str, Any] = {_METHOD: grpc.stream_stream_rpc_method_handler(self._serve)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))

    def set_roster(self, epoch: int, addresses: Mapping[str, str], admit: Admit) -> None:
        self._end_links(f"epoch {self._epoch} is over")
        self._epoch, self._admit = epoch, admit
        self._links = {name: _Link(name, epoch) for name in addresses if name != self.name}
        for link in self._links.values():
            if dials(self.name, link.peer):
                link.dialling = asyncio.create_task(self._dial(link, addresses[link.peer]))
        self._moved.set()
        self._moved = asyncio.Event()

    async def send(self, dst: str, frame: Frame) -> LinkUse:
        link = self._links.get(dst)
        if link is None or frame.key.epoch != link.epoch:
            raise PeerLost(f"{dst} is not linked in epoch {frame.key.epoch}")
        if link.ended is not None:
            raise PeerLost(link.ended)
        future: asyncio.Future[LinkUse] = asyncio.get_running_loop().create_future()
        link.waiting.append((frame, future))
        link.more.set()
        return await future

    async def close(self) -> None:
        self._closed = True
        self._end_links(f"{self.name} has left")
        if self._ending:
            await asyncio.wait(self._ending)
        if self._server is not None:
            await self._server.stop(0.5)

    def _end_links(self, reason: str) -> None:
        for link in self._links.values():
            link.end(reason)
            if link.dialling is not None and not link.dialling.done():
                link.dialling.cancel()
                self._ending.add(link.dialling)
                link.dialling.add_done_callback(self._ending.discard)
        self._links = {}

    # One stream.

    async def _dial(self, link: _Link, address: str) -> None:
        if self._channel_credentials is None:
            channel = grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS)
        else:
            channel = grpc.aio.secure_channel(address, self._channel_credentials, options=_CLIENT_OPTIONS)
        reason = f"{link.peer} does not answer at {address}"
        try:
            method: Any = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
            call: Any = method(wait_for_ready=True)
            reason = await self._greet(link, call, reason)
            if not reason:
                reason = await self._carry(link, call.read, call.write)
        finally:
            self._lose(link, reason)
            await channel.close()

    async def _greet(self, link: _Link, call: Any, unanswered: str) -> str:
        """Says hello; returns why there is no link, or nothing."""
        hello = _Hello(self._run, link.epoch, self.name, link.peer, secrets.token_bytes(16))
        try:
            await asyncio.wait_for(call.write(hello.to_bytes(self._token)), _HELLO_S)
            answer = await asyncio.wait_for(call.read(), _ROSTER_S + _HELLO_S)
        except (*_BROKEN, TimeoutError):
            return unanswered
        if answer is _EOF or not hmac.compare_digest(answer, hello.proof(self._token, b"welcome")):
            told = "" if answer is _EOF else answer[1:_HELLO_BYTES].decode(errors="replace")
            refused = answer is not _EOF and answer[:1] == b"!"
            return f"{link.peer} refuses: {told}" if refused else f"{link.peer} does not know the run's secret"
        return ""

    async def _serve(self, _: Any, context: Any) -> None:
        try:
            data = await asyncio.wait_for(context.read(), _HELLO_S)
        except (*_BROKEN, TimeoutError):
            return
        if data is _EOF:
            return
        try:
            hello = _Hello.from_bytes(data, self._token)
            link = await self._expected(hello)
        except RemoteProtocolError as error:
            await context.write(b"!" + str(error).encode()[: _HELLO_BYTES - 1])
            return
        reason = f"{link.peer} ended the link"
        try:
            await context.write(hello.proof(self._token, b"welcome"))
            reason = await self._carry(link, context.read, context.write)
        finally:  # gRPC cancels this call when the connection is gone
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
                while hello.epoch > self._epoch and not self._closed:
                    await self._moved.wait()
        except TimeoutError:
            pass
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

    async def _carry(self, link: _Link, read: _Read, write: _Write) -> str:
        """Both directions, until one ends; returns why."""
        reader = asyncio.create_task(self._receive(link, read))
        writer = asyncio.create_task(self._transmit(link, write))
        over = asyncio.create_task(link.over.wait())
        tasks: tuple[asyncio.Task[Any], ...] = (reader, writer, over)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        for task in done:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, GeotrainError):
                return str(error)
            if error is not None and not isinstance(error, _BROKEN):
                raise error
        return f"the connection to {link.peer} ended"

    async def _receive(self, link: _Link, read: _Read) -> None:
        def admit(header: wire.FrameHeader) -> None:
            if header.run != self._run or header.key.epoch != link.epoch:
                raise RemoteProtocolError(f"{link.peer} sends a frame of another run or epoch")
            self._admit(link.peer, header.key, header.codec, header.spec, header.nbytes, header.absent)

        parser = wire.FrameParser(admit)
        while (chunk := await read()) is not _EOF:
            for frame in parser.feed(chunk):
                if link.ended is None:
                    self._on_frame(link.peer, frame)

    async def _transmit(self, link: _Link, write: _Write) -> None:
        while True:
            while not link.waiting:
                link.more.clear()
                await link.more.wait()
            frame, future = link.waiting[0]
            if not future.done():
                await self._send_one(link, frame, future, write)
            link.waiting.popleft()

    async def _send_one(self, link: _Link, frame: Frame, future: asyncio.Future[LinkUse], write: _Write) -> None:
        try:
            buffers = wire.encode(frame, self._run)
        except ValueError as error:
            future.set_exception(error)
            return
        start_s, nbytes = time.monotonic(), 0
        for piece in wire.pieces(buffers, CHUNK_BYTES):
            await write(piece)
            nbytes += len(piece)
        if not future.done():
            future.set_result(LinkUse(self.name, link.peer, nbytes, time.monotonic() - start_s))

    def _lose(self, link: _Link, reason: str) -> None:
        if link.ended is None:
            link.end(reason)
            self._on_lost(link.peer, reason)


class _Hello:
    """The first message of a stream."""

    def __init__(self, run: str, epoch: int, src: str, dst: str, nonce: bytes) -> None:
        self.run, self.epoch, self.src, self.dst, self.nonce = run, epoch, src, dst, nonce
        self._fields: list[Any] = [PROTOCOL_VERSION, run, epoch, src, dst, nonce]

    def proof(self, token: bytes, role: bytes) -> bytes:
        return hmac.digest(token, role + cast(bytes, msgpack.packb(self._fields)), hashlib.sha256)

    def to_bytes(self, token: bytes) -> bytes:
        return cast(bytes, msgpack.packb([*self._fields, self.proof(token, b"hello")]))

    @staticmethod
    def from_bytes(data: bytes, token: bytes) -> "_Hello":
        """Raises `RemoteProtocolError` with what is wrong."""
        try:
            if len(data) > _HELLO_BYTES:
                raise ValueError
            version, *fields = msgpack.unpackb(data, max_array_len=8, max_map_len=0, max_ext_len=0)
            if type(version) is int and version != PROTOCOL_VERSION:
                raise RemoteProtocolError(f"this run speaks protocol {PROTOCOL_VERSION}, not {version}")
            run, epoch, src, dst, nonce, proof = fields
            if [type(field) for field in (version, *fields)] != [int, str, int, str, str, bytes, bytes]:
                raise ValueError
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
            raise RemoteProtocolError("a stream begins with a hello") from None
        hello = _Hello(run, epoch, src, dst, nonce)
        if not hmac.compare_digest(proof, hello.proof(token, b"hello")):
            raise RemoteProtocolError("the run's secret is wrong; use the ticket that the coordinator printed last")
        return hello


def _nothing(*_: object) -> None:
    raise RemoteProtocolError("no frame is expected")
