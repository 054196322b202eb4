"""Principal axes, and the numbers that they are written as."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.base import TensorSpec
from geotrain.codecs import Message, fast, get_codec, numbers
from geotrain.errors import RemoteProtocolError
from tests import reference_codecs, reference_transform

GOLDEN = Path(__file__).parents[1] / "golden" / "codecs"
CPU = torch.device("cpu")
KEY = 0x0123456789ABCDEF


def cross(name: str, xs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[bytes]]:
    """What arrives of messages of one boundary, and what travelled."""
    codec, spec = get_codec(name), TensorSpec(tuple(xs[0].shape), "float32")
    sender, receiver, arrived, sent = codec.init(spec), codec.init(spec), [], []
    for i, x in enumerate(xs):
        payload, sender = codec.encode(x, sender, Message(KEY + i))
        sent.append(b"".join(payload))
        y, receiver = codec.decode(memoryview(bytearray(sent[-1])), spec, CPU, receiver, Message(KEY + i))
        arrived.append(y)
    return arrived, sent


def tokens(count: int, channels: int, seed: int = 0, turned: int = 0) -> torch.Tensor:
    """Activations of falling spectrum, along axes of their own; tokens of unequal size."""
    axes = torch.linalg.qr(torch.randn(channels, channels, generator=torch.Generator().manual_seed(turned))).Q
    random = torch.Generator().manual_seed(seed)
    spread = torch.randn(count, channels, generator=random) * 2.0 ** (-torch.arange(channels) / 6)
    return (spread @ axes.T) * torch.exp(0.5 * torch.randn(count, 1, generator=random)) * 3.0


def test_axes_are_sent_once_and_again_when_they_no_longer_fit() -> None:
    xs = [tokens(256, 64, seed=i) for i in range(3)] + [tokens(256, 64, seed=9, turned=1)]
    for name in ("tc-001", "tcu-001", "tcm-05"):
        arrived, sent = cross(name, xs)
        assert [data[1] for data in sent[:3]] == [1, 0, 0]
        assert len(sent[1]) < 0.8 * len(sent[0])
        if name == "tc-001":
            assert sent[3][1] == 1
        for x, y in zip(xs, arrived, strict=True):
            if name == "tcm-05":
                error = (y - x).square().sum() / x.square().sum()
            else:
                error = ((y - x).square().sum(1) / x.square().sum(1)).mean()
            assert 0.5 < error / get_codec(name).error < 1.3  # pyright: ignore[reportAttributeAccessIssue]


def test_fewer_bytes_than_without_turning_for_the_same_error() -> None:
    xs = [tokens(256, 64, seed=i) for i in range(2)]
    for name, other in (("tcu-005", "ec-005"), ("tcm-1", "ecm-1")):
        assert len(cross(name, xs)[1][1]) < 0.6 * len(cross(other, xs)[1][1])


def test_where_axes_do_not_pay_none_are_sent() -> None:
    """Few rows, and noise that has no axes: both as the simple codec would send them, each token at its own error."""
    noise = [torch.randn(256, 128, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    for name, x in (
        ("tcu-005", tokens(20, 64)),
        ("tcm-1", tokens(20, 64)),
        ("tcu-0025", noise[0]),
        ("tcu-001", tokens(20, 64)),
    ):
        codec = get_codec(name)
        simple = codec.simple  # pyright: ignore[reportAttributeAccessIssue]
        (y, *_), (data, *_) = cross(name, [x])
        assert data[:2] == b"\0\2"
        assert data[3:] == b"".join(bytes(part) for part in simple.encode(x, {}, Message(KEY))[0])[1:]
        read = reference_codecs.decode(simple.name, data[2:], tuple(x.shape), "float32", KEY)
        assert np.array_equal(y.numpy().reshape(-1), read)
        assert simple.unbiased and (y - x).square().sum() / x.square().sum() < 1.3 * codec.error  # pyright: ignore[reportAttributeAccessIssue]
    assert [data[1] for data in cross("tcu-005", noise)[1]] == [2, 2]


def test_what_came_in_unknown_axes_is_refused() -> None:
    codec, x = get_codec("tcm-1"), tokens(128, 64)
    spec = TensorSpec((128, 64), "float32")
    _, state = codec.encode(x, codec.init(spec), Message(1))
    payload, _ = codec.encode(x, state, Message(2))
    with pytest.raises(RemoteProtocolError, match="never sent"):
        codec.decode(memoryview(b"".join(payload)), spec, CPU, codec.init(spec), Message(2))


@given(
    st.integers(1, 5), st.sampled_from([1, 2, 40, 3000]), st.floats(0.01, 1e5), st.booleans(), st.integers(0, 50)
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_numbers_come_back_and_native_writes_the_same(
    rows: int, n: int, size: float, dithered: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    values = np.rint(random.laplace(size=(rows, n)) * size * 4.0 ** -np.arange(rows)[:, None]).astype(np.int32)
    values[0, 0] = random.choice([0, 2**28, -(2**28), 72, -72])
    bins = random.integers(0, 4, (rows, n)).astype(np.uint8) if dithered else None
    data = numbers.write(values, bins)
    back, used = numbers.read(memoryview(data + b"more"), rows, n, bins)
    assert np.array_equal(values, back) and used == len(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "_native", lambda name: None)
        assert numbers.write(values, bins) == data


def test_numbers_take_what_their_entropy_says() -> None:
    random = np.random.default_rng(0)
    for size in (0.3, 1.0, 3.0, 20.0):
        values = np.rint(random.normal(size=(4, 20000)) * size).astype(np.int32)
        share = np.unique(values, return_counts=True)[1] / values.size
        entropy = -(share * np.log2(share)).sum()
        assert 8 * len(numbers.write(values)) / values.size < 1.03 * entropy + 0.03


def golden_tensor() -> torch.Tensor:
    """(40, 48), made of integers: few axes, tokens of unequal size."""
    i, j = torch.arange(40)[:, None], torch.arange(48)[None]
    waves = sum(((i * (7 * k + 3) % 17) - 8) * ((j * (5 * k + 1) % 13) - 6) / 4.0**k for k in range(6))
    return torch.as_tensor(waves, dtype=torch.float32) * (1 + i % 5) + ((i * 31 + j * 17) % 11 - 5) / 8


@pytest.mark.parametrize("kind", ["tc-001", "tcu-005", "tcm-1"])
@pytest.mark.parametrize("native", [True, False])
def test_golden_payloads_are_read(
    kind: str, native: bool, update_golden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read, not written: eigenvectors differ between machines in their last bits."""
    if not native:
        monkeypatch.setattr(fast, "_native", lambda name: None)
    x, path, codec = golden_tensor(), GOLDEN / f"{kind}.hex", get_codec(kind)
    if update_golden:
        data = cross(kind, [x])[1][0].hex()
        path.write_text("\n".join(data[i : i + 120] for i in range(0, len(data), 120)) + "\n")
    data = bytes.fromhex(path.read_text())
    spec = TensorSpec((40, 48), "float32")
    expected = reference_transform.transform(data, (40, 48), kind.split("-")[0], KEY)
    y, _ = codec.decode(memoryview(bytearray(data)), spec, CPU, codec.init(spec), Message(KEY))
    assert np.square(y.numpy().reshape(-1) - expected).sum() < 1e-12 * np.square(expected).sum()
    assert (y - x).square().sum() / x.square().sum() < 2 * codec.error  # pyright: ignore[reportAttributeAccessIssue]


def test_autocast_changes_nothing() -> None:
    x = tokens(128, 64)
    with torch.autocast("cpu", torch.bfloat16):
        inside = cross("tcu-001", [x])
    outside = cross("tcu-001", [x])
    assert inside[1] == outside[1] and torch.equal(inside[0][0], outside[0][0])


@pytest.mark.parametrize("name", ["tcu-001", "tcu-0025", "tcu-01", "tcm-05", "tcm-4"])
def test_the_mean_over_keys_is_the_input_in_principal_axes_too(name: str) -> None:
    """A z-test for each element: no way of multiplying may be off the same way for all keys."""
    codec, x, keys = get_codec(name), tokens(128, 64), 400
    spec = TensorSpec((128, 64), "float32")
    state = codec.init(spec)
    errors = torch.empty(keys, *x.shape, dtype=torch.float64)
    for key in range(keys):
        payload, _ = codec.encode(x, state, Message(977 * key))
        data = memoryview(bytearray(b"".join(payload)))
        assert data[0] == 0 and data[1] == 1, "in axes of its own"
        y, _ = codec.decode(data, spec, CPU, state, Message(977 * key))
        errors[key] = y - x
    z = errors.mean(0) / errors.std(0) * keys**0.5
    assert z.abs().max() < 5.0  # of 8192 normal numbers; 5 has a chance of 0.005
    assert 0.8 < z.var() < 1.25
