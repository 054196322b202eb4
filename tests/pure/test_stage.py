"""What a stage keeps between forward and backward, with and without recomputing."""

import copy
import weakref

import torch
from torch import nn

from geotrain.graph import capture, cut
from tests.pipeline import Pipeline


class Saved:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Energy(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


def bytes_saved(recompute: bool, microbatches: int) -> int:
    """By autograd, after so many forwards."""
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    graph = capture(Energy(net), {"x": torch.randn(32, 64)})
    [stage] = Pipeline(cut(graph, []), dict(Energy(net).named_parameters()), recompute=[0] * recompute).runners
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor)
        alive.add(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        for i in range(microbatches):
            stage.forward(0, i, {"x": torch.randn(32, 64)})
        return sum(saved.tensor.nbytes for saved in alive)


def test_recomputing_keeps_nothing_but_what_came() -> None:
    assert bytes_saved(False, 4) == 4 * bytes_saved(False, 1) > 0
    assert bytes_saved(True, 4) == 0


class Counting(nn.Module):
    """The result depends on a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes.add_(1)
        return self.linear(x * self.passes).square().mean()


def test_buffers_count_each_microbatch_once() -> None:
    net = Counting()
    graph, batches = capture(copy.deepcopy(net), {"x": torch.randn(4, 8)}), [{"x": torch.randn(4, 8)} for _ in range(3)]
    state = dict(net.named_parameters()) | dict(net.named_buffers())
    kept, again = (Pipeline(cut(graph, []), state, microbatches=3, recompute=chosen) for chosen in ((), (0,)))
    assert kept.step(0, batches) == again.step(0, batches)
    assert again.buffers()["passes"] == kept.buffers()["passes"] == 3
    grads, same = kept.gradients(), again.gradients()
    assert grads.keys() == same.keys() and all(torch.equal(g, same[n]) for n, g in grads.items())
