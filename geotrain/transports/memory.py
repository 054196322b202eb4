"""The in-memory twin: the same links, hellos and frames over queues, for tests. No sockets. I/O (asyncio)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..errors import UserError
from ..topology import Topology
from .base import OnFrame, OnLost
from .links import StreamTransport

_MESSAGES = 2
"""How many may be under way in one direction; the writer waits for room."""


class MemoryNetwork:
    """Where the transports of a test find each other by address."""

    def __init__(self) -> None:
        self.listening: dict[str, MemoryTransport] = {}


class MemoryTransport(StreamTransport):
    """A `Transport` among the members of `network`, all on one event loop."""

    def __init__(
        self,
        name: str,
        *,
        network: MemoryNetwork,
        run: str,
        token: bytes,
        on_frame: OnFrame,
        on_lost: OnLost,
        topology: Topology | None = None,
    ) -> None:
        super().__init__(name, run=run, token=token, on_frame=on_frame, on_lost=on_lost, topology=topology)
        self._network = network
        self._address = f"memory:{name}"
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        if self._address in self._network.listening:
            raise UserError(f"cannot listen on {self._address}: it is in use; choose another name")
        self._network.listening[self._address] = self
        return self._address

    async def close(self) -> None:
        self._network.listening.pop(self._address, None)
        await super().close()
        if self._serving:
            await asyncio.wait(self._serving)

    @asynccontextmanager
    async def connect(self, address: str) -> AsyncIterator["_Pipe"]:
        other = self._network.listening.get(address)
        if other is None:
            raise ConnectionError(f"nobody listens at {address}")
        there, back = _Queue(), _Queue()
        task = asyncio.create_task(other.serve(_Pipe(there, back)))
        try:
            yield _Pipe(back, there)
        finally:
            there.close()
            back.close()
            task.cancel()  # as gRPC does
            await asyncio.wait((task,))

    async def serve(self, pipe: "_Pipe") -> None:
        """A stream that another member opened."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            await self.accept(pipe)
        finally:
            pipe.close()


class _Queue:
    """One direction: a few messages, then an end."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()
        self._room = asyncio.Semaphore(_MESSAGES)
        self._closed = False

    async def put(self, data: bytes) -> None:
        await self._room.acquire()
        if self._closed:
            raise ConnectionError("the other side has ended the stream")
        self._messages.put_nowait(data)

    async def get(self) -> bytes:
        data = await self._messages.get()
        self._room.release()
        return data

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._messages.put_nowait(b"")
            self._room.release()


class _Pipe:
    """One end of a stream."""

    def __init__(self, incoming: _Queue, outgoing: _Queue) -> None:
        self._incoming, self._outgoing = incoming, outgoing

    async def read(self) -> bytes:
        return await self._incoming.get()

    async def write(self, data: bytes) -> None:
        await self._outgoing.put(data)

    def close(self) -> None:
        self._outgoing.close()
