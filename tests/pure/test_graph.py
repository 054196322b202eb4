"""Capture, cuts and bytes of graphs, beyond what the models in the zoo show."""

import copy
import random
import resource
import struct

import msgpack
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from geotrain.errors import CaptureError, GeotrainError, GraphFormatError, PlanError
from geotrain.graph import boundary_bytes, candidate_cuts, capture, cut, from_bytes, seeded, stage_modules, to_bytes
from geotrain.graph.serial import MAGIC
from tests.pipeline import Pipeline
from tests.zoo import make


class Chain(nn.Module):
    """Four equal blocks with a residual; only one tensor is alive between blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.pow(2).mean()


def test_block_borders_come_out_by_themselves():
    graph = capture(Chain(), [torch.randn(2, 8, 16)])
    cuts = candidate_cuts(graph)
    starts = [i for i, op in enumerate(graph.ops) if op.target == "aten.layer_norm.default"]
    assert {c.op_index for c in cuts} >= set(starts[1:])
    assert all(c.forward_bytes == 2 * 8 * 16 * 4 for c in cuts if c.op_index in starts[1:])
    assert all(c.backward_bytes == c.forward_bytes for c in cuts if c.op_index in starts[1:])
    assert stage_modules(graph, [0, starts[2], len(graph.ops)])[0].startswith("blocks.0")


def test_cut_knows_what_crosses_it():
    """The bytes promised for each cut are those that the stages then exchange."""
    for name in ("llama", "bert", "unet", "t5"):
        net, batch = make(name)
        graph = capture(net, batch)
        for promised in random.Random(3).sample(boundary_bytes(graph), 12):
            first, second = cut(graph, [promised.op_index])
            values = [r for r in second.receives if not r.once]
            forward = sum(graph.values[r.value].spec.packed.nbytes for r in values)
            backward = sum(graph.values[r.value].spec.packed.nbytes for r in values if r.grad)
            assert (forward, backward) == (promised.forward_bytes, promised.backward_bytes), (name, promised)
            assert {s.value for s in first.sends} == {r.value for r in second.receives}


def test_masks_and_positions_are_recomputed_and_not_sent():
    net, batch = make("gpt2")
    graph = capture(net, batch)
    for stage in cut(graph, [c.op_index for c in candidate_cuts(graph)][:3])[1:]:
        sent = [graph.values[r.value] for r in stage.receives if not r.once]
        assert sent and all(v.requires_grad for v in sent)


def test_skip_edges_go_straight_to_each_reader():
    net, batch = make("unet")
    graph = capture(net, batch)
    last = len(graph.ops) - 3
    stages = cut(graph, [last // 3, 2 * last // 3, last])
    spans = {(s.source, stage.index) for stage in stages for s in stage.receives}
    assert any(reader - source > 1 for source, reader in spans)


def test_cut_points_are_checked():
    graph = capture(Chain(), [torch.randn(2, 8, 16)])
    for points in ([0], [len(graph.ops)], [5, 5], [7, 3], [-1]):
        with pytest.raises(PlanError, match="cut points"):
            cut(graph, points)


def test_changing_buffer_stays_in_one_stage():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(self.norm(x))).sum()

    graph = capture(Twice(), [torch.randn(3, 4)])
    middle = next(i for i, op in enumerate(graph.ops) if op.target == "aten.linear.default")
    with pytest.raises(PlanError, match=r"norm\.running_mean|norm\.running_var|num_batches"):
        cut(graph, [middle])


def test_frozen_parameters_get_no_gradient_and_send_none():
    net, batch = make("llama")
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    graph = capture(net, batch)
    first = next(i for i, op in enumerate(graph.ops) if "layers.1" in op.module)
    below, above = cut(graph, [first])
    assert not any(r.grad for r in above.receives) and not any(s.grad for s in below.sends)
    pipeline = Pipeline([below, above], dict(net.named_parameters()) | dict(net.named_buffers()))
    pipeline.step(0, [batch])
    reference = copy.deepcopy(net)
    reference(**batch).loss.backward()
    for name, parameter in reference.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(pipeline.gradients()[name], parameter.grad)
        else:
            assert name not in pipeline.gradients()


def test_autocast_equals_a_loop_under_autocast():
    net, batch = make("gpt2")
    graph = capture(net, batch, autocast="bfloat16")
    assert any(v.spec.dtype == "bfloat16" for v in graph.values.values())
    points = [c.op_index for c in candidate_cuts(graph)]
    pipeline = Pipeline(
        cut(graph, [points[1], points[1] + 5, points[-1]]), dict(net.named_parameters()) | dict(net.named_buffers())
    )
    losses = pipeline.step(0, [batch])
    reference = copy.deepcopy(net)
    with seeded(0, 0, 0), torch.autocast("cpu", torch.bfloat16):
        loss = reference(**batch).loss
    loss.backward()
    assert losses[0].item() == loss.item()
    for name, parameter in reference.named_parameters():
        assert torch.equal(pipeline.gradients()[name], parameter.grad), name


def test_capture_on_the_meta_device_is_the_same_graph():
    torch.manual_seed(0)
    real = Chain()
    with torch.device("meta"):
        meta = Chain()
    batch = [torch.randn(2, 8, 16)]
    assert to_bytes(capture(real, batch)) == to_bytes(capture(meta, [b.to("meta") for b in batch]))


def test_dropout_depends_on_seed_step_microbatch_and_op_only():
    net, batch = make("gpt2")
    graph = capture(net, batch)
    state = dict(net.named_parameters()) | dict(net.named_buffers())
    stages = cut(graph, [40])

    def loss(seed: int, step: int) -> float:
        torch.rand(random.randrange(1, 9))  # whatever else draws numbers does not matter
        return Pipeline(stages, state, seed=seed).step(step, [batch])[0].item()

    assert loss(1, 1) == loss(1, 1)
    assert len({loss(1, 1), loss(2, 1), loss(1, 2)}) == 3


class BranchOnValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 0:
            y = y * 2
        return y.sum()


class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Frozen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


class SelectsByValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[x > 0].sum()


class ForbiddenOp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigh(self.weight @ self.weight.T).eigenvalues.sum() + x.sum()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (BranchOnValue(), "torch.where"),
        (NoLoss(), "must return its loss"),
        (Frozen(), "no trainable parameter"),
        (SelectsByValue(), "values"),
        (ForbiddenOp(), "eigh"),
    ],
)
def test_what_cannot_be_captured_is_told_in_one_line(module, message):
    with pytest.raises(CaptureError, match=message) as caught:
        capture(module, [torch.randn(3, 4)])
    assert "\n" not in str(caught.value)


def test_graph_bytes_hold_no_uninitialized_memory():
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            room = torch.empty(3, 4)
            room.copy_(self.linear(x))
            return F.relu(room).sum()

    graph = capture(Empty(), [torch.randn(3, 4)])
    assert not any("empty" in op.target for op in graph.ops)


@pytest.mark.parametrize(
    "target", ["aten.from_file.default", "aten.empty.memory_format", "os.system", "aten.add.out", "prim.print.default"]
)
def test_ops_that_are_not_allowed_are_refused(target):
    graph = capture(Chain(), [torch.randn(2, 8, 16)])
    data = to_bytes(graph)
    name = graph.ops[0].target.encode()
    record = data.index(name)
    forged = data[: record - 1] + msgpack.packb(target) + data[record + len(name) :]
    with pytest.raises(GraphFormatError):
        from_bytes(forged)


def test_mutated_graphs_raise_our_errors_only():
    """50,000 mutations of real graphs; memory stays flat."""
    rng = random.Random(5)
    graphs = [capture(Chain(), [torch.randn(2, 8, 16)])]
    originals = [to_bytes(g) for g in graphs] + [to_bytes(s) for s in cut(graphs[0], [5, 11])]
    whole = refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(50_000):
        data = bytearray(originals[i % len(originals)])
        for _ in range(rng.choice((1, 1, 2, 8))):
            kind, at = rng.randrange(6), rng.randrange(len(data))
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at] = rng.randrange(256)
            elif kind == 2:
                del data[at : at + rng.randrange(1, 64)]
            elif kind == 3:
                data[at:at] = rng.randbytes(rng.randrange(1, 32))
            elif kind == 4:
                data[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 20)))
            else:
                data[at : at + 5] = b"\xdd" + struct.pack(">I", rng.randrange(1 << 32))
            if not data:
                data = bytearray(MAGIC)
        try:
            from_bytes(bytes(data))
            whole += 1
        except GeotrainError:
            refused += 1
    assert whole + refused == 50_000 and refused > 30_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
