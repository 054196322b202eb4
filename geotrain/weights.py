"""Weights on disk: safetensors read lazily by name and chunk, and written incrementally. I/O.

Files are parsed here and not by the safetensors library, because that holds a whole tensor at a time and
spends 40 bytes of memory per byte of a hostile header. Format: 8 bytes little-endian header length, a JSON
header of {name: {dtype, shape, data_offsets}}, then the tensors without gaps
(https://github.com/huggingface/safetensors#format).
"""

import contextlib
import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .base import ITEM_BYTES, TensorSpec
from .disk import disk_errors, hash_file, sync_folder, write_atomic
from .errors import CheckpointError, GeotrainError, RemoteProtocolError

HEADER_LIMIT = 8 << 20
"""Bytes. An entry takes 100 to 130 bytes, so this admits about 70,000 tensors in one file (DeepSeek-V3, with
its 58 layers of 256 experts, has 46,000), while the worst header of this size takes 0.2 GiB to parse."""

CHUNK = 4 << 20
"""Bytes read or written at once."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_CODES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "uint16": "U16", "uint32": "U32", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class SafetensorsFile:
    """One open file. Its header is checked entirely before anything is read: known dtypes, and tensors that
    cover the file exactly, without gaps or overlaps. Raises `CheckpointError` otherwise."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise CheckpointError(f"cannot open weights {path}: {error.strerror}") from None
        try:
            self.nbytes = os.fstat(self._fd).st_size
            self._base, self.specs, self._starts, self.metadata = self._parse()
        except BaseException:
            self.close()
            raise

    def _parse(self) -> tuple[int, dict[str, TensorSpec], dict[str, int], dict[str, str]]:
        prefix = os.pread(self._fd, 8, 0)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= length <= self.nbytes - 8:
            raise self._broken("it is cut short or is not a safetensors file")
        if length > HEADER_LIMIT:
            raise self._broken(f"its header has {length} bytes, more than {HEADER_LIMIT}")
        try:
            header: Any = json.loads(os.pread(self._fd, length, 8))
        except (ValueError, RecursionError):
            raise self._broken("its header is not JSON") from None
        if not isinstance(header, dict):
            raise self._broken("its header is not a table of tensors")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self._broken("its metadata is not a table of strings")
        specs: dict[str, TensorSpec] = {}
        spans: list[tuple[int, int, str]] = []
        for name, entry in header.items():
            try:
                dtype, shape, (start, end) = (
                    _DTYPES[entry["dtype"]],
                    tuple(entry["shape"]),
                    entry["data_offsets"],
                )
                if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
                    raise ValueError
            except (KeyError, TypeError, ValueError):
                raise self._broken(f"the entry of tensor {name!r} is malformed") from None
            specs[name] = TensorSpec(shape, dtype)
            if end - start != specs[name].nbytes:
                raise self._broken(f"tensor {name!r} has the wrong number of bytes for its shape")
            spans.append((start, end, name))
        position = 0
        for start, end, name in sorted(spans):
            if start != position:
                raise self._broken(f"there is a gap or an overlap before tensor {name!r}")
            position = end
        if position != self.nbytes - 8 - length:
            raise self._broken("it is cut short, or has bytes that belong to no tensor")
        return 8 + length, specs, {name: start for start, _, name in spans}, metadata

    def _broken(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is broken: {reason}; fetch or write it again")

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the tensor's bytes from `offset` on. The caller has checked the range."""
        position = self._base + self._starts[name] + offset
        done = 0
        while done < len(buffer):
            data = os.pread(self._fd, min(CHUNK, len(buffer) - done), position + done)
            if not data:
                raise self._broken("it became shorter while it was read")
            buffer[done : done + len(data)] = data
            done += len(data)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class WeightStore:
    """Tensors by name in a safetensors file, a Hugging Face folder (single or sharded with an index), or a
    checkpoint folder. Only headers are read until bytes are asked for. Close it, or use it as a context."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.files: list[SafetensorsFile] = []
        self._file_of: dict[str, SafetensorsFile] = {}
        self._stored: dict[str, str] | None = None
        try:
            for shard in _shards(self.path):
                file = SafetensorsFile(shard)
                self.files.append(file)
                for name in file.specs:
                    if name in self._file_of:
                        raise CheckpointError(f"{self.path} has two tensors called {name!r}; delete the stale file")
                    self._file_of[name] = file
        except BaseException:
            self.close()
            raise

    def rename(self, stored: Mapping[str, str]) -> None:
        """From now on holds what `stored` names (new name: the name in the files), and nothing else."""
        self._stored = dict(stored)
        self._file_of = {name: self._file_of[there] for name, there in stored.items()}

    def reopen(self) -> "WeightStore":
        """Another store of the same tensors under the same names, to be closed by itself."""
        store = WeightStore(self.path)
        if self._stored is not None:
            store.rename(self._stored)
        return store

    def names(self) -> tuple[str, ...]:
        return tuple(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def spec(self, name: str) -> TensorSpec:
        """Raises `CheckpointError` if there is no such tensor."""
        return self._find(name).specs[self._there(name)]

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """`nbytes` of a tensor's little-endian row-major bytes from `offset` on; by default all the rest.

        Raises `CheckpointError` if there is no such tensor or it has no such bytes."""
        total = self.spec(name).nbytes
        count = total - offset if nbytes is None else nbytes
        if offset < 0 or count < 0 or offset + count > total:
            raise CheckpointError(f"tensor {name!r} has {total} bytes, not {offset} to {offset + count}")
        buffer = bytearray(count)
        self._find(name).read_into(self._there(name), offset, memoryview(buffer))
        return bytes(buffer)

    def chunks(self, name: str, size: int = CHUNK) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of a whole tensor in order; one empty chunk for a tensor without elements."""
        total = self.spec(name).nbytes
        for offset in range(0, max(total, 1), size):
            yield offset, self.read(name, offset, min(size, total - offset))

    def digest(self, name: str) -> str:
        """The SHA-256 of a tensor's bytes, in hex."""
        digest = hashlib.sha256()
        for _, chunk in self.chunks(name):
            digest.update(chunk)
        return digest.hexdigest()

    def read_into(self, name: str, memory: memoryview) -> None:
        """Fills `memory` with a whole tensor's bytes."""
        if len(memory):
            self._find(name).read_into(self._there(name), 0, memory)

    def load(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """A whole tensor, read straight into its memory."""
        spec = self.spec(name)
        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        self.read_into(name, tensor_memory(tensor))
        return tensor.to(device)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> "WeightStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _there(self, name: str) -> str:
        return name if self._stored is None else self._stored[name]

    def _find(self, name: str) -> SafetensorsFile:
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; is it of another model?")
        return file


def _shards(path: Path) -> list[Path]:
    """The safetensors files that `path` stands for."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"there are no weights at {path}; give a safetensors file or a folder of them")
    if (path / INDEX).is_file():
        try:
            files = sorted(set(json.loads((path / INDEX).read_bytes())["weight_map"].values()))
            plain = all(isinstance(f, str) and f == os.path.basename(f) for f in files)
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            plain, files = False, []
        if not plain or not files:
            raise CheckpointError(f"{path / INDEX} is not an index of shards; fetch it again")
        return [path / f for f in files]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise CheckpointError(f"there is no safetensors file in {path}")
    return found


def tensor_memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def tensor_chunks(tensor: torch.Tensor, size: int = CHUNK) -> Iterator[tuple[int, memoryview]]:
    """(offset, bytes) of a tensor in order, at most one copy of it made; one empty chunk if it is empty."""
    if tensor.numel() == 0:
        yield 0, memoryview(b"")
        return
    memory = tensor_memory(tensor.detach().to("cpu").contiguous())
    for offset in range(0, len(memory), size):
        yield offset, memory[offset : offset + size]


class StreamingWriter:
    """Writes a safetensors file in O(chunk) memory. Tensors come in any order, each one's chunks in order.

    The space is reserved at once, so a disk that is too small says so before anything is sent. Until `finish`
    the file has another name; `finish` makes it durable, then names it.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        """Raises `CheckpointError` for a dtype safetensors lacks, `LocalError` if the disk is too small."""
        self.path = path
        self.specs = dict(specs)
        self._partial = path.with_name(f".{path.name}.partial")
        header, self._starts = _header(self.specs, {"format": "pt", **(metadata or {})})
        self._base = len(header)
        self.nbytes = self._base + sum(spec.nbytes for spec in self.specs.values())
        self._written = dict.fromkeys(self.specs, 0)
        self._fd = -1
        try:
            with disk_errors(path, path.name):
                self._fd = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
                _reserve(self._fd, self.nbytes)
                self._pwrite(header, 0)
        except GeotrainError:
            self.abort()
            raise

    def write(self, name: str, offset: int, data: Any) -> None:
        """Takes the next chunk (bytes-like) of a tensor. Raises `RemoteProtocolError` if it is not that."""
        spec = self.specs.get(name)
        if spec is None:
            raise RemoteProtocolError(f"tensor {name!r} does not belong in {self.path.name}")
        view = memoryview(data).cast("B")
        if offset != self._written[name] or offset + len(view) > spec.nbytes:
            raise RemoteProtocolError(
                f"tensor {name!r}: bytes {offset} to {offset + len(view)} came where "
                f"{self._written[name]} to at most {spec.nbytes} were expected"
            )
        with disk_errors(self.path, self.path.name):
            self._pwrite(view, self._base + self._starts[name] + offset)
        self._written[name] += len(view)

    @property
    def missing(self) -> list[str]:
        """Tensors of which bytes are still to come."""
        return [name for name, spec in self.specs.items() if self._written[name] < spec.nbytes]

    def finish(self) -> str:
        """Makes the file durable and visible; returns its `hash_file`. Raises `CheckpointError` if bytes of a
        tensor are missing."""
        if self.missing:
            count = len(self.missing)
            raise CheckpointError(f"{self.path.name} lacks bytes of {count} tensors, the first {self.missing[0]!r}")
        with disk_errors(self.path, self.path.name):
            os.fsync(self._fd)
            digest = hash_file(self._partial)
            os.close(self._fd)
            self._fd = -1
            os.replace(self._partial, self.path)
            sync_folder(self.path.parent)
        return digest

    def abort(self) -> None:
        """Deletes what was written, unless it is finished."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(OSError):
            self._partial.unlink()

    def _pwrite(self, data: bytes | memoryview, position: int) -> None:
        view = memoryview(data)
        while len(view):
            count = os.pwrite(self._fd, view, position)
            view, position = view[count:], position + count


def _reserve(fd: int, nbytes: int) -> None:
    """Takes the space for a file, where the file system can."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except AttributeError:
        return
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file, and each tensor's start. Wide dtypes come first, so that all are aligned."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    position = 0
    for name, spec in sorted(specs.items(), key=lambda item: -ITEM_BYTES[item[1].dtype]):
        if spec.dtype not in _CODES:
            raise CheckpointError(f"tensor {name!r} is {spec.dtype}, which safetensors files cannot hold")
        starts[name] = position
        position += spec.nbytes
        offsets = [starts[name], position]
        table[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(f"{len(specs)} tensors are too many for one safetensors file; use more shards")
    return struct.pack("<Q", len(text)) + text, starts


def write_tensors(
    path: Path,
    specs: Mapping[str, TensorSpec],
    chunks: Callable[[str], Iterator[tuple[int, Any]]],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Writes one whole file from `chunks(name)`; returns its hash. What fails leaves nothing behind."""
    writer = StreamingWriter(path, specs, metadata)
    try:
        for name in specs:
            for offset, data in chunks(name):
                writer.write(name, offset, data)
        return writer.finish()
    finally:
        writer.abort()


def save_module(module: nn.Module, folder: str | os.PathLike[str], shard_bytes: int = 4 << 30) -> None:
    """A module's real parameters and persistent buffers as safetensors, tensor by tensor.

    Tied tensors are written once, under the first of their names; the file's metadata maps the other names to
    it, as `safetensors.torch.save_model` does. More than `shard_bytes` become several files with an index, as
    `save_pretrained` writes them. Raises `CheckpointError` for tensors on the meta device.
    """
    folder = Path(folder)
    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.device.type == "meta":
            raise CheckpointError(f"{name!r} is on the meta device and has no values to save")
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else (id(tensor),)
        if first.setdefault(same, name) != name:
            ties[name] = first[same]
        else:
            tensors[name] = tensor
    specs = {name: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
    shards = _split(specs, shard_bytes)
    with disk_errors(folder, "the weights"):
        folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file, shard, lambda name: tensor_chunks(tensors[name]), ties)
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(spec.nbytes for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_atomic(folder / INDEX, json.dumps(index, indent=2).encode())


def _split(specs: Mapping[str, TensorSpec], limit: int) -> list[dict[str, TensorSpec]]:
    """Consecutive groups of at most `limit` bytes each, unless one tensor alone is larger."""
    shards: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += spec.nbytes
    return shards
