"""Frozen weights from peer to peer: what is in one's cache, for those who have the run's token. I/O."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from . import protocol
from .cache import TensorCache
from .channel import EOF, connected
from .errors import GeotrainError, RemoteError
from .identity import Ticket, same_token
from .transports.direct import CLIENT_OPTIONS

_SERVICE = "geotrain.Tensors"
_METHOD = "Fetch"

_CONNECT_S = 5.0
"""A peer that cannot be reached by then, say behind NAT, is not asked: the coordinator has all."""

_SILENT_S = 10.0
"""So long may a peer send nothing."""


class SharingService:
    """Mount it on a peer's server with `add_to`."""

    def __init__(self, ticket: Ticket, cache: TensorCache) -> None:
        self._ticket, self._cache = ticket, cache

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {_METHOD: grpc.unary_stream_rpc_method_handler(self._fetch)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))

    async def _fetch(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            request = protocol.decode(data, protocol.FetchShared)
            if request.run != self._ticket.run or not same_token(request.token, self._ticket.token):
                raise RemoteError("the token is not of this run")
            skip = request.skip
            for digest in request.digests:
                chunks = self._cache.chunks(digest, skip)
                while chunk := await asyncio.to_thread(next, chunks, b""):
                    yield chunk
                skip = 0
        except GeotrainError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))


async def fetch_shared(
    address: str, ticket: Ticket, digests: Mapping[str, str], names: Sequence[str], skip: int
) -> AsyncIterator[bytes]:
    """The bytes of named tensors from the cache of the peer at `address`, in chunks, without the first `skip`. Raises
    `RemoteError` if it cannot be reached, falls silent, or does not have them."""
    wanted = tuple(digests[name] for name in names)
    request = protocol.FetchShared(ticket.run, ticket.token, wanted, skip)
    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        if not await connected(channel, _CONNECT_S):
            raise RemoteError(f"nobody answers at {address}")
        call: Any = channel.unary_stream(f"/{_SERVICE}/{_METHOD}")(protocol.encode(request))
        try:
            while (chunk := await asyncio.wait_for(call.read(), _SILENT_S)) is not EOF:
                yield chunk
        except (grpc.RpcError, TimeoutError, asyncio.InvalidStateError):
            raise RemoteError(f"{address} gives no weights") from None
