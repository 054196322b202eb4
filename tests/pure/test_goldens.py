"""Golden payloads of the codecs whose payloads another test does not keep, read by NumPy alone too."""

from pathlib import Path

import numpy as np
import pytest
import torch

from geotrain.base import TensorSpec
from geotrain.codecs import CODECS, Message, fast, get_codec
from tests import reference_codecs, reference_transform

GOLDEN = Path(__file__).parents[1] / "golden" / "codecs"
KEY = 0x0123456789ABCDEF
SHAPE = (21, 72)


def tensor(shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """Made of integers, so that any machine makes the same: a few channels are large, a row is tiny, one is zero."""
    n = torch.arange(int(np.prod(shape)), dtype=torch.int64)
    x = (((n * 2654435761) % 4093 - 2046).float() / 512 * (1 + (n % shape[-1] == 5) * 40)).view(shape)
    x.view(-1, shape[-1])[4] *= 2.0**-20
    x.view(-1, shape[-1])[7] = 0
    return x


def embedding() -> torch.Tensor:
    """Only every sixth row is used."""
    return tensor((90, 72)) * (torch.arange(90) % 6 == 1)[:, None]


def tokens() -> torch.Tensor:
    return ((torch.arange(500) * 2654435761) % 49152).view(5, 100)


def truths() -> torch.Tensor:
    return torch.arange(700) % 37 == 3


def sent(name: str, xs: list[torch.Tensor]) -> bytes:
    """By one sender, one after the other, the length of each before it."""
    codec, data = get_codec(name), b""
    state = codec.init(TensorSpec(tuple(xs[0].shape), str(xs[0].dtype).removeprefix("torch.")))
    for x in xs:
        payload, state = codec.encode(x, state, Message(KEY, tuple(range(len(x)))))
        joined = b"".join(payload)
        data += len(joined).to_bytes(4, "little") + joined
    return data


def parts(data: bytes) -> list[bytes]:
    found = []
    while data:
        size = 4 + int.from_bytes(data[:4], "little")
        found.append(data[4:size])
        data = data[size:]
    return found


def received(name: str, payloads: list[bytes], xs: list[torch.Tensor]) -> list[np.ndarray]:
    codec, found = get_codec(name), []
    spec = TensorSpec(tuple(xs[0].shape), str(xs[0].dtype).removeprefix("torch."))
    state = codec.init(spec)
    for data, x in zip(payloads, xs, strict=True):
        message = Message(KEY, tuple(range(len(x))))
        y, state = codec.decode(memoryview(bytearray(data)), spec, torch.device("cpu"), state, message)
        found.append(y.numpy().reshape(-1))
    return found


def in_numpy(name: str, payloads: list[bytes], xs: list[torch.Tensor]) -> list[np.ndarray]:
    kind, shape = name.split("-")[0], tuple(xs[0].shape)
    if kind == "delta2":
        first = reference_transform.delta(payloads[0], shape, None, KEY)
        kept = torch.as_tensor(first).bfloat16().float().numpy()
        return [first, reference_transform.delta(payloads[1], shape, kept, KEY)]
    read = {
        "identity": lambda data: np.frombuffer(data, "<f4"),
        "ch": lambda data: reference_transform.channels(data, shape, float("0." + name[3:]), KEY),
        "rows": lambda data: reference_transform.rows(data, shape, name[5:], KEY),
        "pack": lambda data: reference_transform.pack(data, shape, str(xs[0].numpy().dtype)),
        "sync4": lambda data: reference_codecs.decode("ec-005", data, shape, "float32", KEY),
        "sync2": lambda data: reference_codecs.decode("ec-1", data, shape, "float32", KEY),
    }.get(kind, lambda data: reference_transform.topk(data, xs[0].numel(), kind))
    return [read(data) for data in payloads]


GOLDENS = {
    "identity": [tensor()],
    "ch-001": [tensor()], "ch-004": [tensor()], "ch-01": [tensor()],
    "delta2": [tensor((4, 8, 72)), tensor((4, 8, 72)) * 1.125],
    "rows-bf16": [embedding()], "rows-int8": [embedding()],
    "topk-1": [tensor()], "topk-10": [tensor()], "topkb-10": [tensor()], "topke-10": [tensor(), tensor()],
    "adatopk-1": [tensor()], "adatopk-5": [tensor()], "adatopk-10": [tensor()],
    "sync4": [tensor(), tensor()], "sync2": [tensor(), tensor()],
    "pack": [embedding()], "pack.tokens": [tokens()],
}  # fmt: skip
"""By file, with the codec's name before a dot."""

SUMMED = ("ch-001", "ch-004", "ch-01", "delta2")
"""Sizes that are means of many numbers, which machines round in their own way: these are read, and not written."""


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("file", GOLDENS)
def test_golden_payloads(file: str, native: bool, update_golden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout may not change by accident, and NumPy is enough to read it."""
    if not native:
        monkeypatch.setattr(fast, "_native", lambda name: None)
    name, xs, path = file.partition(".")[0], GOLDENS[file], GOLDEN / f"{file}.hex"
    written = sent(name, xs)
    if update_golden:
        path.write_text("\n".join(written.hex()[i : i + 120] for i in range(0, 2 * len(written), 120)) + "\n")
    data = bytes.fromhex(path.read_text())
    if file not in SUMMED:
        assert written == data
    arrived = received(name, parts(data), xs)
    for y, expected in zip(arrived, in_numpy(name, parts(data), xs), strict=True):
        np.testing.assert_allclose(y, expected, rtol=2e-6, atol=1e-6 * np.abs(expected).max())
    if get_codec(name).lossless:
        assert all(np.array_equal(y, x.numpy().reshape(-1)) for y, x in zip(arrived, xs, strict=True))


def test_every_kind_of_codec_has_a_golden_payload() -> None:
    """Codecs of one kind share a layout: those of principal axes have three."""
    kept = {path.name.partition(".")[0] for path in GOLDEN.glob("*.hex")}
    assert {name for name in CODECS if name not in kept} <= {name for name in CODECS if name.startswith("tc")}
    assert {name.partition("-")[0] for name in CODECS} == {name.partition("-")[0] for name in kept}


@pytest.mark.parametrize("name", ["ch-001", "ch-004", "ch-01"])
def test_sized_channels_meet_their_error(name: str) -> None:
    """Of each element, of the square of its channel's usual size in its row: 16 rows and channels are 30 times the
    others, and the rest comes as exact as without them."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(256, 96, generator=random)
    x[:16] *= 30.0
    x[:, :16] *= 30.0
    codec, spec = get_codec(name), TensorSpec((256, 96), "float32")
    payload, state = codec.encode(x, codec.init(spec), Message(KEY))
    y, _ = codec.decode(memoryview(bytearray(b"".join(payload))), spec, torch.device("cpu"), state, Message(KEY))
    error = float("0." + name[3:])
    for rows in (slice(0, 16), slice(16, None)):
        for channels in (slice(0, 16), slice(16, None)):
            part, off = x[rows, channels], (y - x)[rows, channels]
            assert off.square().mean() / part.square().mean() == pytest.approx(error, rel=0.5)
