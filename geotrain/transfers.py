"""Tensors from the coordinator's disk to the stages. I/O. Nothing here holds more than a chunk."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from .base import TensorSpec
from .errors import CheckpointError, RemoteError
from .graph import OpGraph, StageGraph
from .manifest import OPTIMIZER
from .protocol import CHUNK_BYTES, NamedSpec
from .weights import WeightStore


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
