"""The control plane's connections: gRPC streams of `protocol` messages; peers dial out. I/O.

One service, `geotrain.Control`, with three calls: Session carries messages both ways for as long as a peer is
in; Fetch streams tensors to a peer; Store streams them from it. Tensors use connections of their own, so that
they never hold up a message.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what matters comes as exceptions; read when grpc is imported

import grpc
import grpc.aio

from . import protocol
from .base import TensorSpec
from .errors import CoordinatorLost, GeotrainError, RemoteError, UserError
from .identity import Ticket
from .transports.direct import CLIENT_OPTIONS, SERVER_OPTIONS

_SERVICE = "geotrain.Control"
EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]

_HELLO_S = 20.0
"""A connection that has not said hello by then is dropped."""

_SERVER_LIMITS: list[tuple[str, Any]] = [
    # A client may send no more than an upload's header or a chunk before it has shown its token.
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", protocol.MESSAGE_BYTES),
]
_CLIENT_LIMITS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", protocol.MESSAGE_BYTES),
    ("grpc.max_send_message_length", 4 << 20),
]


class Session:
    """One peer's connection, at the coordinator. `host` is where it came from."""

    def __init__(self, number: int, host: str) -> None:
        self.number = number
        self.host = host
        self._outbox: asyncio.Queue[protocol.FromCoordinator | None] = asyncio.Queue()

    def send(self, message: protocol.FromCoordinator) -> None:
        """Queues a message; a few, as instructions are few."""
        self._outbox.put_nowait(message)

    def close(self) -> None:
        """Ends the connection after what is queued."""
        self._outbox.put_nowait(None)

    async def drain(self, context: Any) -> None:
        while (message := await self._outbox.get()) is not None:
            await context.write(protocol.encode(message))


class Host(Protocol):
    """What the coordinator does with connections. Raise a `GeotrainError` to end the one at fault."""

    def on_hello(self, session: Session, hello: protocol.Hello) -> None: ...
    def on_message(self, session: Session, message: protocol.FromPeer) -> None: ...
    def on_closed(self, session: Session, reason: str) -> None: ...
    def fetch(self, request: protocol.Fetch) -> AsyncIterator[bytes]: ...
    async def store(self, request: protocol.Store, chunks: AsyncIterator[bytes]) -> None: ...


class ControlService:
    """The coordinator's end. Mount it on a server with `add_to`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._sessions = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
            "Fetch": grpc.unary_stream_rpc_method_handler(self._fetch),
            "Store": grpc.stream_stream_rpc_method_handler(self._store),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))

    async def _session(self, _: Any, context: Any) -> None:
        self._sessions += 1
        session = Session(self._sessions, _host_of(context.peer()))
        reason = "its connection ended"
        try:
            hello = protocol.decode(await asyncio.wait_for(_read(context), _HELLO_S), protocol.Hello)
            self._host.on_hello(session, hello)
        except (EOFError, TimeoutError):
            return
        except GeotrainError as error:
            await context.write(protocol.encode(protocol.Leave(str(error), refused=True)))
            return
        reader = asyncio.create_task(self._listen(session, context))
        writer = asyncio.create_task(session.drain(context))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if reader.done() and not reader.cancelled() and reader.exception() is not None:
                reason = str(reader.exception())
        finally:
            for task in (reader, writer):
                task.cancel()
            self._host.on_closed(session, reason)

    async def _listen(self, session: Session, context: Any) -> None:
        with contextlib.suppress(EOFError, grpc.aio.AbortError, grpc.aio.UsageError):
            while True:
                message: protocol.FromPeer = protocol.decode(await _read(context), protocol.FromPeer)
                self._host.on_message(session, message)

    async def _fetch(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._host.fetch(protocol.decode(data, protocol.Fetch)):
                yield chunk
        except GeotrainError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def _store(self, _: Any, context: Any) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            await context.write(b"")  # the header is accepted, go on
            with contextlib.suppress(EOFError):
                while True:
                    yield await _read(context)

        try:
            await self._host.store(protocol.decode(await _read(context), protocol.Store), chunks())
        except EOFError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an upload without a header")
        except GeotrainError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))


async def _read(context: Any) -> bytes:
    """The next message of a call. Raises `EOFError` at its end."""
    data = await context.read()
    if data is EOF:
        raise EOFError
    return data


def _host_of(peer: str) -> str:
    """The host in gRPC's `ipv4:1.2.3.4:5`, or `ipv6:%5B::1%5D:5`."""
    host = peer.partition(":")[2].rpartition(":")[0]
    return host.replace("%5B", "[").replace("%5D", "]") or "127.0.0.1"


Server = grpc.aio.Server
Mount = Callable[[Server], None]


async def serve(host: str, port: int, mount: Mount) -> tuple[grpc.aio.Server, int]:
    """Start a server with the services that `mount` adds; returns it and its port.

    Raises `UserError` if the address cannot be had, such as a port in use.
    """
    server = grpc.aio.server(options=[*SERVER_OPTIONS, *_SERVER_LIMITS])
    mount(server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError:
        bound = 0
    if not bound:
        await server.stop(None)
        raise _cannot_listen(host, port)
    await server.start()
    return server, bound


def free_port(host: str, port: int) -> int:
    """The port if `serve` could have it now, or for 0 one that it could. Raises `UserError` as `serve` does."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: a closed one may linger
        try:
            probe.bind((host.strip("[]"), port))
        except OSError:
            raise _cannot_listen(host, port) from None
        return probe.getsockname()[1]


def _cannot_listen(host: str, port: int) -> UserError:
    return UserError(f"cannot listen on {host}:{port}: it is in use or not this machine's; choose another port")


class Dialled:
    """A peer's connection to the coordinator of a ticket, at `address` once open. Close it when done."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._name = ""
        self.address = ""
        self._channels: list[grpc.aio.Channel] = []
        self._call: Any = None
        self._bulk: grpc.aio.Channel | None = None
        self._writing = asyncio.Lock()

    async def open(self, hello: protocol.Hello, timeout_s: float = 8.0) -> protocol.Welcome:
        """Try the ticket's addresses in order, say hello, and wait to be let in.

        Raises `CoordinatorLost` if nobody answers there, `UserError` if the coordinator refuses.
        """
        for address in self._ticket.addresses:
            channel = self._channel(address)
            if not await connected(channel, timeout_s):
                continue
            self.address = address
            call = channel.stream_stream(f"/{_SERVICE}/Session")
            self._call = call()
            await self.send(hello)
            answer = await self.receive()
            if isinstance(answer, protocol.Welcome):
                self._name = hello.name
                return answer
            reason = answer.reason if isinstance(answer, protocol.Leave) else "it does not speak our protocol"
            raise UserError(f"the coordinator refuses: {reason}")
        where = " or ".join(self._ticket.addresses)
        raise CoordinatorLost(f"no coordinator answers at {where}; is it running, and can it be reached?")

    def _channel(self, address: str) -> grpc.aio.Channel:
        self._channels.append(grpc.aio.insecure_channel(address, options=[*CLIENT_OPTIONS, *_CLIENT_LIMITS]))
        return self._channels[-1]

    async def send(self, message: protocol.FromPeer) -> None:
        """Raises `CoordinatorLost` when the connection is gone."""
        async with self._writing:
            with _lost():
                await self._call.write(protocol.encode(message))

    async def receive(self) -> protocol.FromCoordinator:
        """Raises `CoordinatorLost` when the connection is gone."""
        with _lost():
            data = await self._call.read()
        if data is EOF:
            raise CoordinatorLost("the coordinator ended the connection")
        return protocol.decode(data, protocol.FromCoordinator)

    async def fetch(self, epoch: int, names: Sequence[str], skip: int = 0) -> AsyncIterator[bytes]:
        """The tensors' bytes, one after the other, in chunks, without the first `skip`. Raises `RemoteError` if there
        are none."""
        request = protocol.Fetch(self._ticket.run, self._ticket.token, self._name, epoch, tuple(names), skip)
        call: Any = self._bulk_channel().unary_stream(f"/{_SERVICE}/Fetch")(protocol.encode(request))
        try:
            async for chunk in call:
                yield chunk
        except grpc.aio.AioRpcError:
            raise await _refusal(call, "weights") from None
        finally:
            call.cancel()

    async def store(
        self,
        epoch: int,
        stage: int,
        step: int,
        gradients: bool,
        tensors: Mapping[str, TensorSpec],
        send: Callable[[Callable[[bytes], Awaitable[None]]], Awaitable[None]],
    ) -> None:
        """Upload tensors; `send` is given a function that takes the next chunk and waits for room. Returns
        when the coordinator has all. Raises `RemoteError` if it refuses."""
        token = self._ticket.token
        named = tuple(protocol.NamedSpec(name, spec) for name, spec in tensors.items())
        header = protocol.Store(self._ticket.run, token, epoch, stage, step, gradients, named)
        call: Any = self._bulk_channel().stream_stream(f"/{_SERVICE}/Store")()
        try:
            await call.write(protocol.encode(header))
            if await call.read() is not EOF:
                await send(call.write)
                await call.done_writing()
                await call.read()
            if await call.code() is not grpc.StatusCode.OK:
                raise await _refusal(call, "an upload")
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await _refusal(call, "an upload") from None
        finally:
            call.cancel()

    def _bulk_channel(self) -> grpc.aio.Channel:
        if self._bulk is None:
            self._bulk = self._channel(self.address)
        return self._bulk

    async def close(self) -> None:
        if self._call is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._call.done_writing(), 1.0)
        for channel in self._channels:
            await channel.close()


async def connected(channel: grpc.aio.Channel, timeout_s: float) -> bool:
    """Whether somebody answers; a port that nobody listens on is not waited for."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            state = channel.get_state(try_to_connect=True)
            while state not in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
                await channel.wait_for_state_change(state)
                state = channel.get_state()
            return state == grpc.ChannelConnectivity.READY
    return False


@contextlib.contextmanager
def _lost() -> Any:
    try:
        yield
    except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
        raise CoordinatorLost("the connection to the coordinator was lost") from None


async def _refusal(call: Any, what: str) -> RemoteError:
    """Why the coordinator ended a call; a failed write itself does not know."""
    return RemoteError(f"the coordinator refuses {what}: {await call.details() or 'it ended early'}")
