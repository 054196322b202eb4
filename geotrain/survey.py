"""Measures the links between peers before there is anything to send over them. I/O.

Everybody sends a few test frames to everybody, one link after the other and each peer in another order, and the
receivers time them. A fast link gets a longer frame, since a short one says little about it.
"""

import asyncio
import time
from collections.abc import Mapping

import torch

from .base import Frame, FrameKey, LinkUse, TensorSpec
from .coding import raw_frame
from .errors import PeerLost, RemoteProtocolError
from .transports.base import Transport

SHORT_BYTES, LONG_BYTES = 64 << 10, 512 << 10

_SIZES = SHORT_BYTES, SHORT_BYTES, LONG_BYTES, LONG_BYTES, LONG_BYTES, 0
"""Of the frames to each peer, by number; the last says that there are no more. A receiver that was busy elsewhere sees
a frame's header and its end at once, so one of a size is not enough."""

_END = len(_SIZES) - 1

_FAST_S = 0.02
"""If the second short frame left within this much, long ones follow. The first one opens the connection."""

_LIMIT_S = 15.0

VALUE = "survey"
"""The name in all test frames."""


def frame_of(epoch: int, number: int, nbytes: int) -> Frame:
    """A test frame."""
    noise = torch.randint(256, (nbytes,), dtype=torch.uint8)  # nothing on the way can shorten it
    return raw_frame(FrameKey(epoch, 0, number, VALUE, "M"), noise)


def is_test(epoch: int, key: FrameKey, codec: str, spec: TensorSpec, nbytes: int) -> bool:
    """Whether a frame is one that `frame_of` makes, of any number, as far as its header tells."""
    right = (key.epoch, key.direction, key.value, codec, spec)
    return right == (epoch, "M", VALUE, "identity", TensorSpec((nbytes,), "uint8")) and nbytes <= LONG_BYTES


class Survey:
    """One peer's part. `run` gives what it saw of the links to it."""

    def __init__(self, transport: Transport, epoch: int, roster: Mapping[str, str]) -> None:
        self._transport, self.epoch, self._roster = transport, epoch, roster
        self._others = sorted(name for name in roster if name != transport.name)
        self._awaited = set(self._others)
        self._done = asyncio.Event()

    async def run(self) -> tuple[LinkUse, ...]:
        if not self._others:
            return ()
        self._transport.used()
        self._transport.set_roster(self.epoch, self._roster, self._check)
        at = sum(name < self._transport.name for name in self._others)
        try:
            async with asyncio.timeout(_LIMIT_S):
                for name in self._others[at:] + self._others[:at]:
                    await self._test(name)
                if self._awaited:
                    await self._done.wait()
        except TimeoutError:
            pass  # what came so far has to do
        return tuple(use for use in self._transport.used() if use.src in self._roster)

    def on_frame(self, src: str, frame: Frame) -> None:
        if frame.key.microbatch == _END:
            self.done_with(src)

    def done_with(self, name: str) -> None:
        """Nothing more comes from a peer: it has sent all, or is lost."""
        self._awaited.discard(name)
        if not self._awaited:
            self._done.set()

    async def _test(self, name: str) -> None:
        try:
            await self._send(name, 0)
            start_s = time.monotonic()
            await self._send(name, 1)
            if time.monotonic() - start_s < _FAST_S:
                for number in range(2, _END):
                    await self._send(name, number)
            await self._send(name, _END)
        except PeerLost:
            self.done_with(name)

    async def _send(self, name: str, number: int) -> None:
        await self._transport.send(name, frame_of(self.epoch, number, _SIZES[number]))

    def _check(self, src: str, key: FrameKey, codec: str, spec: TensorSpec, nbytes: int, absent: bool = False) -> None:
        right = 0 <= key.microbatch <= _END and nbytes == _SIZES[key.microbatch]
        if not right or not is_test(self.epoch, key, codec, spec, nbytes):
            raise RemoteProtocolError(f"{src} sends something else where a test frame belongs")
