"""What leaves elements out: top-k, places, zeros, whole numbers; and what remembers: changes of samples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.base import TensorSpec
from geotrain.codecs import Message, State, get_codec, indices
from geotrain.errors import RemoteProtocolError
from geotrain.graph.serial import tensor_spec
from tests import reference_transform

CPU = torch.device("cpu")


def send(name: str, x: torch.Tensor, state: State | None = None, rows: tuple[int, ...] = ()) -> tuple[bytes, State]:
    codec = get_codec(name)
    payload, after = codec.encode(x, codec.init(tensor_spec(x)) if state is None else state, Message(5, rows))
    return b"".join(map(bytes, payload)), after


def receive(
    name: str, data: bytes, x: torch.Tensor, state: State | None = None, rows: tuple[int, ...] = ()
) -> tuple[torch.Tensor, State]:
    codec, spec = get_codec(name), tensor_spec(x)
    before = codec.init(spec) if state is None else state
    return codec.decode(memoryview(bytearray(data)), spec, CPU, before, Message(5, rows))


@given(st.sets(st.integers(0, 5000), max_size=300), st.sampled_from([1, 30]))
@settings(max_examples=60, deadline=None)
def test_places_come_back(where: set[int], spread: int) -> None:
    places = np.array(sorted(p * spread for p in where), np.int64)
    data = indices.write(places)
    back, used = indices.read(memoryview(data + b"?"), 5000 * spread + 1, len(places))
    assert np.array_equal(places, back) and used == len(data)
    assert reference_transform.places(data) == (places.tolist(), b"")
    if len(places):
        with pytest.raises(RemoteProtocolError):
            indices.read(memoryview(data), int(places[-1]), len(places))
        with pytest.raises(RemoteProtocolError):
            indices.read(memoryview(data), 5000 * spread + 1, len(places) - 1)


def test_places_take_few_bits() -> None:
    """Near the entropy at any density: log2 of how many choices there are."""
    random = np.random.default_rng(0)
    for density, most in ((0.5, 1.05), (0.1, 1.06), (0.01, 1.06), (0.001, 1.06)):
        places = np.flatnonzero(random.random(200_000) < density)
        entropy = -200_000 * (density * np.log2(density) + (1 - density) * np.log2(1 - density))
        assert 8 * len(indices.write(places)) < most * entropy + 64


@pytest.mark.parametrize("name", ["topk-1", "topke-10", "topkb-10", "adatopk-10"])
def test_the_largest_elements_arrive(name: str) -> None:
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    data, _ = send(name, x)
    y, _ = receive(name, data, x)
    kind, percent = name.split("-")
    count = 2000 * int(percent) // 100
    largest = x.abs().view(-1).topk(count).indices
    assert set(y.view(-1).nonzero().view(-1).tolist()) == set(largest.tolist())
    error = (y - x).view(-1)[largest].abs() / x.view(-1)[largest].abs()
    assert error.max() < {"adatopk": 1e-9, "topkb": 2**-8}.get(kind, 0.2)
    assert np.allclose(reference_transform.topk(data, 2000, kind), y.view(-1).numpy(), rtol=1e-6)
    if kind == "adatopk":
        assert len(data) == 1 + 12 * count
    else:
        assert abs(len(data) - get_codec(name).size_bytes(tensor_spec(x))) < 40


def test_what_error_feedback_held_back_arrives_later() -> None:
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(2000)
    state = get_codec("topke-10").init(tensor_spec(x))
    for _ in range(60):
        data, state = send("topke-10", x, state)
        total += receive("topke-10", data, x)[0]
    assert torch.allclose(total + state["residual"], 60 * x, atol=1e-2)
    assert (total / 60 - x).norm() / x.norm() < 0.15


@pytest.mark.parametrize(
    ("x", "most"),
    [
        (torch.randint(0, 49152, (4, 512)), 2),
        (torch.randint(-3, 100, (1000,)), 1),
        (torch.randn(100, 64) * (torch.arange(100) % 20 == 0)[:, None] + 0.0, 0.3),
        (torch.randn(4096) * (torch.rand(4096) < 0.05) + 0.0, 0.4),
        (torch.rand(4096) < 0.05, 0.1),
        (torch.full((300,), -(2**63)), 1.1),
    ],
)
def test_without_loss_in_few_bytes(x: torch.Tensor, most: float) -> None:
    data, _ = send("pack", x)
    assert torch.equal(receive("pack", data, x)[0], x)
    assert len(data) <= most * x.numel() + 30
    plain = {torch.int64: "<i8", torch.float32: "<f4"}.get(x.dtype)
    if plain:
        assert np.array_equal(reference_transform.pack(data, tuple(x.shape), plain), x.numpy().reshape(-1))


def test_minus_zero_is_not_zero() -> None:
    x = torch.zeros(500)
    x[7] = -0.0
    y, _ = receive("pack", send("pack", x)[0], x)
    assert torch.equal(torch.signbit(y), torch.signbit(x))


def test_unused_rows_of_an_embedding_take_nothing() -> None:
    x = torch.zeros(5000, 64)
    x[::100] = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    data, _ = send("rows-int8", x)
    assert len(data) < 50 * 67 + 120
    y, _ = receive("rows-int8", data, x)
    assert (y[1::100] == 0).all() and (y - x).abs().max() <= x.abs().max() / 252 + 1e-6


def test_a_sample_seen_before_takes_two_bits_and_arrives_nearer() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 16, 64, generator=generator)
    sender = receiver = None
    sizes, errors = [], []
    for _ in range(3):
        data, sender = send("delta2", x, sender, (7, 3, 11, 20))
        y, receiver = receive("delta2", data, x, receiver, (7, 3, 11, 20))
        sizes.append(8 * len(data) / x.numel())
        errors.append(float((y - x).square().sum() / x.square().sum()))
        x = x + 0.1 * torch.randn(x.shape, generator=generator)
    assert sizes[0] > 4 and max(sizes[1:]) < 2.3
    assert max(errors[1:]) < 0.5 * errors[0]
    assert sender is not None and receiver is not None and sender.keys() == receiver.keys() == {"7", "3", "11", "20"}
    assert all(torch.equal(sender[name], receiver[name]) for name in sender)
    data, _ = send("delta2", x, sender, (7, 5, 11, 6))  # two of them are new
    y, _ = receive("delta2", data, x, receiver, (7, 5, 11, 6))
    assert ((y - x).square().sum((1, 2)) < 0.02 * x.square().sum((1, 2))).all()
    with pytest.raises(RemoteProtocolError, match="not the ones remembered"):
        receive("delta2", data, x, None, (7, 5, 11, 6))


def test_samples_without_numbers_are_not_remembered() -> None:
    x = torch.randn(2, 200)
    assert send("delta2", x)[1] == {}
    assert get_codec("delta2").init(TensorSpec((2, 200), "float32")) == {}
