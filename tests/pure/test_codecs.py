"""Every registered codec: what it promises holds for any tensor and any bytes."""

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.base import ITEM_BYTES, TensorSpec
from geotrain.codecs import CODECS, Codec, Message, State, fast, get_codec, warm_up
from geotrain.codecs.entropy import ENTROPY, Entropy
from geotrain.codecs.identity import pack
from geotrain.codecs.lossy import FLOATS
from geotrain.errors import PlanError, RemoteProtocolError
from geotrain.graph.ops import to_dtype
from geotrain.graph.serial import tensor_spec
from tests import reference_codecs

GOLDEN = Path(__file__).parents[1] / "golden" / "codecs"
CPU = torch.device("cpu")
KEYS = st.integers(0, 2**64 - 1)

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
OURS = [c for c in CODECS.values() if c.name in ("bf16", "int8") or c.name.startswith(("hd", "ec"))]
each_of_ours = pytest.mark.parametrize("codec", OURS, ids=lambda c: c.name)


def encode(codec: Codec, x: torch.Tensor, key: int = 1, state: State | None = None) -> tuple[bytes, State]:
    spec = tensor_spec(x)
    payload, after = codec.encode(x, codec.init(spec) if state is None else state, message(x, key))
    return b"".join(bytes(part) for part in payload), after


def decode(codec: Codec, data: bytes, x: torch.Tensor, key: int = 1, state: State | None = None) -> torch.Tensor:
    spec = tensor_spec(x)
    state = codec.init(spec) if state is None else state
    return codec.decode(memoryview(bytearray(data)), spec, CPU, state, message(x, key))[0]


def message(x: torch.Tensor, key: int) -> Message:
    return Message(key, tuple(range(x.shape[0])) if x.dim() else ())


def there_and_back(codec: Codec, x: torch.Tensor, key: int = 1) -> torch.Tensor:
    return decode(codec, encode(codec, x, key)[0], x, key)


def in_rows(codec: Codec, x: torch.Tensor, key: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is sent and what is wrong with what comes, in memory order, in rows of so many; zeros fill the last one."""
    flat, back = pack(x).double(), pack(there_and_back(codec, x, key)).double()
    rows, errors = (torch.nn.functional.pad(t, (0, -len(flat) % width)).view(-1, width) for t in (flat, back - flat))
    return rows, errors


@st.composite
def tensors(draw: st.DrawFn, dtypes: tuple[str, ...] = FLOATS) -> torch.Tensor:
    """Finite, of any shape, dtype, layout and scale; with outliers, zero rows, denormals."""
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 16, 33, 64, 70, 130]), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(shape, generator=generator, dtype=torch.float32)
    kind = draw(st.sampled_from(["noise", "outliers", "sparse", "zero", "constant", "ragged"]))
    if kind == "outliers":
        x = x * torch.where(torch.rand(shape, generator=generator) < 0.05, 1e4, 1.0)
    elif kind == "sparse":
        x = x * (torch.rand(shape, generator=generator) < 0.1)
    elif kind == "zero":
        x = x * 0
    elif kind == "constant":
        x = torch.full_like(x, 0.7)
    elif kind == "ragged" and x.dim():
        x = x * 10.0 ** torch.randint(-12, 1, (shape[0], *[1] * (len(shape) - 1)), generator=generator)
    dtype = to_dtype(draw(st.sampled_from(dtypes)))
    most = torch.finfo(dtype).max
    x = (x * draw(st.sampled_from([1.0, 1e-6, 1e-20, 1e-41, 1e30, 1e38]))).clamp(-most, most).to(dtype)
    layout = draw(st.sampled_from(["contiguous", "transposed", "sliced", "expanded"]))
    if layout == "transposed" and x.dim() > 1:
        x = x.transpose(0, -1)
    elif layout == "sliced" and x.dim() and x.shape[-1] > 2:
        x = x[..., 1:]
    elif layout == "expanded":
        x = x.unsqueeze(0).expand(3, *x.shape)
    return x


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_native", lambda name: None)


@every_codec
@given(x=tensors(), key=KEYS)
@settings(max_examples=12, deadline=None)
def test_any_tensor_comes_back_finite_and_in_its_layout(codec: Codec, x: torch.Tensor, key: int) -> None:
    before = x.clone()
    spec = tensor_spec(x)
    data, _ = encode(codec, x, key)
    again, _ = encode(codec, x, key)
    y = decode(codec, data, x, key)
    assert data == again and torch.equal(x, before)
    assert codec.accepts(spec, len(data))
    assert (y.shape, y.dtype) == (x.shape, x.dtype) and tensor_spec(y) == spec
    assert torch.isfinite(y).all()
    if codec.lossless:
        assert torch.equal(x, y)
    assert len(data) <= spec.packed.nbytes + 1


@every_codec
def test_all_dtypes_and_shapes_travel(codec: Codec) -> None:
    for dtype in (d for d in ITEM_BYTES if not d.startswith("float8")):
        for shape in ((), (0,), (3, 0, 2), (7,), (2, 70)):
            x = (torch.arange(int(np.prod(shape))).reshape(shape) % 50).to(to_dtype(dtype))
            y = there_and_back(codec, x)
            assert (y.shape, y.dtype) == (x.shape, x.dtype)
            assert dtype in FLOATS or torch.equal(x, y)


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_travels_as_it_is(codec: Codec, bad: float) -> None:
    for dtype in FLOATS:
        x = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)).to(to_dtype(dtype))
        x[1, 5] = bad
        data, after = encode(codec, x)
        y = decode(codec, data, x)
        assert torch.equal(pack(x).view(torch.uint8), pack(y).view(torch.uint8))
        assert_same_state(after, codec.init(tensor_spec(x)))
        assert codec.accepts(tensor_spec(x), len(data))


@every_codec
@given(
    data=st.binary(max_size=300), numel=st.sampled_from([0, 1, 60, 64, 150]), head=st.sampled_from([b"", b"\0", b"\1"])
)
@settings(max_examples=15, deadline=None)
def test_any_bytes_are_a_result_or_the_senders_fault(codec: Codec, data: bytes, numel: int, head: bytes) -> None:
    spec = TensorSpec((numel,), "float32")
    for payload in (head + data, (head + data).ljust(codec.size_bytes(spec), b"\xa5")[: codec.size_bytes(spec)]):
        try:
            y, _ = codec.decode(memoryview(bytearray(payload)), spec, CPU, codec.init(spec), Message(3))
        except RemoteProtocolError:
            continue
        assert y.shape == (numel,) and y.dtype == torch.float32
        if not codec.lossless and payload[0] == 0:
            assert torch.isfinite(y).all()


@every_codec
def test_damaged_payloads_are_a_result_or_the_senders_fault(codec: Codec) -> None:
    x = torch.randn(9, 70, generator=torch.Generator().manual_seed(0))
    data, _ = encode(codec, x)
    generator = np.random.default_rng(0)
    for _ in range(20):
        damaged = bytearray(data)
        for at in generator.integers(0, len(data), 3):
            damaged[at] = generator.integers(256)
        try:
            y = decode(codec, bytes(damaged[: generator.integers(1, len(data) + 1)]), x)
        except RemoteProtocolError:
            continue
        assert y.shape == x.shape


def peak_bytes(work: Callable[[], object]) -> int:
    """What this process needed more while it did the work than before."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free already is given back, so that it is seen when it is taken
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory_kib("VmRSS")
    work()
    return (_memory_kib("VmHWM") - before) * 1024


def _memory_kib(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how much memory a process needed at most")
@every_codec
def test_reading_any_bytes_takes_memory_for_the_tensor_only(codec: Codec) -> None:
    """At most 16 times the tensor's own, whatever a sender claims: of places, 1 MB could once ask for 45."""
    x = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0))
    size = 4 * x.numel()
    data, _ = encode(codec, x)
    assert peak_bytes(lambda: bytearray(8 * size)) > 7 * size, "it is measured"
    lists = [(low, x.numel() >> fewer) for low in (0, 20, 31) for fewer in (0, 1)]
    claims = [bytes([low]) + count.to_bytes(4, "little") for low, count in lists]
    starts = [bytes(1 + 4), bytes(1), b"\2", b"\3", b"\4" + (size // 2).to_bytes(4, "little")]  # of topk, pack and rows
    payloads = [start + claim + b"\xff" * (size - 32) for start in starts for claim in claims]
    payloads += [data, data[:-1], data[: len(data) // 2], data[:9] + b"\xff" * (size - 9), bytes(size)]
    for payload in payloads:

        def read(payload: bytes = payload) -> None:
            with suppress(RemoteProtocolError):
                decode(codec, payload, x)

        assert peak_bytes(read) < 16 * size


@every_codec
@pytest.mark.parametrize("shape", [(4, 192), (256, 48)], ids=["few rows", "rows with principal axes"])
def test_a_saved_state_goes_on_with_the_same_bytes(codec: Codec, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    spec, falling = TensorSpec(shape, "float32"), 2.0 ** -torch.arange(shape[1])
    sender, receiver = codec.init(spec), codec.init(spec)
    for key in range(4):
        x = torch.randn(shape, generator=generator) * falling
        copies = [{n: t.clone() for n, t in state.items()} for state in (sender, receiver)]
        (data, after), (same, _) = encode(codec, x, key, sender), encode(codec, x, key, copies[0])
        assert data == same
        wire = memoryview(bytearray(data))
        y, read = codec.decode(wire, spec, CPU, receiver, message(x, key))
        z, _ = codec.decode(wire, spec, CPU, copies[1], message(x, key))
        assert torch.equal(y, z)
        sender, receiver = after, read


@pytest.mark.parametrize("codec", [c for c in CODECS.values() if c.unbiased and not c.lossless], ids=lambda c: c.name)
def test_the_mean_over_keys_is_the_input(codec: Codec) -> None:
    """A z-test for each element, and one for all."""
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(3)) * torch.tensor([[1.0], [30.0], [0.01], [1.0]])
    x[3] = 0.0
    x[3, 7] = 1.0
    keys = 200
    errors = torch.stack([there_and_back(codec, x, 977 * key) - x for key in range(keys)]).double()
    z = errors.mean(0) / (errors.std(0) + 1e-12) * keys**0.5
    assert z.abs().max() < 5.0  # of 384 normal numbers; 5 has a chance of 2e-4
    assert z.mean().abs() * z.numel() ** 0.5 < 8.0  # elements of one block are not independent
    assert 0.5 < z.var() < 1.6


@pytest.mark.parametrize(
    ("name", "typical", "most"),
    [
        ("hd8", 4e-5, 0.0012), ("hd6", 6.6e-4, 0.02), ("hd4", 0.0117, 0.34), ("hd3", 0.038, 2), ("hd2", 0.12, 2),
        ("hd1", 0.37, 2), ("hd8u", 4e-5, 0.0012), ("hd6u", 6.6e-4, 0.02), ("hd4u", 0.0117, 0.34), ("hd3u", 0.053, 1.6),
        ("hd2u", 0.29, 8.5), ("hd1u", 2.6, 77), ("bf16", 2.9e-6, 2.0**-16),
    ],
)  # fmt: skip
def test_error_of_a_block(name: str, typical: float, most: float) -> None:
    """The relative squared error: typically (of Gaussian noise), and at most, of any 64 elements."""
    codec = get_codec(name)
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    assert 0.9 * typical < ((there_and_back(codec, x) - x).square().sum() / x.square().sum()).item() < typical

    @given(tensors(("float32",)), KEYS)
    @settings(max_examples=12, deadline=None)
    def check(x: torch.Tensor, key: int) -> None:
        if x.numel() == 0:
            return
        blocks, errors = in_rows(codec, x, key, 64)
        lost = max(blocks.abs().max() * 2**-20, 2.0**-134)
        assert (errors.square().sum(1) <= 1.001 * most * blocks.square().sum(1) + 64 * lost**2).all()

    check()


@pytest.mark.parametrize("codec", ENTROPY, ids=lambda c: c.name)
def test_error_of_entropy_coding(codec: Entropy) -> None:
    """As its name says, and for its typical bytes; no element is off by more than half of a step."""
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(1))
    data, spec = encode(codec, x)[0], tensor_spec(x)
    assert 0.95 < ((there_and_back(codec, x) - x).square().sum() / x.square().sum()).item() / codec.error < 1.05
    assert 0.93 < len(data) / codec.size_bytes(spec) < 1.03

    @given(tensors(("float32",)), KEYS)
    @settings(max_examples=12, deadline=None)
    def check(x: torch.Tensor, key: int) -> None:
        if x.numel() == 0:
            return
        blocks, errors = in_rows(codec, x, key, 64)
        power = blocks.square().sum(1, keepdim=True)
        width = tensor_spec(x).packed.shape[-1] if x.dim() else 1
        groups = power.view(1 if codec.whole else -1, len(power) if codec.whole else max(width // 64, 1)
                            if width % 64 == 0 else 1)  # fmt: skip
        fair = (groups.mean(1, keepdim=True) * 12 * 1.3 * codec.error).expand(groups.shape).reshape(-1)
        allowed = torch.maximum(fair, power[:, 0] / 64 * 1.25)
        lost = max(blocks.abs().max() * 2**-20, 2.0**-134)
        assert (errors.square().sum(1) <= allowed / 4 + 64 * lost**2).all()

    check()


def test_damaged_entropy_coding_is_noticed() -> None:
    codec, x = get_codec("ecm-2"), torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    data, _ = encode(codec, x)
    with pytest.raises(RemoteProtocolError, match="does not end where it should"):
        decode(codec, data[:-2], x)
    with pytest.raises(RemoteProtocolError, match="does not end where it should"):
        decode(codec, data + b"\0\0", x)


@pytest.mark.parametrize(("name", "bits"), [("sync2", 2.15), ("sync4", 4.25)])
def test_what_replicas_lose_is_sent_later(name: str, bits: float) -> None:
    """The sums of what was sent and of what arrived differ by the residual, which does not grow."""
    codec, generator = get_codec(name), torch.Generator().manual_seed(0)
    sent, came, state = torch.zeros(20_000, dtype=torch.float64), torch.zeros(20_000, dtype=torch.float64), {}
    losses: list[float] = []
    for key in range(12):
        x = torch.randn(20_000, generator=generator) + 0.1
        data, state = encode(codec, x, key, state)
        assert len(data) * 8 / x.numel() < bits
        sent, came = sent + x, came + decode(codec, data, x, key)
        losses.append((came - sent).norm().item() / 20_000**0.5)
        assert torch.allclose(sent - came, state["residual"].double(), atol=1e-4)
    assert losses[-1] < 1.2 * max(losses[:4]) < 0.5


@pytest.mark.parametrize("name", ["sync4", "sync2"])
def test_what_is_held_back_of_the_largest_numbers_is_finite(name: str) -> None:
    codec, most = get_codec(name), torch.finfo(torch.float32).max
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).sign() * most
    state = codec.init(tensor_spec(x))
    for key in range(4):
        _, state = codec.encode(x * (-1) ** key, state, Message(key))
        assert torch.isfinite(state["residual"]).all()


def test_entropy_coding_gains_on_rotated_bits() -> None:
    """At no more error, at least a tenth (4 bits, forward) and a quarter (2 bits, gradients) fewer bytes."""
    x = torch.randn(128, 1024, generator=torch.Generator().manual_seed(2))
    for ours, theirs, most in (("ec-01", "hd4", 0.9), ("ecm-2", "hd2u", 0.77)):
        a, b = get_codec(ours), get_codec(theirs)
        assert (there_and_back(a, x) - x).norm() < (there_and_back(b, x) - x).norm()
        assert len(encode(a, x)[0]) < most * len(encode(b, x)[0])


@given(tensors(("float32",)), KEYS)
@settings(max_examples=40, deadline=None)
def test_error_of_int8(x: torch.Tensor, key: int) -> None:
    if x.numel() == 0:
        return
    width = tensor_spec(x).packed.shape[-1] if x.dim() else 1
    width = width if width >= 32 else 64
    rows, errors = in_rows(get_codec("int8"), x, key, width)
    lost = max(rows.abs().max() * 2**-100, 2.0**-149)
    assert (errors.abs() <= rows.abs().amax(1, keepdim=True) / 252 + lost).all()


@each_of_ours
@given(x=tensors(), key=KEYS)
@settings(max_examples=8, deadline=None)
def test_native_kernels_and_torch_write_and_read_the_same(codec: Codec, x: torch.Tensor, key: int) -> None:
    data, y = encode(codec, x, key)[0], there_and_back(codec, x, key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "_native", lambda name: None)
        assert encode(codec, x, key)[0] == data
        assert torch.equal(decode(codec, data, x, key), y)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_writes_and_reads_the_same() -> None:
    x = torch.randn(37, 200, generator=torch.Generator().manual_seed(0))
    spec, cuda = tensor_spec(x), torch.device("cuda")
    for codec in OURS:
        data, _ = encode(codec, x)
        assert encode(codec, x.cuda())[0] == data
        y, _ = codec.decode(memoryview(bytearray(data)), spec, cuda, codec.init(spec), message(x, 1))
        assert torch.equal(y.cpu(), decode(codec, data, x))


def test_codecs_are_warmed_up() -> None:
    warm_up(["identity", "hd4", "ecm-2"])
    with pytest.raises(PlanError):
        warm_up(["gzip"])


def test_what_was_warmed_up_compiles_nothing_later() -> None:
    """A kernel is compiled for each kind of arguments, which takes seconds: no message should wait for that."""
    pytest.importorskip("numba")
    modules = [fast.kernels(CPU), fast.entropy_kernels(CPU), fast.number_kernels(CPU)]
    loops = [loop for module in modules for loop in vars(module).values() if hasattr(loop, "nopython_signatures")]
    names = ["int8", "hd4u", "ec-01", "ecm-2", "tcu-0025", "tcm-1", "tc-001"]
    warm_up(names)
    before = [len(loop.nopython_signatures) for loop in loops]
    assert loops and any(before)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(256, 64, generator=random) * 2.0 ** -torch.arange(64)
    for name in names:
        codec, spec = get_codec(name), tensor_spec(x)
        data, after = encode(codec, x)
        _, state = codec.decode(memoryview(data), spec, CPU, codec.init(spec), message(x, 1))
        more, _ = encode(codec, x, 2, after)
        codec.decode(memoryview(more), spec, CPU, state, message(x, 2))
    assert [len(loop.nopython_signatures) for loop in loops] == before


def golden_tensor(codec: Codec) -> torch.Tensor:
    """Made of integers, so that any machine makes the same; rows of two blocks for what looks at rows of blocks."""
    rows, columns = (13, 128) if codec.name.startswith("ec-") else (21, 72)
    n = torch.arange(rows * columns, dtype=torch.int64)
    noise = ((n * 2654435761) % 4093 - 2046).float() / 512
    x = (noise * (1 + (n % columns == 5) * 40)).view(rows, columns)
    x[4] *= 2.0**-20
    x[7] = 0
    return x


@each_of_ours
def test_golden_payloads(codec: Codec, update_golden: bool) -> None:
    """The layout may not change by accident: peers of two versions would read nonsense."""
    x, path = golden_tensor(codec), GOLDEN / f"{codec.name}.hex"
    data = encode(codec, x, 0x0123456789ABCDEF)[0]
    if update_golden:
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(data.hex()[i : i + 120] for i in range(0, 2 * len(data), 120)) + "\n")
    assert bytes.fromhex(path.read_text()) == data


@each_of_ours
@pytest.mark.parametrize("native", [True, False])
def test_the_numpy_decoder_reads_the_golden_payloads(
    codec: Codec, native: bool, request: pytest.FixtureRequest
) -> None:
    if not native:
        request.getfixturevalue("without_native")
    x, key = golden_tensor(codec), 0x0123456789ABCDEF
    data = bytes.fromhex((GOLDEN / f"{codec.name}.hex").read_text())
    assert np.array_equal(
        decode(codec, data, x, key).numpy().reshape(-1), read_in_numpy(codec.name, data, tuple(x.shape), key)
    )


@lru_cache(maxsize=64)
def read_in_numpy(name: str, data: bytes, shape: tuple[int, ...], key: int) -> np.ndarray:
    return reference_codecs.decode(name, data, shape, "float32", key)


def test_an_unknown_codec_is_told() -> None:
    with pytest.raises(PlanError, match="no codec is called 'gzip'"):
        get_codec("gzip")


def assert_same_state(a: State, b: State) -> None:
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
