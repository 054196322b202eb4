"""Microbatches weigh as much as they hold: sums over labels, not means of means."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from geotrain.data import WeightedSource
from geotrain.graph import capture, cut
from geotrain.graph.weigh import WEIGHT, Places, weighted
from tests.pipeline import Pipeline
from tests.zoo import make


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens, labels):
        return F.cross_entropy(self.head(torch.tanh(self.embed(tokens))).flatten(0, 1), labels.flatten())


def batches(*counts):
    """Microbatches of 2 x 6 tokens with so many labels each."""
    made = []
    for count in counts:
        tokens = torch.randint(0, 16, (2, 6))
        labels = tokens.flatten().clone()
        labels[torch.randperm(12)[count:]] = -100
        made.append({"tokens": tokens, "labels": labels.view(2, 6)})
    return made


class Given:
    tokens_per_microbatch, held_out_microbatches, vocab_size, tokenizer, masked = 12, 3, None, None, True

    def __init__(self, made):
        self._made = made

    def train(self, step, microbatch):
        return self._made[microbatch]

    held_out = lambda self, index: self._made[index]  # noqa: E731


@pytest.mark.parametrize("counts", [(12, 1, 5), (3, 0, 7), (4, 4, 4)])
def test_loss_and_gradients_are_those_of_all_labels_at_once(counts):
    torch.manual_seed(0)
    net, made = Net().double(), batches(*counts)
    graph = capture(net, made[0])
    places = Places.of(graph)
    assert places is not None and [places.count(batch) for batch in made] == list(counts)
    graph = weighted(graph)
    source = WeightedSource(Given(made), places, 3, 3)
    state = dict(net.named_parameters())
    pipeline = Pipeline(cut(graph, [len(graph.ops) // 2]), state, microbatches=3)
    losses = pipeline.step(0, [source.train(0, i) for i in range(3)])
    whole = {name: torch.cat([batch[name] for batch in made]) for name in made[0]}
    expected = net(**whole)
    expected.backward()
    assert sum(losses).item() / 3 == pytest.approx(expected.item(), rel=1e-7)
    for name, gradient in pipeline.gradients().items():
        torch.testing.assert_close(gradient, state[name].grad, rtol=1e-6, atol=1e-9)
    evaluated = pipeline.step(0, [source.held_out(i) for i in range(3)], evaluate=True)
    assert sum(evaluated).item() / 3 == pytest.approx(expected.item(), rel=1e-7)
    if len(set(counts)) == 1:
        assert all(source.train(0, i)[WEIGHT].item() == 1.0 for i in range(3))


def test_it_counts_what_the_loss_counts():
    """A causal model shifts, a masked one does not, and where the loss is none over labels nothing is counted."""
    for name, count in [("gpt2", 2 * 15), ("bert", None), ("t5", 2 * 12), ("resnet", 4)]:
        net, batch = make(name)
        places = Places.of(capture(net, batch))
        expected = int((batch["labels"] != -100).sum()) if count is None else count
        assert places is not None and places.count(batch) == expected
    assert Places.of(capture(*make("unet"))) is None


def test_all_weights_one_change_no_bit():
    net, batch = make("gpt2")
    graph = capture(net, batch)
    state = dict(net.named_parameters()) | dict(net.named_buffers())
    points = sorted(random.Random(0).sample(range(1, len(graph.ops)), 2))
    plain, weighed = Pipeline(cut(graph, points), state), Pipeline(cut(weighted(graph), points), state)
    assert plain.step(0, [batch])[0].item() == weighed.step(0, [{**batch, WEIGHT: torch.ones(())}])[0].item()
    gradients = weighed.gradients()
    assert all(g is None or torch.equal(g, gradients[name]) for name, g in plain.gradients().items())
