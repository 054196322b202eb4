"""Tensors that a peer has fetched, kept by content hash: what never changes crosses a link once. I/O.

A file is named after the SHA-256 of its bytes. What was cut off goes on where it ended. The cache is a convenience:
where the disk refuses, tensors are fetched again.
"""

import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from .errors import RemoteError, RemoteProtocolError
from .weights import tensor_memory

Fetch = Callable[[Sequence[str], int], AsyncIterator[bytes]]
"""Gives the bytes of named tensors, one after the other, without the first so many bytes."""


class TensorCache:
    """A folder that several peers of a machine may share. `owner` tells their unfinished files apart."""

    def __init__(self, folder: str | os.PathLike[str], owner: str) -> None:
        self._folder = Path(folder).expanduser() / "tensors"
        self._owner = owner

    def read(self, digest: str, memory: memoryview) -> bool:
        """Fills `memory` with the tensor, if it is here and whole."""
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

    def append(self, digest: str, data: memoryview) -> None:
        """The next bytes of a tensor."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._unfinished(digest), "ab") as file:
                file.write(data)

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

    def _unfinished(self, digest: str) -> Path:
        return self._folder / f"{digest}.{self._owner}.partial"


async def fetch_tensors(
    fetch: Fetch, into: Mapping[str, Tensor], digests: Mapping[str, str], cache: TensorCache
) -> int:
    """Fills tensors: from the cache those that have a digest and are there, the others from afar. Returns the bytes
    that came. Raises `RemoteError` if others came than were asked for."""
    memories = {name: tensor_memory(tensor) for name, tensor in into.items() if tensor.numel()}
    left = [n for n, m in memories.items() if n not in digests or not cache.read(digests[n], m)]
    skip = 0
    for name in left:
        if name in digests and (skip := cache.begun(digests[name], memories[name])):
            left.remove(name)
            left.insert(0, name)
            break
    if not left:
        return 0
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
                cache.append(digest, part)
            view, offset = view[len(part) :], offset + len(part)
            if offset == len(memory):
                if digest is not None:
                    cache.finish(digest, memory)
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
