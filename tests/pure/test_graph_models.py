"""Any model, cut anywhere: split equals whole, to the last bit."""

import copy
import random

import pytest
import torch

from geotrain.errors import PlanError
from geotrain.graph import OpGraph, capture, cut, from_bytes, seeded, to_bytes
from tests.pipeline import Pipeline
from tests.zoo import ZOO, make


def whole(net, batches, seed, step):
    """Losses, gradients and buffers of the user's own module in a plain loop."""
    losses = []
    for i, batch in enumerate(batches):
        with seeded(seed, step, i):
            out = net(**batch)
        loss = out if isinstance(out, torch.Tensor) else out["loss"]
        losses.append(loss.detach())
        (loss / len(batches)).backward()
    return losses, {n: p.grad for n, p in net.named_parameters()}, dict(net.named_buffers())


def cut_anywhere(graph: OpGraph, cuts: int, rng: random.Random):
    """Stages between random cut points; points that would split a changing buffer are drawn again."""
    for _ in range(50):
        points = sorted(rng.sample(range(1, len(graph.ops)), cuts))
        try:
            return cut(graph, points)
        except PlanError:
            continue
    raise AssertionError("no valid cut in 50 draws")


@pytest.mark.parametrize("name", sorted(ZOO))
def test_split_equals_whole(name):
    net, batch = make(name)
    graph = capture(net, batch)
    assert from_bytes(to_bytes(graph)) == graph
    rng = random.Random(name)
    batches = [batch, {k: v.flip(0) for k, v in batch.items()}]
    for trial, recompute in enumerate([(), range(5), rng.sample(range(5), 2)]):
        stages = cut_anywhere(graph, 4, rng)
        reference = copy.deepcopy(net)
        state = dict(reference.named_parameters()) | dict(reference.named_buffers())
        pipeline = Pipeline(stages, state, seed=7, microbatches=2, recompute=recompute)
        losses = pipeline.step(trial, batches)
        expected_losses, expected_grads, expected_buffers = whole(reference, batches, 7, trial)
        assert [x.item() for x in losses] == [x.item() for x in expected_losses]
        grads = pipeline.gradients()
        assert grads.keys() == expected_grads.keys()
        for key, grad in expected_grads.items():
            same = grads[key] is None if grad is None else torch.equal(grads[key], grad)
            assert same, f"gradient of {key} differs, cuts {[s.first_op for s in stages]}"
        for key, buffer in pipeline.buffers().items():
            assert torch.equal(buffer, expected_buffers[key]), f"buffer {key} differs"


@pytest.mark.parametrize("name", ["gpt2", "resnet", "gpt_neox", "unet"])
def test_evaluation_equals_eval_mode(name):
    net, batch = make(name)
    graph = capture(net, batch)
    reference = copy.deepcopy(net).eval()
    state = dict(net.named_parameters()) | dict(net.named_buffers())
    pipeline = Pipeline(cut_anywhere(graph, 3, random.Random(1)), state)
    before = {n: b.clone() for n, b in pipeline.buffers().items()}
    with torch.no_grad():
        out = reference(**batch)
    loss = out if isinstance(out, torch.Tensor) else out["loss"]
    assert pipeline.step(0, [batch], evaluate=True)[0].item() == loss.item()
    assert all(torch.equal(before[n], b) for n, b in pipeline.buffers().items())
