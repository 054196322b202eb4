"""Frames as bytes and back: a fixed prefix, a msgpack header, the raw payload, a checksum. No sockets. Pure.

    prefix    magic `GF`, version u8, zero u8, header bytes u32, payload bytes u64 (little-endian, 16 bytes)
    header    msgpack list: run, epoch, step, microbatch, value, direction, attempt, codec, shape, dtype, stride,
              absent, sent (seconds on the sender's monotonic clock)
    payload   the codec's output; for the identity codec the elements of `spec.packed`
    checksum  xxh3_64 of all that precedes it (little-endian, 8 bytes)

Reading is strict. Nothing is allocated for a payload before `admit` has agreed to the header, and whatever is wrong
with the bytes raises `RemoteProtocolError`.
"""

import math
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import torch
import xxhash

from .base import ITEM_BYTES, MAX_GAPS, ONCE, PROTOCOL_VERSION, Frame, FrameKey, TensorSpec
from .errors import RemoteProtocolError

_msgpack: Any = msgpack  # it has no types

MAGIC = b"GF"
_PREFIX = struct.Struct("<2sBBIQ")
_CHECKSUM = struct.Struct("<Q")

MAX_HEADER_BYTES = 4096
"""Names of values are paths of modules; the longest seen has under 200 bytes."""

TIMED_BYTES = 32 << 10
"""Frames of at least so many bytes are timed on the link; shorter ones say more about the machines."""

_MAX_DIMS = 16
_MAX_NAME = 512
_MAX_ELEMENTS = 1 << 48
_MAX_COUNT = 1 << 62
_DIRECTIONS = ("F", "B", "E", "M")

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a frame says of itself: of the run `run`, `nbytes` bytes of payload follow."""

    run: str
    key: FrameKey
    codec: str
    spec: TensorSpec
    nbytes: int
    absent: bool
    sent_s: float


def encode(frame: Frame, run: str) -> list[Buffer]:
    """The frame as buffers to be sent one after the other; the payload is not copied.

    Raises `ValueError` if the names are too long for a header.
    """
    key, spec = frame.key, frame.spec
    fields = [
        run, key.epoch, key.step, key.microbatch, key.value, key.direction, key.attempt, frame.codec,
        spec.shape, spec.dtype, spec.stride, frame.absent, float(frame.sent_s),
    ]  # fmt: skip
    header = cast(bytes, _msgpack.packb(fields))
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"the header of {key.value[:60]!r} takes {len(header)} bytes, {MAX_HEADER_BYTES} at most")
    payload = [memoryview(part).cast("B") for part in frame.payload if memoryview(part).nbytes]
    head = _PREFIX.pack(MAGIC, PROTOCOL_VERSION, 0, len(header), sum(map(len, payload))) + header
    digest = xxhash.xxh3_64(head)
    for part in payload:
        digest.update(part)
    return [head, *payload, _CHECKSUM.pack(digest.intdigest())]


def pieces(buffers: Sequence[Buffer], most: int, *, header_ahead: bool = False) -> Iterator[bytes]:
    """Frames' buffers cut and joined to messages of nearly equal size, `most` bytes at most. Each byte is copied once.
    `header_ahead`: the first buffer goes ahead: between it and the end the receiver sees how fast the link is."""
    if header_ahead:
        yield bytes(buffers[0])
        buffers = buffers[1:]
    total = sum(map(len, buffers))
    size = -(-total // max(1, -(-total // most)))
    batch: list[memoryview] = []
    room = size
    for buffer in buffers:
        view = memoryview(buffer)
        while len(view):
            batch.append(view[:room])
            view, room = view[room:], room - len(batch[-1])
            if not room:
                yield b"".join(batch)
                batch, room = [], size
    if batch:
        yield b"".join(batch)


class FrameParser:
    """Bytes in, frames out. A frame's payload is one writable buffer of its own, aligned as torch aligns tensors.

    `admit` sees each header before anything is allocated for its payload; it returns, or raises `RemoteProtocolError`.
    After an error the stream is void: every later `feed` raises too.
    """

    def __init__(self, admit: Callable[[FrameHeader], None]) -> None:
        self._admit = admit
        self._frames: list[Frame] = []
        self._reading = self._read()
        self._target = next(self._reading)
        self._filled = 0

    def feed(self, chunk: Buffer) -> list[Frame]:
        """The frames that end in `chunk`; a chunk is any slice of the stream. Raises `RemoteProtocolError`."""
        view = memoryview(chunk)
        while True:
            part = view[: len(self._target) - self._filled]
            self._target[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled < len(self._target):
                break
            target = next(self._reading, None)
            if target is None:
                raise RemoteProtocolError("the stream went on after an error")
            self._target, self._filled = target, 0
        frames, self._frames = self._frames, []
        return frames

    def _read(self) -> Generator[memoryview, None, None]:
        """Yields each buffer to be filled next."""
        prefix, check = bytearray(_PREFIX.size), bytearray(_CHECKSUM.size)
        while True:
            yield memoryview(prefix)
            header_bytes, nbytes = _read_prefix(prefix)
            head = bytearray(header_bytes)
            yield memoryview(head)
            header = _read_header(head, nbytes)
            self._admit(header)
            payload = memoryview(b"")
            if nbytes:
                payload = memoryview(cast(Any, torch.empty(nbytes, dtype=torch.uint8).numpy()))
                yield payload
            yield memoryview(check)
            digest = xxhash.xxh3_64(prefix)
            digest.update(head)
            digest.update(payload)
            if digest.intdigest() != _CHECKSUM.unpack(check)[0]:
                raise RemoteProtocolError(f"{header.key.value!r} came damaged: its checksum differs")
            parts = [payload] if nbytes else []
            self._frames.append(Frame(header.key, header.codec, header.spec, parts, header.absent, header.sent_s))


def _read_prefix(prefix: bytearray) -> tuple[int, int]:
    magic, version, zero, header_bytes, nbytes = _PREFIX.unpack(prefix)
    if magic != MAGIC or zero:
        raise RemoteProtocolError("this is not a frame")
    if version != PROTOCOL_VERSION:
        raise RemoteProtocolError(f"a frame of protocol {version}; this side speaks {PROTOCOL_VERSION}")
    if not 0 < header_bytes <= MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"a frame header of {header_bytes} bytes; {MAX_HEADER_BYTES} at most")
    return header_bytes, nbytes


def _read_header(data: bytearray, nbytes: int) -> FrameHeader:
    try:
        fields: Any = _msgpack.unpackb(
            data, max_str_len=_MAX_NAME, max_array_len=_MAX_DIMS, max_map_len=0, max_bin_len=0, max_ext_len=0
        )
    except (ValueError, TypeError, OverflowError, _msgpack.UnpackException):
        raise RemoteProtocolError("a frame header is not msgpack of the kind that we write") from None
    if type(fields) is not list or len(cast(list[Any], fields)) != 13:
        raise RemoteProtocolError("a frame header has thirteen fields")
    run, epoch, step, microbatch, value, direction, attempt, codec, shape, dtype, stride, absent, sent_s = cast(
        list[Any], fields
    )
    if not all(type(name) is str for name in (run, value, direction, codec, dtype)) or direction not in _DIRECTIONS:
        raise RemoteProtocolError("a frame header's names are not names")
    if not (_is_count(epoch) and _is_count(step) and _is_count(microbatch, ONCE) and _is_count(attempt)):
        raise RemoteProtocolError("a frame header's numbers are out of range")
    if type(absent) is not bool or (absent and nbytes):
        raise RemoteProtocolError("an absent tensor has no payload")
    if type(sent_s) is not float or not math.isfinite(sent_s):
        raise RemoteProtocolError("a frame header's time is no time")
    key = FrameKey(epoch, step, microbatch, value, direction, attempt)
    return FrameHeader(run, key, codec, _read_spec(shape, dtype, stride), nbytes, absent, sent_s)


def _read_spec(shape: Any, dtype: str, stride: Any) -> TensorSpec:
    if dtype not in ITEM_BYTES or not _are_counts(shape):
        raise RemoteProtocolError("a frame header's shape or dtype is not a tensor's")
    if math.prod(shape) > _MAX_ELEMENTS:
        raise RemoteProtocolError(f"a tensor of {math.prod(shape)} elements")
    if stride is None:
        return TensorSpec(tuple(shape), dtype)
    if not _are_counts(stride) or len(stride) != len(shape) or 0 in shape:
        raise RemoteProtocolError("a frame header's stride does not fit its shape")
    spec = TensorSpec(tuple(shape), dtype, tuple(stride))
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if span > MAX_GAPS * spec.packed.numel:
        raise RemoteProtocolError(f"a layout of {span} elements for a tensor of {spec.packed.numel}")
    return spec


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < _MAX_COUNT


def _are_counts(values: Any) -> bool:
    return type(values) is list and all(_is_count(value) for value in cast(list[Any], values))
