"""Blocks cover the graph, equal ones have one signature, and measured times add up to those of stages."""

import numpy as np
import pytest
import torch

from geotrain.base import Peer
from geotrain.blocks import BlockTime, CostModel, Profile, blocks, distinct
from geotrain.cost import CostTable
from geotrain.graph import OpGraph, capture
from tests.zoo import make

PEER = Peer("a", 1e9, 1)


def gpt(layers: int) -> OpGraph:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        config = GPT2Config(n_layer=layers, n_embd=32, n_head=2, vocab_size=64, use_cache=False)
        tokens = torch.zeros(2, 16, dtype=torch.long)
        return capture(GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens})


def test_equal_blocks_are_measured_once() -> None:
    few, many = (distinct(blocks(gpt(layers))) for layers in (4, 24))
    assert [b.signature for b in few] == [b.signature for b in many]
    assert len(many) <= 8


@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet", "t5", "unet"])
def test_blocks_cover_the_graph(name: str) -> None:
    net, batch = make(name)
    graph = capture(net, batch)
    found = blocks(graph)
    borders = [0, *(block.end_op for block in found)]
    assert [block.first_op for block in found] == borders[:-1] and borders[-1] == len(graph.ops)


def test_without_a_measurement_seconds_are_flops() -> None:
    graph = gpt(2)
    end = len(graph.ops)
    forward, backward = CostModel(graph).seconds(PEER, 0, end)
    table = CostTable(graph, [0, end])
    assert forward + backward == pytest.approx(table.flops()[0, 1] / 1e9, rel=0.01)


def test_measured_blocks_count_as_what_they_took() -> None:
    graph = gpt(3)
    found = blocks(graph)
    times = {b.signature: BlockTime(0.1 * (i + 1), 0.2, 0.3, 0) for i, b in enumerate(distinct(found))}
    costs = CostModel(graph, {"a": "cpu", "b": "cpu"}, {"cpu": Profile(2e9, times)})
    for block in found:
        time = times[block.signature]
        forward, backward = costs.seconds(Peer("a", 2e9, 1), block.first_op, block.end_op)
        assert forward == pytest.approx(time.forward_s, rel=1e-3) and backward == pytest.approx(0.5, rel=1e-3)
    whole = costs.seconds(Peer("a", 2e9, 1), 0, len(graph.ops))
    assert costs.seconds(Peer("b", 1e9, 1), 0, len(graph.ops)) == pytest.approx([2 * s for s in whole])  # half as fast
    assert costs.seconds(PEER, 0, 9) == pytest.approx([s * 2 for s in costs.seconds(Peer("a", 2e9, 1), 0, 9)])


def test_the_matrix_holds_the_same_seconds() -> None:
    graph = gpt(2)
    costs, points = CostModel(graph), [0, 5, 11, len(graph.ops)]
    forward, backward = costs.matrix(PEER, points)
    assert (forward[0, 2], backward[0, 2]) == pytest.approx(costs.seconds(PEER, 0, 11))
    assert np.allclose(forward[0, 3], forward[0, 1] + forward[1, 3])
