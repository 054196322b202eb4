"""Sends model inputs to the stages that read them, a few steps ahead of the run. I/O."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from .base import Frame, FrameKey, TensorSpec
from .coding import input_frame
from .data import Source
from .errors import DataError, PeerLost
from .graph.serial import tensor_spec
from .runstate import Settings

STEPS_AHEAD = 2
"""Inputs are small; two steps hide the slowest link's latency and bound what a peer holds."""


class Feeder:
    """Feeds one epoch after another. `specs` are the model's inputs; `send(peer, frame)` waits for room on that link;
    `on_error` is told if the data fails."""

    def __init__(
        self,
        source: Source,
        specs: Mapping[str, TensorSpec],
        settings: Settings,
        microbatches: int,
        send: Callable[[str, Frame], Awaitable[object]],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._source = source
        self._specs = specs
        self._settings = settings
        self._microbatches = microbatches
        self._send = send
        self._on_error = on_error
        self._task: asyncio.Task[None] | None = None
        self._done = 0
        self._moved = asyncio.Event()

    def start(self, epoch: int, step: int, readers: Mapping[str, Sequence[str]]) -> None:
        """Feed `epoch` from step number `step` on; `readers` are the peers that read each input."""
        self.stop()
        self._done = step
        self._task = asyncio.create_task(self._feed(epoch, step, readers))

    def advance(self, done: int) -> None:
        """`done` steps are committed."""
        if done != self._done:
            self._done = done
            self._moved.set()

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _feed(self, epoch: int, first: int, readers: Mapping[str, Sequence[str]]) -> None:
        settings = self._settings
        try:
            for step in range(first, settings.steps + 1):
                while step >= self._done + STEPS_AHEAD:
                    self._moved.clear()
                    await self._moved.wait()
                if settings.evaluation_due(step):
                    for i in range(settings.evaluate_microbatches):
                        batch = await asyncio.to_thread(self._source.held_out, i)
                        await self.deliver(FrameKey(epoch, step, i, "", "E"), batch, readers)
                if step < settings.steps:
                    for i in range(self._microbatches):
                        batch = await asyncio.to_thread(self._source.train, step, i)
                        await self.deliver(FrameKey(epoch, step, i, "", "F"), batch, readers)
        except PeerLost:
            return  # the epoch is over, or will be when the peer or we notice
        except Exception as error:
            self._on_error(error)

    def _check(self, name: str, batch: Mapping[str, Tensor]) -> None:
        if name not in batch:
            raise DataError(f"a microbatch lacks the model's input {name!r}; it has {', '.join(batch)}")
        spec, wanted = tensor_spec(batch[name]), self._specs[name]
        if (spec.shape, spec.dtype) != (wanted.shape, wanted.dtype):
            ours, theirs = (f"{s.dtype}{list(s.shape)}" for s in (wanted, spec))
            raise DataError(f"input {name!r} is {theirs}, the model was captured with {ours}; shapes are static")

    async def deliver(self, key: FrameKey, batch: Mapping[str, Tensor], readers: Mapping[str, Sequence[str]]) -> None:
        frames = await asyncio.to_thread(self._frames, key, batch, tuple(readers))
        sends = [self._send(peer, frame) for name, frame in frames.items() for peer in readers[name]]
        await asyncio.gather(*sends)

    def _frames(self, key: FrameKey, batch: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Frame]:
        for name in names:
            self._check(name, batch)
        return {name: input_frame(replace(key, value=name), batch[name]) for name in names}
