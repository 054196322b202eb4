"""Weights made from a recorded constructor have the distribution of eager ones, and are the same for every split."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from geotrain.base import TensorSpec
from geotrain.errors import CaptureError, GraphFormatError
from geotrain.graph import capture, from_bytes, to_bytes
from geotrain.graph.deferred import materialize, programs, record
from geotrain.graph.ir import Dtype, Op, Ref
from geotrain.graph.serial import tensor_spec
from tests.zoo import ZOO


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer under each of its names."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def fresh(module: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    tensors = state(module)
    return {n: materialize(p, tensor_spec(tensors[n]), n, seed) for n, p in programs(module).items()}


def eager(make, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return state(make())


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """Kolmogorov and Smirnov's: how far apart two distributions are, in units that do not depend on sample sizes.
    Above 2.5 about 7 times in a million if they are the same."""
    left, right = left.flatten().double().sort().values, right.flatten().double().sort().values
    points = torch.cat([left, right])
    gap = torch.searchsorted(left, points, right=True) / len(left)
    gap = (gap - torch.searchsorted(right, points, right=True) / len(right)).abs().max().item()
    return gap * math.sqrt(len(left) * len(right) / (len(left) + len(right)))


def assert_same_distribution(make) -> nn.Module:
    """Constant tensors must be equal, random ones must be alike, over two seeds each."""
    module = record(make)
    assert all(t.is_meta for t in state(module).values())
    first, second, again = fresh(module, 1), fresh(module, 2), fresh(module, 1)
    one, two = eager(make, 1), eager(make, 2)
    assert set(one) <= set(first)
    for name, tensor in state(module).items():
        assert (first[name].shape, first[name].dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(first[name], again[name])
    for name, tensor in one.items():
        assert (first[name].shape, first[name].dtype) == (tensor.shape, tensor.dtype), name
        if torch.equal(tensor, two[name]):
            assert torch.equal(first[name], tensor) and torch.equal(second[name], tensor), name
        elif tensor.numel():
            assert not torch.equal(first[name], second[name]), name
            expected, got = torch.cat([tensor, two[name]]), torch.cat([first[name], second[name]])
            assert distance(expected, got) < 2.5, name
    return module


LAYERS = {
    "linear": lambda: nn.Linear(40, 30),
    "bilinear": lambda: nn.Bilinear(10, 12, 14),
    "conv1d": lambda: nn.Conv1d(8, 12, 3),
    "conv2d": lambda: nn.Conv2d(8, 12, 3, groups=2),
    "conv3d": lambda: nn.Conv3d(4, 6, 3),
    "conv_transpose": lambda: nn.ConvTranspose2d(8, 12, 3),
    "embedding": lambda: nn.Embedding(50, 30, padding_idx=3),
    "embedding_bag": lambda: nn.EmbeddingBag(50, 30),
    "layer_norm": lambda: nn.LayerNorm(30),
    "rms_norm": lambda: nn.RMSNorm(30),
    "group_norm": lambda: nn.GroupNorm(3, 30),
    "batch_norm": lambda: nn.BatchNorm2d(30),
    "prelu": lambda: nn.PReLU(5),
    "attention": lambda: nn.MultiheadAttention(32, 4, add_bias_kv=True),
    "lstm": lambda: nn.LSTM(10, 20, 2, bidirectional=True),
    "gru": lambda: nn.GRU(10, 20),
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(40, 30)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(40, 30)),
    "bfloat16": lambda: nn.Linear(40, 30, dtype=torch.bfloat16),
    "moved": lambda: nn.Linear(40, 30).to(torch.bfloat16).to("cpu").half().cpu(),
}


@pytest.mark.parametrize("kind", sorted(LAYERS))
def test_layers(kind) -> None:
    assert_same_distribution(LAYERS[kind])


INITS = {
    "uniform": lambda w: nn.init.uniform_(w, -2, 3),
    "normal": lambda w: nn.init.normal_(w, 1, 2),
    "constant": lambda w: nn.init.constant_(w, 0.3),
    "eye": lambda w: nn.init.eye_(w),
    "xavier_uniform": lambda w: nn.init.xavier_uniform_(w),
    "xavier_normal": lambda w: nn.init.xavier_normal_(w, gain=2.0),
    "kaiming_uniform": lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)),
    "kaiming_normal": lambda w: nn.init.kaiming_normal_(w, mode="fan_out", nonlinearity="relu"),
    "orthogonal": lambda w: nn.init.orthogonal_(w, gain=1.5),
    "sparse": lambda w: nn.init.sparse_(w, sparsity=0.3),
    "trunc_normal": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "trunc_normal_narrow": lambda w: nn.init.trunc_normal_(w, mean=0.5, std=1.0, a=-0.2, b=0.7),
    "trunc_normal_tail": lambda w: nn.init.trunc_normal_(w, mean=0.0, std=1.0, a=1.5, b=3.0),
    "through_views": lambda w: (w.data[3:].normal_(), w.data[:, 2].fill_(7), w.data.mul_(2), w.data[0].zero_()),
    "twice": lambda w: (nn.init.uniform_(w), nn.init.normal_(w)),
    "random": lambda w: w.data.random_(0, 9),
    "exponential": lambda w: w.data.exponential_().log_(),
}


class One(nn.Module):
    def __init__(self, fill, dtype=torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(40, 30, dtype=dtype))
        with torch.no_grad():
            fill(self.weight)


@pytest.mark.parametrize("kind", sorted(INITS))
def test_inits(kind) -> None:
    assert_same_distribution(lambda: One(INITS[kind]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_truncated_normal_in_half_precision_stays_inside(dtype) -> None:
    module = record(lambda: One(lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.04, b=0.04), dtype))
    weight = fresh(module)["weight"].float()
    assert weight.abs().max() <= 0.0401 and 0.015 < weight.std() < 0.02


def test_what_is_overwritten_is_not_drawn() -> None:
    module = record(lambda: One(INITS["twice"]))
    assert [op.target for op in programs(module)["weight"]] == ["aten.zeros.default", "aten.normal_.default"]


class FromData(nn.Module):
    """Values that are computed, from Python, numpy and torch, and constructors that look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.log(torch.arange(1, 17, dtype=torch.float32).repeat(8, 1)))
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8), persistent=False)
        self.register_buffer("positions", torch.arange(20).expand((1, -1)))
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))
        self.register_buffer("waves", torch.from_numpy(np.sin(np.arange(12.0, dtype=np.float32))).view(3, 4))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("roots", torch.polar(torch.ones(4), torch.linspace(0, 3, 4)))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.plain = torch.arange(5) * 2
        self.rates = [x.item() for x in torch.linspace(0, 0.3, 4)] + torch.linspace(0, 0.3, 4).tolist()
        self.numpy = torch.arange(4).numpy()
        if (torch.ones(3).cumsum(0) > 2).any():
            self.branch = nn.Parameter(torch.ones(int(torch.arange(5).sum())))
        self.picked = nn.Parameter(torch.arange(6.0)[torch.arange(6) % 2 == 0])


def test_computed_values_are_equal() -> None:
    module = assert_same_distribution(FromData)
    assert module.rates == FromData().rates
    assert module.numpy.tolist() == [0, 1, 2, 3] and module.branch.shape == (10,)
    assert torch.equal(fresh(module)["plain"], FromData().plain)
    assert "plain" not in module.state_dict() and "A_log" in module.state_dict()


class Relations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.online = nn.Linear(8, 8)
        self.target = copy.deepcopy(self.online)
        self.other = nn.Linear(8, 8)
        self.other.weight.data.copy_(self.online.weight.data * 2)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)


def test_ties_copies_and_frozen_weights() -> None:
    module = record(Relations)
    assert module.head.weight is module.embedding.weight and not module.frozen.weight.requires_grad
    weights = fresh(module)
    assert torch.equal(weights["head.weight"], weights["embedding.weight"])
    assert torch.equal(weights["target.weight"], weights["online.weight"])
    assert torch.equal(weights["other.weight"], weights["online.weight"] * 2)
    assert not torch.equal(weights["frozen.weight"], weights["online.weight"])


@pytest.mark.parametrize("name", sorted(ZOO))
def test_models(name) -> None:
    module = assert_same_distribution(lambda: ZOO[name]()[0])
    eager_model, batch = ZOO[name]()
    assert set(module.state_dict()) == set(eager_model.state_dict())
    assert module.training == eager_model.training
    init = programs(module)
    graph = capture(module, {k: v.to("meta") for k, v in batch.items()}, init=init)
    assert from_bytes(to_bytes(graph)) == graph
    assert all(p.init == init[n] for n, p in graph.parameters.items())
    assert all(b.init == init[n] for n, b in graph.buffers.items())
    assert graph.ops == capture(eager_model, batch).ops


def _rejection(weight) -> None:
    while bool((weight.normal_() > 3).any()):
        pass


def test_what_cannot_be_recorded_is_named() -> None:
    with pytest.raises(CaptureError, match=r"random tensor \(aten.normal_.*test_deferred.py.*real weights"):
        record(lambda: One(_rejection))
    with pytest.raises(CaptureError, match=r"weight.*KiB of data.*test_deferred.py"):
        record(lambda: One(lambda w: w.copy_((torch.ones(30) + torch.from_numpy(np.ones((9000, 30))))[:40])))
    with pytest.raises(ValueError, match="mine"):
        record(lambda: One(_raise))


def _raise(weight) -> None:
    raise ValueError("mine")


def test_the_session_is_left_as_it_was() -> None:
    before = nn.init._no_grad_trunc_normal_
    with pytest.raises(CaptureError):
        record(lambda: One(_rejection))
    assert nn.init._no_grad_trunc_normal_ is before
    assert torch.ones(2).device.type == "cpu" and not torch.ones(2).is_meta


@pytest.mark.parametrize(
    "program",
    [
        (),
        (Op("a", "aten.zeros.default", ((2, 2),), {}), Op("b", "aten.add.Tensor", (Ref("a"), Ref("c")), {})),
        (Op("a", "aten.zeros.default", ((-2,),), {}),),
        (Op("a", "aten.zeros.default", ((3,),), {}),),
        (Op("a", "aten.zeros.default", ((2,),), {"dtype": Dtype("int64")}),),
        (Op("a", "aten.zeros.default", ((1 << 40,),), {}), Op("b", "aten.slice.Tensor", (Ref("a"), 0, 0, 2), {})),
        (Op("a", "aten.zeros.default", ((2,),), {}), Op("b", "aten.unbind.int", (Ref("a"),), {})),
        (Op("a", "aten.from_file.default", ("x",), {}),),
        (Op("a", "literal", ((2,), 3, "AAAA"), {}),),
        (Op("a", "literal", (), {}),),
    ],
)
def test_broken_programs_are_refused(program) -> None:
    with pytest.raises(GraphFormatError):
        materialize(program, TensorSpec((2,), "float32"), "weight", 0)


def test_a_billion_parameters_take_no_memory() -> None:
    module = record(lambda: nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(16))))
    assert sum(p.numel() for p in module.parameters()) > 1e9
    assert len(programs(module)) == 32
