"""Tensors between the coordinator's disk and the stages: weights out, checkpoints and gradients in. I/O.

Nothing here holds more than a chunk. What may come in is known beforehand: a stage's own tensors, with the
shapes of its graph.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from .base import TensorSpec
from .checkpoint import CheckpointWriter
from .errors import CheckpointError, RemoteError, RemoteProtocolError
from .graph import OpGraph, StageGraph
from .manifest import OPTIMIZER
from .protocol import CHUNK_BYTES, NamedSpec, Store
from .weights import StreamingWriter, WeightStore


def plain(spec: TensorSpec) -> TensorSpec:
    """The spec as tensors are stored: row by row, whatever the layout in memory."""
    return TensorSpec(spec.shape, spec.dtype)


def state_spec_problem(stage: StageGraph, name: str, spec: TensorSpec) -> str | None:
    """Why a tensor cannot be part of a stage's state, or None: it is a parameter or buffer of its graph, or
    the optimizer's for a parameter that it trains: of that one's shape, or a number."""
    if name.startswith(OPTIMIZER):
        parameter = stage.parameters.get(name.removeprefix(OPTIMIZER).partition("/")[2])
        if parameter is None or not parameter.requires_grad:
            return "it is of no parameter that this stage trains"
        return None if spec.shape in ((), parameter.spec.shape) else "its shape is not its parameter's"
    entry = stage.parameters.get(name) or stage.buffers.get(name)
    if entry is None:
        return "the stage has no such tensor"
    return None if spec == plain(entry.spec) else "its shape or type is not the graph's"


class Base:
    """What no step changes of the weights that a run starts from: by name the SHA-256 of its bytes. It is in no
    checkpoint, and a peer that has it once need not fetch it again."""

    def __init__(self, graph: OpGraph, store: WeightStore | None) -> None:
        """Reads all of it."""
        self.store = store
        frozen = [n for n, p in graph.parameters.items() if not p.requires_grad]
        frozen += [n for n, b in graph.buffers.items() if not b.mutated]
        self.digests = {} if store is None else {n: store.digest(n) for n in frozen if n in store}


class Shelf:
    """What stages load from: a folder of weights, or a checkpoint, or nothing (`store` None); and the base beneath."""

    def __init__(self, store: WeightStore | None, ties: Mapping[str, str], base: Base | None = None) -> None:
        self._store = store
        self._base = base
        self._aliases: dict[str, list[str]] = {}
        for alias, name in ties.items():
            self._aliases.setdefault(name, []).append(alias)

    def given(self, stage: StageGraph) -> tuple[NamedSpec, ...]:
        """What of the base a stage needs."""
        digests = {} if self._base is None else self._base.digests
        entries = {**stage.parameters, **stage.buffers}
        return tuple(NamedSpec(n, plain(e.spec), digests[n]) for n, e in entries.items() if n in digests)

    def wanted(self, stage: StageGraph) -> tuple[NamedSpec, ...]:
        """What a stage should fetch, the base included; it makes the rest itself. Raises `CheckpointError` for what is
        neither here nor can be made, and for what does not fit."""
        entries = {**stage.parameters, **stage.buffers}
        wanted = list(self.given(stage))
        given = {tensor.name for tensor in wanted}
        for name, entry in entries.items():
            stored = self._stored(name)
            if name in given:
                continue
            if stored is not None:
                wanted.append(NamedSpec(name, self._spec(stored)))
            elif entry.init is None:
                raise CheckpointError(f"the weights lack {name!r}, and the model does not say how to make it")
        if self._store is not None:
            for name in self._store.names():
                if name.startswith(OPTIMIZER) and state_spec_problem(stage, name, self._spec(name)) is None:
                    wanted.append(NamedSpec(name, self._spec(name)))
        for tensor in wanted:
            problem = state_spec_problem(stage, tensor.name, tensor.spec)
            if problem is not None:
                raise CheckpointError(f"{tensor.name!r} does not fit this model: {problem}")
        return tuple(wanted)

    async def read(self, names: Sequence[str], skip: int = 0) -> AsyncIterator[tuple[str, bytes]]:
        """The tensors' bytes, one after the other, in chunks with their names, without the first `skip`."""
        for name in names:
            store, stored = self._store, self._stored(name)
            if self._base is not None and name in self._base.digests:
                store, stored = self._base.store, name
            if store is None or stored is None:
                raise RemoteError(f"there is no tensor {name!r}")
            total = store.spec(stored).nbytes
            first, skip = min(skip, total), max(0, skip - total)
            for offset in range(first, total, CHUNK_BYTES):
                size = min(CHUNK_BYTES, total - offset)
                yield name, await asyncio.to_thread(store.read, stored, offset, size)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _spec(self, stored: str) -> TensorSpec:
        assert self._store is not None
        return self._store.spec(stored)

    def _stored(self, name: str) -> str | None:
        if self._store is None:
            return None
        return next((n for n in (name, *self._aliases.get(name, ())) if n in self._store), None)


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
