"""100,000 broken frames: only `RemoteProtocolError` comes out, and memory stays flat."""

import gc
import random
import resource
import struct
import tracemalloc
from collections import Counter
from typing import cast

import msgpack
import torch
import xxhash

from geotrain import wire
from geotrain.base import PROTOCOL_VERSION, Frame, FrameKey, TensorSpec
from geotrain.codecs import CODECS
from geotrain.codecs.identity import from_raw, raw
from geotrain.errors import RemoteProtocolError
from geotrain.graph.serial import tensor_spec

FRAMES = 100_000
LIMIT_BYTES = 4096
"""The most that the plan of these tests lets any payload have."""

NASTY = [
    b"", b"\x00", b"\xff" * 8, b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff", b"\xc9\x7f\xff\xff\xff\x01", b"\x91" * 600, b"\x81" * 600, b"\xd4\x01\x00",
    b"\xcb\x7f\xf8" + b"\0" * 6,
    b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7, b"GF\x01\x00", b"\x9f" + b"\x80" * 15, b"\xa3\xff\xfe\xfd",
]  # fmt: skip
VALUES = [
    None, True, False, 0, -1, -2, 1, 3, 1 << 31, 1 << 62, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 0.5, float("nan"),
    float("inf"), "", "F", "B", "E", "x" * 600, "float32", "float128", "identity", "топ", b"", b"F", [], [0], [-1],
    [1 << 61, 1 << 61], [[[[]]]], [1] * 20, [True], ["a"], [None], [2.0], {}, {"a": 1}, {1: {2: {3: {}}}},
]  # fmt: skip


def admit(header: wire.FrameHeader) -> None:
    if header.nbytes > LIMIT_BYTES or header.codec not in CODECS:
        raise RemoteProtocolError("not expected")


def seeds() -> list[tuple[bytes, list[object], bytes]]:
    """Good frames: (all bytes, header fields, payload)."""
    tensors = [
        torch.arange(12, dtype=torch.float32).view(3, 4),
        torch.arange(12, dtype=torch.float32).view(3, 4).t(),
        torch.ones(4, 1).expand(4, 3),
        torch.randn(5, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
        torch.tensor(True),
        torch.empty(0, 3),
    ]
    frames = [Frame(FrameKey(1, 2, -1, "h", "B"), "identity", TensorSpec((), "float32"), [], absent=True)]
    for i, tensor in enumerate(tensors):
        payload = raw(tensor)
        frames.append(Frame(FrameKey(1, 2, i, f"layers.{i}", "F"), "identity", tensor_spec(tensor), list(payload)))
    found: list[tuple[bytes, list[object], bytes]] = []
    for frame in frames:
        head, *rest = wire.encode(frame, "run")
        payload = b"".join(bytes(part) for part in rest)[: frame.nbytes]
        fields = msgpack.unpackb(bytes(head)[16:], strict_map_key=False)
        found.append((bytes(head) + b"".join(bytes(part) for part in rest), fields, payload))
    return found


def flip(rng: random.Random, data: bytes) -> bytes:
    broken = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
    return bytes(broken)


def splice(rng: random.Random, data: bytes) -> bytes:
    at, to = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    match rng.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + data[to:]
        case 2:
            return data[:to] + data[at:]
        case _:
            return data[:at] + rng.choice(NASTY) + data[at:]


def numbers(rng: random.Random, data: bytes) -> bytes:
    """Other sizes in the prefix: the header's u32 and the payload's u64."""
    header_bytes = rng.choice((0, 1, 12, 4096, 4097, 1 << 20, (1 << 32) - 1))
    nbytes = rng.choice((0, 1, 48, LIMIT_BYTES, LIMIT_BYTES + 1, 1 << 40, (1 << 64) - 1))
    if rng.random() < 0.5:
        return data[:8] + nbytes.to_bytes(8, "little") + data[16:]
    return data[:4] + header_bytes.to_bytes(4, "little") + data[8:]


def fields(rng: random.Random, header: list[object], payload: bytes) -> bytes:
    """A header with other fields, else without fault: its sizes and its checksum are right."""
    broken = list(header)
    for _ in range(rng.choice((1, 1, 2))):
        broken[rng.randrange(len(broken))] = rng.choice(VALUES)
    match rng.randrange(12):
        case 0:
            broken.append(None)
        case 1:
            broken.pop()
    packed = cast(bytes, msgpack.packb(broken))
    if rng.random() < 0.1:
        packed = splice(rng, packed)
    return sealed(packed, payload)


def sealed(packed: bytes, payload: bytes) -> bytes:
    head = struct.pack("<2sBBIQ", b"GF", PROTOCOL_VERSION, 0, len(packed), len(payload)) + packed
    return head + payload + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + payload))


def broken_frame(rng: random.Random, good: list[tuple[bytes, list[object], bytes]]) -> bytes:
    data, header, payload = rng.choice(good)
    match rng.randrange(6):
        case 0 | 1:
            return flip(rng, data)
        case 2:
            return splice(rng, data)
        case 3:
            return numbers(rng, data)
        case _:
            return fields(rng, header, payload)


def feed(rng: random.Random, data: bytes) -> str:
    """What came of it: refused, taken or waiting for more."""
    parser = wire.FrameParser(admit)
    cut = rng.randrange(len(data) + 1)
    try:
        frames = parser.feed(data[:cut]) + parser.feed(data[cut:])
    except RemoteProtocolError:
        return "refused"
    for frame in frames:
        try:
            for part in frame.payload:
                from_raw(part, frame.spec, torch.device("cpu"))
        except RemoteProtocolError:
            return "refused"
    return "taken" if frames else "waiting"


def test_broken_frames() -> None:
    rng, good = random.Random(7), seeds()
    for data, _, _ in good:
        assert feed(rng, data) == "taken"
    outcomes = Counter(feed(rng, broken_frame(rng, good)) for _ in range(FRAMES // 2))
    resident_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes.update(feed(rng, broken_frame(rng, good)) for _ in range(FRAMES // 2))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident_kib < 4096
    assert outcomes["refused"] > FRAMES // 2
    assert outcomes["taken"] and outcomes["waiting"]  # some fields may be others; some bytes may still come


def test_broken_frames_leave_no_memory_behind() -> None:
    """To the byte, which is too slow for all of them: tracing costs ten times the parsing."""
    rng, good = random.Random(8), seeds()
    tracemalloc.start()
    try:
        held: list[int] = []
        for _ in range(3):
            for _ in range(2_000):
                feed(rng, broken_frame(rng, good))
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
        assert held[2] - held[1] < 16_384
        assert tracemalloc.get_traced_memory()[1] - held[0] < 1 << 20  # nothing because a header says so
    finally:
        tracemalloc.stop()
