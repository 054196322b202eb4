"""Weights out, checkpoints in: chunk by chunk, and only what belongs there."""

import asyncio

import pytest
import torch
from torch import nn

from geotrain.base import TensorSpec
from geotrain.checkpoint import latest
from geotrain.errors import CheckpointError, LocalError, RemoteError, RemoteProtocolError
from geotrain.graph import capture, cut
from geotrain.protocol import CHUNK_BYTES, NamedSpec, Store
from geotrain.transfers import Shelf, state_spec_problem
from geotrain.uploads import GradientWriter, Upload, checkpoint_sink
from geotrain.weights import WeightStore, save_module


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.big = nn.Linear(700, 700)  # 1.9 MiB: more than a chunk
        self.out = nn.Linear(700, 700)
        self.out.weight = self.big.weight
        self.norm = nn.BatchNorm1d(700)

    def forward(self, x):
        return self.norm(self.out(torch.tanh(self.big(x)))).square().mean()


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def graph(net):
    return capture(net, {"x": torch.randn(4, 700)})


@pytest.fixture(scope="module")
def stages(graph):
    return cut(graph, [next(i for i, op in enumerate(graph.ops) if "tanh" in op.target)])


async def read(shelf, names):
    return b"".join([chunk async for _, chunk in shelf.read(names)])


def test_a_stage_fetches_its_own(tmp_path, net, graph, stages):
    save_module(net, tmp_path)
    shelf = Shelf(WeightStore(tmp_path), graph.ties)
    first, last = ([tensor.name for tensor in shelf.wanted(stage)] for stage in stages)
    assert set(first) == {"big.weight", "big.bias"}
    assert {"out.bias", "norm.running_mean"} <= set(last) and "big.bias" not in last
    data = asyncio.run(read(shelf, ["big.bias", "big.weight"]))
    assert data == net.big.bias.detach().numpy().tobytes() + net.big.weight.detach().numpy().tobytes()
    with pytest.raises(RemoteError, match="there is no tensor 'x'"):
        asyncio.run(read(shelf, ["x"]))
    shelf.close()


def test_weights_of_another_model_are_refused(tmp_path, graph, stages):
    save_module(nn.Sequential(nn.Linear(2, 2)), tmp_path / "lacking")
    with pytest.raises(CheckpointError, match=r"the weights lack 'big\.weight'"):
        Shelf(WeightStore(tmp_path / "lacking"), graph.ties).wanted(stages[0])
    with pytest.raises(CheckpointError, match="the weights lack"):
        Shelf(None, {}).wanted(stages[0])
    other = Net()
    other.big = nn.Linear(10, 700)
    other.out.weight = nn.Parameter(torch.zeros(700, 700))
    save_module(other, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"'big\.weight' does not fit this model"):
        Shelf(WeightStore(tmp_path / "other"), graph.ties).wanted(stages[0])


@pytest.mark.parametrize(
    ("name", "spec", "problem"),
    [
        ("big.weight", TensorSpec((700, 700), "float32"), None),
        ("big.weight", TensorSpec((700, 701), "float32"), "shape or type"),
        ("big.weight", TensorSpec((700, 700), "float64"), "shape or type"),
        ("optimizer/exp_avg/big.weight", TensorSpec((700, 700), "float32"), None),
        ("optimizer/step/big.weight", TensorSpec((), "float32"), None),
        ("optimizer/exp_avg/big.weight", TensorSpec((1 << 40,), "float32"), "not its parameter's"),
        ("optimizer/exp_avg/out.bias", TensorSpec((700,), "float32"), "no parameter"),
        ("../../etc/passwd", TensorSpec((1,), "float32"), "no such tensor"),
    ],
)
def test_what_belongs_to_a_stage(stages, name, spec, problem):
    found = state_spec_problem(stages[0], name, spec)
    assert found is None if problem is None else problem in found


def header(stage, tensors, step=3):
    named = tuple(NamedSpec(name, TensorSpec(tuple(t.shape), "float32")) for name, t in tensors.items())
    return Store("run", b"t", 1, stage, step, False, named)


async def chunks(data, size):
    for offset in range(0, len(data), size):
        yield data[offset : offset + size]


def raw(tensors):
    return b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors.values())


def parts(net):
    state = net.state_dict()
    first = {"big.weight": state["big.weight"], "big.bias": state["big.bias"]}
    last = {"out.bias": state["out.bias"], "norm.weight": state["norm.weight"], "norm.bias": state["norm.bias"]}
    return first, last


def sink(folder, stages, graph):
    facts = {"run": "run", "step": 3, "seed": 0, "graph_hash": "g", "config_digest": "c", "ties": graph.ties}
    return checkpoint_sink(folder, stages, **facts)


@pytest.mark.parametrize("size", [1000, CHUNK_BYTES, 1 << 30])
def test_an_upload_becomes_a_checkpoint_whatever_its_chunks(tmp_path, net, graph, stages, size):
    async def test():
        upload = Upload(stages, sink(tmp_path, stages, graph))
        await asyncio.gather(
            *(upload.receive(header(i, part), chunks(raw(part), size)) for i, part in enumerate(parts(net)))
        )
        return await upload.finish()

    asyncio.run(test())
    checkpoint = latest(tmp_path)
    with checkpoint.store as store:
        for part in parts(net):
            for name, tensor in part.items():
                assert torch.equal(store.load(name), tensor)


def test_uploads_that_are_not_expected_are_refused(tmp_path, net, graph, stages):
    first, last = parts(net)

    async def test():
        upload = Upload(stages, sink(tmp_path, stages, graph))
        for wrong, match in [
            (header(2, first), "stage 2"),
            (header(-1, first), "stage -1"),
            (header(1, first), "no such tensor"),
        ]:
            with pytest.raises(RemoteProtocolError, match=match):
                await upload.receive(wrong, chunks(b"", 1))
        waiting = asyncio.create_task(upload.receive(header(0, first), chunks(raw(first) + b"x", 1 << 20)))
        await asyncio.sleep(0)
        with pytest.raises(RemoteProtocolError, match="stage 0"):
            await upload.receive(header(0, first), chunks(b"", 1))
        await upload.receive(header(1, last), chunks(raw(last)[:-1], 1 << 20))
        with pytest.raises(RemoteProtocolError, match="longer than it said"):
            await waiting
        with pytest.raises(CheckpointError, match="lacks bytes"):
            await upload.finish()

    asyncio.run(test())
    assert latest(tmp_path) is None


def test_an_aborted_upload_frees_who_waits_and_lets_the_next_begin(tmp_path, net, graph, stages):
    first, last = parts(net)

    async def test():
        upload = Upload(stages, sink(tmp_path, stages, graph))
        waiting = asyncio.create_task(upload.receive(header(0, first), chunks(raw(first), 1 << 20)))
        after = Upload(stages, sink(tmp_path, stages, graph), before=upload)
        await asyncio.sleep(0.01)
        upload.abort()
        with pytest.raises(RemoteError, match="no longer wanted"):
            await waiting
        await asyncio.gather(
            after.receive(header(0, first), chunks(raw(first), 1 << 20)),
            after.receive(header(1, last), chunks(raw(last), 1 << 20)),
        )
        await after.finish()

    asyncio.run(test())
    assert latest(tmp_path) is not None


def test_a_full_disk_is_told_to_all(stages, net):
    first, last = parts(net)

    def full(specs):
        raise LocalError("no space left for the checkpoint")

    async def test():
        upload = Upload(stages, full)
        results = await asyncio.gather(
            upload.receive(header(0, first), chunks(raw(first), 1 << 20)),
            upload.receive(header(1, last), chunks(raw(last), 1 << 20)),
            return_exceptions=True,
        )
        assert [str(error) for error in results] == ["no space left for the checkpoint"] * 2

    asyncio.run(test())


def test_gradients_go_to_a_folder_of_their_own(tmp_path, net, stages):
    first, _ = parts(net)

    async def test():
        upload = Upload(stages, lambda specs: GradientWriter(tmp_path / "gradients", specs))
        await asyncio.gather(
            upload.receive(header(0, first), chunks(raw(first), 1 << 20)), upload.receive(header(1, {}), chunks(b"", 1))
        )
        await upload.finish()

    asyncio.run(test())
    with WeightStore(tmp_path / "gradients") as store:
        assert sorted(store.names()) == ["big.bias", "big.weight"]
