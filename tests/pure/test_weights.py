"""Safetensors files as written here are read by the official library and the other way round; broken ones are
refused; nothing is held whole."""

import json
import os
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, load_model, save_file
from torch import nn

from geotrain.base import TensorSpec
from geotrain.disk import hash_file
from geotrain.errors import CheckpointError, LocalError, RemoteProtocolError
from geotrain.weights import HEADER_LIMIT, StreamingWriter, WeightStore, save_module, tensor_chunks

DTYPES = ("float64 float32 bfloat16 float16 int64 int32 int16 int8 uint8 uint16 uint32 bool complex64").split()


def some_tensor(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 2).reshape(shape).to(getattr(torch, dtype))


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return spec_of(left) == spec_of(right) and torch.equal(left, right)


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=6), st.integers(1, 16), st.randoms())
def test_streamed_files_are_what_the_official_library_reads(tmp_path_factory, kinds, chunk, random) -> None:
    path = tmp_path_factory.mktemp("w") / "a.safetensors"
    tensors = {f"t{i}": some_tensor(shape, dtype) for i, (shape, dtype) in enumerate(kinds)}
    writer = StreamingWriter(path, {n: spec_of(t) for n, t in tensors.items()})
    streams = {n: tensor_chunks(t, chunk) for n, t in tensors.items()}
    while streams:  # chunks of different tensors come mixed
        name = random.choice(sorted(streams))
        for offset, data in streams[name]:
            writer.write(name, offset, bytes(data))
            break
        else:
            del streams[name]
    assert writer.finish() == hash_file(path)
    official = load_file(path)
    assert official.keys() == tensors.keys()
    assert all(equal(official[n], t) for n, t in tensors.items())
    with WeightStore(path) as store:
        for name, tensor in tensors.items():
            assert equal(store.load(name), tensor)
            assert b"".join(data for _, data in store.chunks(name, chunk)) == store.read(name)


def test_reads_official_files_by_range(tmp_path: Path) -> None:
    tensor = torch.randn(10, 7)
    save_file({"x": tensor, "y": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    with WeightStore(tmp_path) as store:
        assert set(store.names()) == {"x", "y"} and "x" in store and "z" not in store
        assert store.spec("y") == TensorSpec((3,), "bfloat16")
        assert store.read("x", 28, 56) == tensor[1:3].numpy().tobytes()
        for offset, nbytes in ((-1, 4), (0, 281), (280, 1)):
            with pytest.raises(CheckpointError, match="280 bytes"):
                store.read("x", offset, nbytes)
        with pytest.raises(CheckpointError, match="no tensor 'z'"):
            store.read("z")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("hidden", torch.ones(2), persistent=False)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 600])
def test_save_module_keeps_tied_names_once(tmp_path: Path, shard_bytes: int) -> None:
    module = Tied().to(torch.bfloat16)
    save_module(module, tmp_path, shard_bytes)
    sharded = (tmp_path / "model.safetensors.index.json").exists()
    assert sharded == (shard_bytes == 600)
    with WeightStore(tmp_path) as store:
        assert set(store.names()) == set(module.state_dict()) - {"head.weight"}
        assert all(equal(store.load(n), module.state_dict()[n]) for n in store.names())
    if not sharded:
        other = Tied().to(torch.bfloat16)
        assert load_model(other, tmp_path / "model.safetensors") == (set(), [])
        assert equal(other.head.weight, module.head.weight)
    with pytest.raises(CheckpointError, match="meta"):
        save_module(nn.Linear(2, 2, device="meta"), tmp_path)


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cut short"),
        (b"1234567", "cut short"),
        (raw({}, length=1 << 60), "cut short"),
        (raw(b"{" * 4), "not JSON"),
        (raw(b"[" * 200_000), "not JSON"),
        (raw([]), "table of tensors"),
        (raw({"__metadata__": {"a": 1}}), "metadata"),
        (raw({"x": 3}, b"0" * 8), "malformed"),
        (raw({"x": {**ENTRY, "dtype": "F31"}}, b"0" * 8), "malformed"),
        (raw({"x": {**ENTRY, "shape": [-2]}}, b"0" * 8), "malformed"),
        (raw({"x": {**ENTRY, "shape": [True, 2]}}, b"0" * 8), "malformed"),
        (raw({"x": {**ENTRY, "data_offsets": [0, 8, 9]}}, b"0" * 8), "malformed"),
        (raw({"x": {**ENTRY, "shape": [10**12]}}, b"0" * 8), "wrong number of bytes"),
        (raw({"x": {**ENTRY, "data_offsets": [8, 16]}}, b"0" * 16), "gap or an overlap"),
        (raw({"x": ENTRY, "y": ENTRY}, b"0" * 8), "gap or an overlap"),
        (raw({"x": ENTRY}, b"0" * 7), "cut short"),
        (raw({"x": ENTRY}, b"0" * 9), "no tensor"),
    ],
)
def test_broken_files_are_refused_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        WeightStore(path)
    assert "\n" not in str(caught.value)


def test_a_large_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", HEADER_LIMIT + 1))
        file.truncate(HEADER_LIMIT + 100)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="header has"):
        WeightStore(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": {"x": "../x.safetensors"}}', '{"weight_map": {"x": 1}}'])
def test_broken_folders_are_refused(tmp_path: Path, index: str) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        WeightStore(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no safetensors file"):
        WeightStore(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="not an index"):
        WeightStore(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-00001.safetensors"}}')
    with pytest.raises(CheckpointError, match="model-00001"):
        WeightStore(tmp_path)


def test_the_writer_refuses_what_it_did_not_expect(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    writer = StreamingWriter(path, {"x": TensorSpec((4,), "int8")})
    for name, offset, data in (("y", 0, b"1"), ("x", 1, b"1"), ("x", 0, b"12345"), ("x", -1, b"1")):
        with pytest.raises(RemoteProtocolError):
            writer.write(name, offset, data)
    writer.write("x", 0, b"12")
    with pytest.raises(RemoteProtocolError, match="0 to 2"):
        writer.write("x", 0, b"12")
    with pytest.raises(CheckpointError, match="'x'"):
        writer.finish()
    assert not path.exists()
    writer.abort()
    assert os.listdir(tmp_path) == []
    with pytest.raises(LocalError, match="cannot write"):
        StreamingWriter(tmp_path / "nowhere" / "a.safetensors", {})
    with pytest.raises(CheckpointError, match="complex128"):
        StreamingWriter(path, {"x": TensorSpec((4,), "complex128")})


def test_copying_a_large_file_holds_only_chunks(tmp_path: Path) -> None:
    spec = {"x": TensorSpec((16 << 20,), "float32")}
    writer = StreamingWriter(tmp_path / "a.safetensors", spec)
    chunk = bytes(4 << 20)
    for offset in range(0, spec["x"].nbytes, len(chunk)):
        writer.write("x", offset, chunk)
    writer.finish()
    tracemalloc.start()
    with WeightStore(tmp_path) as store:
        copy = StreamingWriter(tmp_path / "b.safetensors", spec)
        for offset, data in store.chunks("x"):
            copy.write("x", offset, data)
        copy.finish()
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()
