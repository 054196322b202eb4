"""Frames as bytes and back: any frame, in any slices; nothing is allocated before it is admitted."""

import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain import wire
from geotrain.base import ITEM_BYTES, ONCE, PROTOCOL_VERSION, Direction, Frame, FrameKey, TensorSpec
from geotrain.codecs.identity import from_raw, raw
from geotrain.errors import RemoteProtocolError
from geotrain.graph.serial import tensor_spec

GOLDEN = Path(__file__).parents[1] / "golden" / "wire"
KEY = FrameKey(3, 41, 2, "transformer.h.5", "F")
PREFIX_BYTES = 16
DIRECTIONS: tuple[Direction, ...] = ("F", "B", "E")
DTYPES = sorted(name for name in ITEM_BYTES if not name.startswith("float8"))  # no graph has those yet


def frame_of(tensor: torch.Tensor, key: FrameKey = KEY) -> Frame:
    payload = raw(tensor)
    return Frame(key, "identity", tensor_spec(tensor), list(payload))


def absent(key: FrameKey = KEY) -> Frame:
    return Frame(key, "identity", TensorSpec((), "float32"), [], absent=True)


def to_bytes(frame: Frame) -> bytes:
    return b"".join(bytes(part) for part in wire.encode(frame, "run"))


def tensor_of(frame: Frame) -> torch.Tensor:
    payload = frame.payload[0] if frame.payload else memoryview(b"")
    tensor = from_raw(payload, frame.spec, torch.device("cpu"))
    return tensor


def admit(header: wire.FrameHeader) -> None:
    if header.nbytes > 1 << 20:
        raise RemoteProtocolError("larger than any boundary")


def parse(data: bytes) -> list[Frame]:
    return wire.FrameParser(admit).feed(data)


def packb(fields: Any) -> bytes:
    return cast(bytes, msgpack.packb(fields))


def sealed(fields: Any, payload: bytes = b"") -> bytes:
    """A frame without fault but for what its header says."""
    packed = fields if isinstance(fields, bytes) else packb(fields)
    head = struct.pack("<2sBBIQ", b"GF", PROTOCOL_VERSION, 0, len(packed), len(payload)) + packed
    return head + payload + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + payload))


def header_with(**changes: Any) -> list[Any]:
    fields: dict[str, Any] = {
        "run": "run", "epoch": 1, "step": 2, "microbatch": 3, "value": "h", "direction": "F", "attempt": 0,
        "codec": "identity", "shape": [2], "dtype": "float32", "stride": None, "absent": False, "sent": 1.5,
    }  # fmt: skip
    return list((fields | changes).values())


def random_tensor(shape: list[int], dtype: str, order: list[int]) -> torch.Tensor:
    torch_dtype: torch.dtype = getattr(torch, dtype)
    numel = torch.Size(shape).numel()
    raw = torch.arange(numel * ITEM_BYTES[dtype]).to(torch.uint8)
    if dtype == "bool":
        raw &= 1
    return raw.view(torch_dtype).view(shape).permute(order)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = random_tensor(shape, draw(st.sampled_from(DTYPES)), draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()) and tensor.dim():
        tensor = tensor.unsqueeze(1).expand(tensor.shape[0], 3, *tensor.shape[1:])
    return tensor


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    count = st.integers(0, 2**40)
    key = FrameKey(
        draw(count), draw(count), draw(st.one_of(st.just(ONCE), count)), draw(st.text(max_size=60)),
        draw(st.sampled_from(DIRECTIONS)), draw(count),
    )  # fmt: skip
    return absent(key) if draw(st.integers(0, 5)) == 0 else frame_of(draw(tensors()), key)


@given(st.lists(frames(), min_size=1, max_size=4), st.data())
@settings(max_examples=300, deadline=None)
def test_any_frames_in_any_slices(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(to_bytes, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    parser, came = wire.FrameParser(admit), list[Frame]()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        came += parser.feed(stream[start:end])
    assert [(f.key, f.codec, f.spec, f.absent) for f in came] == [(f.key, f.codec, f.spec, f.absent) for f in sent]
    for ours, theirs in zip(came, sent, strict=True):
        assert b"".join(map(bytes, ours.payload)) == b"".join(map(bytes, theirs.payload))
        if not ours.absent:
            assert tensor_of(ours).stride() == (theirs.spec.stride or torch.empty(theirs.spec.shape).stride())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5).to(torch.bfloat16), torch.tensor(2.5), torch.empty(0, 4), torch.empty(4, 0).t(),
        torch.randn(4, 6).t(), torch.randn(4, 9)[:, 3:6], torch.randn(5, 1).expand(5, 7),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.tensor([True, False]), torch.randn(4)[1:3],
        torch.ones(()).expand(2, 3),
    ],
    ids=[
        "bf16", "0-d", "empty", "empty transposed", "transposed", "a slice of a fused projection", "expanded",
        "channels last", "bool", "offset", "gradient of a sum",
    ],
)  # fmt: skip
def test_tensors_keep_values_and_layout(tensor: torch.Tensor) -> None:
    (frame,) = parse(to_bytes(frame_of(tensor)))
    ours = tensor_of(frame)
    assert ours.dtype == tensor.dtype and torch.equal(ours, tensor)
    assert frame.spec == tensor_spec(tensor)
    assert ours.stride() == tensor.stride() or tensor.is_contiguous()


def test_the_sender_does_not_copy_the_payload() -> None:
    tensor = torch.arange(1000, dtype=torch.float32)
    _, payload, _ = wire.encode(frame_of(tensor), "run")
    tensor[0] = 7.0
    assert torch.frombuffer(payload, dtype=torch.float32)[0] == 7.0


def test_the_receiver_gets_a_buffer_of_its_own() -> None:
    """Writable, aligned, and not part of the chunk that it came in."""
    data = bytearray(to_bytes(frame_of(torch.ones(100))))
    (frame,) = wire.FrameParser(admit).feed(data)
    tensor = tensor_of(frame)
    data[:] = bytes(len(data))
    assert tensor.sum() == 100 and tensor.data_ptr() % 64 == 0
    assert tensor.untyped_storage().data_ptr() == torch.frombuffer(frame.payload[0], dtype=torch.uint8).data_ptr()
    tensor.zero_()


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=6), st.integers(1, 2000))
def test_pieces(sizes: list[int], most: int) -> None:
    buffers = [bytes([i]) * size for i, size in enumerate(sizes)]
    pieces = list(wire.pieces(buffers, most))
    assert b"".join(pieces) == b"".join(buffers)
    assert all(0 < len(piece) <= most for piece in pieces)
    assert len(pieces) == -(-sum(sizes) // most)


def test_nothing_is_allocated_before_it_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[wire.FrameHeader] = []

    def refuse(header: wire.FrameHeader) -> None:
        asked.append(header)
        raise RemoteProtocolError("not expected")

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(torch, "empty", fail)
    head = to_bytes(frame_of(torch.ones(2)))[:-16]
    huge = head[:8] + struct.pack("<Q", 1 << 50) + head[16:]
    parser = wire.FrameParser(refuse)
    with pytest.raises(RemoteProtocolError, match="not expected"):
        parser.feed(huge)
    assert asked == [wire.FrameHeader("run", KEY, "identity", TensorSpec((2,), "float32"), 1 << 50, False, 0.0)]
    with pytest.raises(RemoteProtocolError):  # the stream stays void
        parser.feed(to_bytes(absent()))


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 40, -9, -8, -1])
def test_a_truncated_frame_waits_and_a_continued_one_is_refused(cut: int) -> None:
    data = to_bytes(frame_of(torch.randn(64)))
    parser = wire.FrameParser(admit)
    assert parser.feed(data[:cut]) == []
    with pytest.raises(RemoteProtocolError):
        parser.feed(data * 5)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_damaged_byte_is_taken_for_a_frame(data: st.DataObject) -> None:
    good = to_bytes(frame_of(torch.arange(20, dtype=torch.float32)))
    at, bit = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 7))
    bad = bytearray(good)
    bad[at] ^= 1 << bit
    parser = wire.FrameParser(admit)
    try:
        assert parser.feed(bad) == []  # a larger size waits for more
    except RemoteProtocolError:
        return
    assert 4 <= at < PREFIX_BYTES


def test_swapped_and_repeated_bytes_are_refused() -> None:
    good = to_bytes(frame_of(torch.arange(200, dtype=torch.float32)))
    for bad in (good[:100] + good[200:300] + good[100:200] + good[300:], good[:300] + good[200:]):
        with pytest.raises(RemoteProtocolError):
            parse(bad + good)


def test_a_repeated_frame_comes_twice() -> None:
    """The receiver's keys tell; the wire does not remember."""
    data = to_bytes(frame_of(torch.ones(3)))
    assert [frame.key for frame in parse(data + data)] == [KEY, KEY]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (header_with(direction="X"), "names"), (header_with(value=b"h"), "msgpack"), (header_with(run=7), "names"),
        (header_with(value="x" * 513), "msgpack"), (header_with(codec=None), "names"), (header_with(epoch=-1), "range"),
        (header_with(microbatch=-2), "range"), (header_with(step=True), "range"), (header_with(attempt=2.0), "range"),
        (header_with(step=1 << 63), "range"), (header_with(dtype="float31"), "dtype"),
        (header_with(shape=[-1]), "shape"),
        (header_with(shape=[1 << 40, 1 << 40]), "elements"), (header_with(shape=[1] * 17), "msgpack"),
        (header_with(shape="22"), "shape"), (header_with(shape=[[2]]), "shape"), (header_with(stride=[1, 1]), "stride"),
        (header_with(stride=[-1]), "stride"), (header_with(stride=[1 << 40]), "layout"),
        (header_with(absent=1), "absent"), (header_with(sent=1), "time"), (header_with(sent=math.inf), "time"),
        (header_with(shape={}), "shape"), (header_with(shape={"a": 1}), "msgpack"), (header_with()[:-1], "thirteen"),
        ([*header_with(), None], "thirteen"), ({}, "thirteen"), (packb(header_with()) + b"\xc0", "msgpack"),
        (b"\x91" * 4000, "msgpack"), (b"\xd4\x01\x00", "msgpack"), (b"\xdd\xff\xff\xff\xff", "msgpack"),
    ],
)  # fmt: skip
def test_headers_that_no_sender_writes(fields: Any, says: str) -> None:
    payload = bytes(8)
    with pytest.raises(RemoteProtocolError, match=says):
        parse(sealed(fields, payload))


def test_an_absent_tensor_has_no_payload() -> None:
    assert parse(sealed(header_with(absent=True)))[0].absent
    with pytest.raises(RemoteProtocolError, match="absent"):
        parse(sealed(header_with(absent=True), bytes(8)))


@pytest.mark.parametrize(
    ("prefix", "says"),
    [
        (struct.pack("<2sBBIQ", b"GG", PROTOCOL_VERSION, 0, 30, 8), "not a frame"),
        (struct.pack("<2sBBIQ", b"GF", PROTOCOL_VERSION, 1, 30, 8), "not a frame"),
        (struct.pack("<2sBBIQ", b"GF", PROTOCOL_VERSION + 1, 0, 30, 8), "protocol"),
        (struct.pack("<2sBBIQ", b"GF", PROTOCOL_VERSION, 0, 4097, 8), "header"),
        (struct.pack("<2sBBIQ", b"GF", PROTOCOL_VERSION, 0, 0, 8), "header"),
        (b"POST / HTTP/1.1\r\n", "not a frame"),
    ],
)
def test_prefixes_that_no_sender_writes(prefix: bytes, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        parse(prefix)


def test_a_name_that_no_header_holds_is_the_senders_error() -> None:
    frame = absent(replace(KEY, value="ж" * 3000))
    with pytest.raises(ValueError, match="header"):
        wire.encode(frame, "run")


CASES = {
    "activation_float32": frame_of(torch.arange(6, dtype=torch.float32).view(2, 3)),
    "gradient_bfloat16_transposed": frame_of(
        torch.arange(6).to(torch.bfloat16).view(2, 3).t(), FrameKey(1, 0, 7, "h", "B", 2)
    ),
    "expanded": frame_of(torch.ones(2, 1).expand(2, 3), replace(KEY, direction="E")),
    "scalar_int64_once": frame_of(torch.tensor(-1), replace(KEY, microbatch=ONCE)),
    "empty": frame_of(torch.empty(0, 2)),
    "absent": absent(replace(KEY, direction="B")),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, update_golden: bool) -> None:
    """Whoever changes these bytes raises `PROTOCOL_VERSION`."""
    path, ours = GOLDEN / f"{name}.hex", to_bytes(CASES[name])
    if update_golden:
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(ours[i : i + 16].hex(" ") + "\n" for i in range(0, len(ours), 16)))
    golden = bytes.fromhex(path.read_text())
    assert ours == golden
    (frame,) = parse(golden)
    assert (frame.key, frame.spec, frame.absent) == (CASES[name].key, CASES[name].spec, CASES[name].absent)
    assert b"".join(map(bytes, frame.payload)) == b"".join(map(bytes, CASES[name].payload))


def test_golden_has_no_strays() -> None:
    assert sorted(path.stem for path in GOLDEN.iterdir()) == sorted(CASES)
