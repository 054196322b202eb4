"""Tensors that a peer has fetched, kept by content hash: what never changes crosses a link once. I/O.

A file is named after the SHA-256 of its bytes. What was cut off goes on where it ended. The cache is a convenience:
where the disk refuses, tensors are fetched again.
"""

import asyncio
import contextlib
import hashlib
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from .errors import RemoteError, RemoteProtocolError
from .protocol import CHUNK_BYTES
from .weights import WeightStore, tensor_memory

_DIGEST = re.compile("[0-9a-f]{64}")

Fetch = Callable[[Sequence[str], int], AsyncIterator[bytes]]
"""Gives the bytes of named tensors, one after the other, without the first so many bytes."""


class LocalWeights:
    """The tensors of a folder or file of weights, found by content. Only those are hashed whose size is asked for."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises `CheckpointError` if there are none."""
        self._store = WeightStore(Path(path).expanduser())
        self._unknown: dict[int, list[str]] = {}
        for name in self._store.names():
            self._unknown.setdefault(self._store.spec(name).nbytes, []).append(name)
        self._names: dict[str, str] = {}

    def read(self, digest: str, memory: memoryview) -> bool:
        """Fills `memory` with the tensor, if it is here."""
        for name in self._unknown.pop(len(memory), ()):
            self._names[self._store.digest(name)] = name
        if digest not in self._names:
            return False
        self._store.read_into(self._names[digest], memory)
        return hashlib.sha256(memory).hexdigest() == digest


class TensorCache:
    """A folder that several peers of a machine may share. `owner` tells their unfinished files apart. What is in the
    `local` weights is read there."""

    def __init__(self, folder: str | os.PathLike[str], owner: str, local: LocalWeights | None = None) -> None:
        self._folder = Path(folder).expanduser() / "tensors"
        self._owner, self._local = owner, local

    def read(self, digest: str, memory: memoryview) -> bool:
        """Fills `memory` with the tensor, if it is here and whole."""
        if self._local is not None and self._local.read(digest, memory):
            return True
        path = self._folder / digest
        if _read_into(path, memory) < len(memory):
            return False
        if hashlib.sha256(memory).hexdigest() == digest:
            return True
        with contextlib.suppress(OSError):
            path.unlink()
        return False

    def begun(self, digest: str, memory: memoryview) -> int:
        """Fills the beginning of `memory` with what came of a tensor before; returns how many bytes."""
        return _read_into(self._unfinished(digest), memory)

    def write(self, digest: str, offset: int, data: memoryview) -> None:
        """Bytes of a tensor that has not come whole yet."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            file = os.open(self._unfinished(digest), os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(file, data, offset)
            finally:
                os.close(file)

    def finish(self, digest: str, memory: memoryview) -> None:
        """All of a tensor has come. Raises `RemoteProtocolError` if it is not the one that was asked for."""
        unfinished = self._unfinished(digest)
        whole = hashlib.sha256(memory).hexdigest() == digest
        with contextlib.suppress(OSError):
            if whole and unfinished.stat().st_size == len(memory):
                os.replace(unfinished, self._folder / digest)
            else:
                unfinished.unlink()
        if not whole:
            raise RemoteProtocolError("weights came that are not those of the plan: their hash differs")

    def chunks(self, digest: str, skip: int) -> Iterator[bytes]:
        """A whole tensor's bytes, in chunks, without the first `skip`. Raises `RemoteError` if it is not here."""
        if not _DIGEST.fullmatch(digest):
            raise RemoteError("that is not a digest")
        try:
            with open(self._folder / digest, "rb") as file:
                file.seek(skip)
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk
        except OSError:
            raise RemoteError("it is not in the cache") from None

    def _unfinished(self, digest: str) -> Path:
        return self._folder / f"{digest}.{self._owner}.partial"


async def fetch_tensors(fetch: Fetch, into: dict[str, Tensor], digests: Mapping[str, str], cache: TensorCache) -> int:
    """Fills tensors: from the cache those that have a digest and are there, the others from afar. Those that are full
    leave `into`. Returns the bytes that came. Raises `RemoteError` if others came than were asked for."""
    memories = {name: tensor_memory(tensor) for name, tensor in into.items() if tensor.numel()}
    left: list[str] = []
    for name, memory in memories.items():
        if name not in digests or not await asyncio.to_thread(cache.read, digests[name], memory):
            left.append(name)
    for name in into.keys() - left:
        del into[name]
    if not left:
        return 0
    begun = {name: cache.begun(digests[name], memories[name]) for name in left if name in digests}
    begun = {name: count for name, count in begun.items() if 0 < count < len(memories[name])}
    left.sort(key=lambda name: name not in begun)  # the first of them goes on, others begin again
    skip = begun.get(left[0], 0)
    at, offset, came = 0, skip, 0
    async for chunk in fetch(left, skip):
        came += len(chunk)
        view = memoryview(chunk)
        while len(view):
            if at == len(left):
                raise RemoteProtocolError("more weights came than were asked for")
            memory, digest = memories[left[at]], digests.get(left[at])
            part = view[: len(memory) - offset]
            memory[offset : offset + len(part)] = part
            if digest is not None:
                cache.write(digest, offset, part)
            view, offset = view[len(part) :], offset + len(part)
            if offset == len(memory):
                if digest is not None:
                    await asyncio.to_thread(cache.finish, digest, memory)
                del into[left[at]]
                at, offset = at + 1, 0
    if at < len(left):
        raise RemoteError("fewer weights came than were asked for")
    return came


def _read_into(path: Path, memory: memoryview) -> int:
    """How many bytes of a file, at most as many as it fills, are now in `memory`."""
    done = 0
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        while done < len(memory) and (count := file.readinto(memory[done:])):
            done += count
    return done
