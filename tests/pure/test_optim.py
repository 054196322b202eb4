"""Learning rates, clipping and optimizer state, against plain torch to the last bit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geotrain import optim
from geotrain.config import TrainConfig
from geotrain.errors import CheckpointError

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def gradients(sizes, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator) * scale for n in sizes]


@given(SIZES, st.floats(1e-6, 1e6), st.floats(1e-3, 1e3), st.integers(0, 2**31))
def test_clipping_has_the_bits_of_torch(sizes, scale, max_norm, seed):
    grads = gradients(sizes, scale, seed)
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    norms = {str(i): torch.linalg.vector_norm(g).item() for i, g in enumerate(grads)}
    total, factor = optim.clip_factor(norms, max_norm)
    assert total == expected.item()
    for parameter, grad in zip(parameters, grads, strict=True):
        assert torch.equal(grad * factor, parameter.grad)


def test_clipping_turned_off_or_without_gradients():
    assert optim.clip_factor({"a": 3.0, "b": 4.0}, 0) == (5.0, 1.0)
    assert optim.clip_factor({}, 1.0) == (0.0, 1.0)
    assert not math.isfinite(optim.clip_factor({"a": math.inf}, 1.0)[0])


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(1, 50), st.integers(0, 60), st.floats(0, 1))
def test_learning_rates(schedule, steps, warmup, floor):
    train = TrainConfig(lr=0.5, lr_schedule=schedule, steps=steps, warmup_steps=warmup, min_lr_fraction=floor)
    rates = [optim.lr_at(k, train) for k in range(steps)]
    assert all(0 < r <= 0.5 for r in rates[:warmup])
    assert all(0.5 * floor - 1e-12 <= r <= 0.5 + 1e-12 for r in rates[warmup:])
    assert rates[:warmup] == sorted(rates[:warmup]) and rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if warmup < steps:
        assert rates[warmup] == pytest.approx(0.5)
    if schedule == "constant":
        assert rates[warmup:] == [0.5] * max(0, steps - warmup)
    elif warmup < steps - 1:
        assert rates[-1] == pytest.approx(0.5 * floor)


def test_learning_rate_by_hand():
    train = TrainConfig(lr=1.0, lr_schedule="cosine", steps=13, warmup_steps=4, min_lr_fraction=0.2)
    assert [optim.lr_at(k, train) for k in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert optim.lr_at(8, train) == pytest.approx(0.6)  # halfway down, between 1 and 0.2
    assert optim.lr_at(12, train) == pytest.approx(0.2)
    assert optim.lr_at(99, train) == pytest.approx(0.2)


TRAINS = [
    TrainConfig(optimizer="adamw", lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1),
    TrainConfig(optimizer="sgd", lr=1e-2, momentum=0.9, weight_decay=0.1),
    TrainConfig(optimizer="sgd", lr=1e-2),
]


def plain(parameters, train):
    if train.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay, foreach=False
        )
    return torch.optim.AdamW(
        parameters, lr=train.lr, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay, foreach=False
    )


def fresh():
    return {f"p{i}": torch.nn.Parameter(g) for i, g in enumerate(gradients([3, 5], 1.0, 0))}


def run(optimizer, parameters, steps):
    for k in steps:
        for parameter, grad in zip(parameters.values(), gradients([3, 5], 1.0, k + 1), strict=True):
            parameter.grad = grad
        optim.set_lr(optimizer, 1e-2 / (k + 1))
        optimizer.step()


@pytest.mark.parametrize("train", TRAINS, ids=["adamw", "momentum", "sgd"])
def test_optimizers_split_by_parameter_equal_one(train):
    whole, split = fresh(), fresh()
    one = plain(list(whole.values()), train)
    run(one, whole, range(4))
    for number, (name, parameter) in enumerate(split.items()):
        own = optim.build({name: parameter}, train)
        for k in range(4):
            parameter.grad = gradients([3, 5], 1.0, k + 1)[number]
            optim.set_lr(own, 1e-2 / (k + 1))
            own.step()
    assert all(torch.equal(whole[n], split[n]) for n in whole)


@pytest.mark.parametrize("train", TRAINS, ids=["adamw", "momentum", "sgd"])
def test_resume_is_exact(train):
    straight = fresh()
    run(optim.build(straight, train), straight, range(6))

    first = fresh()
    optimizer = optim.build(first, train)
    assert optim.state_tensors(optimizer, first) == {}
    run(optimizer, first, range(3))
    saved = {name: t.clone() for name, t in optim.state_tensors(optimizer, first).items()}
    second = {name: torch.nn.Parameter(p.detach().clone()) for name, p in first.items()}
    resumed = optim.build(second, train)
    optim.load_state_tensors(resumed, second, saved)
    run(resumed, second, range(3, 6))
    assert all(torch.equal(straight[n], second[n]) for n in straight)
    # What was loaded is a copy: training on has not changed what was saved.
    again = optim.state_tensors(optimizer, first)
    assert all(torch.equal(again[n], saved[n]) for n in saved)


def test_state_names_and_complaints():
    parameters = fresh()
    optimizer = optim.build(parameters, TRAINS[0])
    run(optimizer, parameters, range(1))
    state = optim.state_tensors(optimizer, parameters)
    assert set(state) == {f"optimizer/{key}/p{i}" for key in ("step", "exp_avg", "exp_avg_sq") for i in (0, 1)}
    assert state["optimizer/step/p0"].shape == () and state["optimizer/step/p0"].item() == 1
    state["optimizer/exp_avg/p0"].fill_(7.0)  # live
    assert optimizer.state[parameters["p0"]]["exp_avg"].eq(7.0).all()
    with pytest.raises(CheckpointError, match="of another model"):
        optim.load_state_tensors(optimizer, parameters, {"optimizer/exp_avg/p0": torch.zeros(4)})
    with pytest.raises(CheckpointError, match="unknown parameter 'p9'"):
        optim.load_state_tensors(optimizer, parameters, {"optimizer/exp_avg/p9": torch.zeros(4)})
