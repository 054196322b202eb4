"""Blocks of any model run on made-up tensors, and their times add up to those of the model."""

import pytest
import torch

from geotrain.base import Peer
from geotrain.blocks import CostModel, Profile, blocks, distinct, to_measure
from geotrain.graph import capture, from_bytes, to_bytes
from geotrain.probe import measure
from tests.pipeline import CPU
from tests.zoo import make


@pytest.mark.parametrize("name", ["gemma2", "mixtral", "resnet", "t5", "unet"])
def test_every_block_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geotrain.probe.BUDGET_S", 0)
    graph = capture(*make(name))
    chosen = to_measure(graph, Peer("a", 1e9, 2**30))
    assert chosen == distinct(blocks(graph))
    again = [from_bytes(to_bytes(block.graph)) for block in chosen]
    flops_per_s, times = measure(again, CPU, 1)
    assert flops_per_s > 0 and len(times) == len(chosen)
    assert all(t.forward_s > 0 and t.input_gradient_s >= 0 and t.weight_gradient_s >= 0 for t in times)
    profile = Profile(flops_per_s, {b.signature: t for b, t in zip(chosen, times, strict=True)})
    costs = CostModel(graph, {"a": "cpu"}, {"cpu": profile})
    assert min(costs.seconds(Peer("a", flops_per_s, 1), 0, len(graph.ops))) > 0


def test_what_is_too_slow_or_too_large_is_not_asked_for() -> None:
    graph = capture(*make("gpt2"))
    assert to_measure(graph, Peer("slow", 1.0, 2**30)) == to_measure(graph, Peer("small", 1e9, 1000)) == ()


def test_bytes_kept_are_those_of_autograd() -> None:
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.Sigmoid(), torch.nn.Linear(128, 1), torch.nn.Flatten(0)
    )
    graph = capture(Sum(net), {"x": torch.randn(32, 64)})
    _, times = measure([block.graph for block in blocks(graph)], CPU, 1)
    assert sum(t.saved_bytes for t in times) == 4 * 32 * 128


class Sum(torch.nn.Module):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).sum()
