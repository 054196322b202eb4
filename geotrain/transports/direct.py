"""Frames over gRPC: one bidirectional stream a pair of peers and epoch. I/O."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from ..errors import UserError
from ..topology import Topology
from .base import OnFrame, OnLost
from .links import CHUNK_BYTES, StreamTransport

_SERVICE = "geotrain.Frames"
_METHOD = "Exchange"
_EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]

_KEEPALIVE: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Without this one a stopped peer is noticed after 60 s, whatever the timeout above says.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_KEEPALIVE,
    ("grpc.so_reuseport", 0),  # or a second one of us would quietly share the port
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
]
"""What every server of ours has; the control channel adds its own limits."""
CLIENT_OPTIONS: list[tuple[str, Any]] = [
    *_KEEPALIVE,
    ("grpc.use_local_subchannel_pool", 1),  # channels to one address would share a connection otherwise
    ("grpc.enable_http_proxy", 0),
]
_LIMITS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", CHUNK_BYTES),
    ("grpc.max_send_message_length", CHUNK_BYTES),
]


class DirectTransport(StreamTransport):
    """A `Transport` over gRPC.

    Args:
        run, token: the run's name and secret; who lacks them is refused.
        topology: whose rates and delays to keep, if any.
        host, port: where `start` listens; port 0 takes any free one.
        server_credentials, channel_credentials: gRPC's, for TLS; without them connections are plain.
    """

    def __init__(
        self,
        name: str,
        *,
        run: str,
        token: bytes,
        on_frame: OnFrame,
        on_lost: OnLost,
        topology: Topology | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        server_credentials: grpc.ServerCredentials | None = None,
        channel_credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        super().__init__(name, run=run, token=token, on_frame=on_frame, on_lost=on_lost, topology=topology)
        self._host, self._port = host, port
        self._server_credentials, self._channel_credentials = server_credentials, channel_credentials
        self._server: grpc.aio.Server | None = None

    async def start(self, mount: Callable[[grpc.aio.Server], None] = lambda server: None) -> str:
        """Listen; `mount` puts other services on the same server."""
        server = grpc.aio.server(options=[*SERVER_OPTIONS, *_LIMITS])
        self.mount(server)
        mount(server)
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

    async def close(self) -> None:
        await super().close()
        if self._server is not None:
            await self._server.stop(0.5)  # seconds, for the other side to hear that it is the end

    async def _serve(self, _: Any, context: Any) -> None:
        await self.accept(_GrpcStream(context))

    @asynccontextmanager
    async def connect(self, address: str) -> AsyncIterator["_GrpcStream"]:
        if self._channel_credentials is None:
            channel = grpc.aio.insecure_channel(address, options=[*CLIENT_OPTIONS, *_LIMITS])
        else:
            channel = grpc.aio.secure_channel(address, self._channel_credentials, options=[*CLIENT_OPTIONS, *_LIMITS])
        try:
            method: Any = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
            yield _GrpcStream(method(wait_for_ready=True))
        finally:
            await channel.close()


class _GrpcStream:
    """Either end of a call: gRPC's many errors become one."""

    _broken = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)

    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self) -> bytes:
        try:
            data = await self._call.read()
        except self._broken as error:
            raise ConnectionError(str(error)) from None
        return b"" if data is _EOF else data

    async def write(self, data: bytes) -> None:
        try:
            await self._call.write(data)
        except self._broken as error:
            raise ConnectionError(str(error)) from None
