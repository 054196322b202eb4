"""Tensors from the stages to the coordinator's disk: checkpoints and gradients. I/O.

Nothing here holds more than a chunk. What may come in is known beforehand: a stage's own tensors, with the shapes of
its graph.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from .base import TensorSpec
from .checkpoint import CheckpointWriter
from .errors import RemoteError, RemoteProtocolError
from .graph import StageGraph
from .protocol import Checkpoint, Gradients, Instruction, Store
from .transfers import state_spec_problem
from .weights import StreamingWriter


class Sink(Protocol):
    """Where uploads go: a `CheckpointWriter`, or a `GradientWriter`."""

    def write(self, stage: int, name: str, offset: int, data: bytes) -> None: ...
    def finish(self) -> Path: ...
    def abort(self) -> None: ...


class GradientWriter:
    """The gradients of one step, a file a stage."""

    def __init__(self, folder: Path, stages: Mapping[int, Mapping[str, TensorSpec]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._writers = {
            stage: StreamingWriter(folder / f"stage-{stage:03d}.safetensors", specs) for stage, specs in stages.items()
        }

    def write(self, stage: int, name: str, offset: int, data: bytes) -> None:
        self._writers[stage].write(name, offset, data)

    def finish(self) -> Path:
        for writer in self._writers.values():
            writer.finish()
        return self._folder

    def abort(self) -> None:
        for writer in self._writers.values():
            writer.abort()


Specs = Mapping[int, Mapping[str, TensorSpec]]


class Upload:
    """One checkpoint, or one step's gradients, on its way in from all stages.

    What each will send must be known before the first byte is written, so stages wait for each other's
    headers, and for the upload `before` this one to be over. `over` is set when nothing of it is open any
    more.
    """

    def __init__(
        self, stages: Sequence[StageGraph], open_sink: Callable[[Specs], Sink], before: "Upload | None" = None
    ) -> None:
        self.over = asyncio.Event()
        self._before = before
        self._stages = stages
        self._open_sink = open_sink
        self._specs: dict[int, dict[str, TensorSpec]] = {}
        self._sink: asyncio.Future[Sink] = asyncio.get_running_loop().create_future()

    async def receive(self, header: Store, chunks: AsyncIterator[bytes]) -> None:
        """Take one stage's part. Raises `RemoteError` if it is not that, `LocalError` if the disk refuses."""
        self._admit(header)
        if len(self._specs) == len(self._stages):
            await self._open()
        sink = await asyncio.shield(self._sink)
        specs = list(self._specs[header.stage].items())
        at, offset = 0, 0
        async for chunk in chunks:
            view = memoryview(chunk)
            while len(view):
                while at < len(specs) and offset == specs[at][1].nbytes:
                    at, offset = at + 1, 0
                if at == len(specs):
                    raise RemoteProtocolError("an upload is longer than it said")
                name, spec = specs[at]
                part, view = view[: spec.nbytes - offset], view[spec.nbytes - offset :]
                await asyncio.to_thread(sink.write, header.stage, name, offset, bytes(part))
                offset += len(part)

    async def _open(self) -> None:
        if self._before is not None:
            await self._before.over.wait()
            self._before = None
        try:
            sink = await asyncio.to_thread(self._open_sink, self._specs)
        except Exception as error:
            if not self._sink.done():
                self._sink.set_exception(error)
            return
        if self._sink.done():  # aborted meanwhile
            sink.abort()
        else:
            self._sink.set_result(sink)

    def _admit(self, header: Store) -> None:
        if not 0 <= header.stage < len(self._stages) or header.stage in self._specs:
            raise RemoteProtocolError(f"an upload of stage {header.stage} is not expected")
        stage = self._stages[header.stage]
        for tensor in header.tensors:
            problem = state_spec_problem(stage, tensor.name, tensor.spec)
            if problem is not None:
                raise RemoteProtocolError(f"an upload of {tensor.name!r}: {problem}")
        self._specs[header.stage] = {tensor.name: tensor.spec for tensor in header.tensors}

    async def finish(self) -> Path:
        """Complete it on disk. Raises `CheckpointError` if bytes are missing, `LocalError` if the disk
        refuses."""
        try:
            return await asyncio.to_thread((await self._sink).finish)
        finally:
            self.over.set()

    def abort(self) -> None:
        """Delete what came; stages that still send are refused."""
        if not self._sink.done():
            self._sink.set_exception(RemoteError("the upload is no longer wanted"))
            self._sink.exception()  # it may be that nobody waits for it
        elif self._sink.exception() is None:
            self._sink.result().abort()
        self.over.set()


class Uploads:
    """All that the stages of a run send to be kept: checkpoints, and gradients where these are wanted.

    Args:
        facts: of each checkpoint's manifest, but for its step.
    """

    def __init__(self, run_dir: Path, gradients_dir: Path, ties: Mapping[str, str], **facts: object) -> None:
        self._run_dir, self._gradients_dir, self._ties, self._facts = run_dir, gradients_dir, ties, facts
        self._open: dict[tuple[int, bool], Upload] = {}
        self._last: Upload | None = None

    def expect(self, stages: Sequence[StageGraph], instructions: Sequence[Instruction]) -> None:
        """What these instructions make the stages send."""
        for instruction in instructions:
            if isinstance(instruction, Checkpoint):
                sink = checkpoint_sink(self._run_dir, stages, self._ties, step=instruction.step, **self._facts)
                self._open[instruction.step, False] = self._last = Upload(stages, sink, before=self._last)
            if isinstance(instruction, Gradients):
                sink = partial(GradientWriter, self._gradients_dir)
                self._open[instruction.step, True] = Upload(stages, sink)

    async def receive(self, header: Store, chunks: AsyncIterator[bytes]) -> None:
        """Raises `RemoteError` if nothing of the kind is expected."""
        upload = self._open.get((header.step, header.gradients))
        if upload is None:
            raise RemoteError(f"no upload at step {header.step} is expected")
        await upload.receive(header, chunks)

    async def finish(self, step: int) -> Path:
        """Complete the checkpoint after `step` steps, and the gradients of its last one if they came; its folder."""
        gradients = self._open.pop((step - 1, True), None)
        if gradients is not None:
            await gradients.finish()
        return await self._open.pop((step, False)).finish()

    def abort(self) -> None:
        """Nothing that is on its way is wanted any more."""
        for upload in self._open.values():
            upload.abort()
        self._open.clear()


def checkpoint_sink(
    run_dir: Path, stages: Sequence[StageGraph], ties: Mapping[str, str], **facts: object
) -> Callable[[Specs], Sink]:
    """Opens the checkpoint writer; `facts` are those of its manifest."""
    transient = tuple(
        sorted({name for stage in stages for name, buffer in stage.buffers.items() if not buffer.persistent})
    )

    def open_sink(specs: Specs) -> Sink:
        sent = {name for tensors in specs.values() for name in tensors}
        kept = tuple(name for name in transient if name in sent)
        tied = {alias: name for alias, name in ties.items() if name in sent}
        return CheckpointWriter(run_dir, specs, transient=kept, ties=tied, **facts)  # pyright: ignore[reportArgumentType]

    return open_sink
