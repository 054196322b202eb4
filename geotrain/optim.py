"""Optimizers, learning rates, gradient clipping and optimizer state by name. Pure.

Each stage steps the parameters it holds. All of this works parameter by parameter, so the split changes
nothing: the global gradient norm is computed from one norm a parameter, in the model's own order, as
`torch.nn.utils.clip_grad_norm_` does.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .config import TrainConfig
from .errors import CheckpointError

PREFIX = "optimizer/"
"""State tensors are called `optimizer/<key>/<parameter>`: `optimizer/exp_avg/blocks.0.mlp.up.weight`."""


def build(parameters: Mapping[str, Tensor], train: TrainConfig) -> torch.optim.Optimizer:
    """The job's optimizer over `parameters`, one group. The learning rate is set anew each step (`set_lr`).

    On CPU one tensor at a time, which is what a plain `torch.optim` loop with `foreach=False` does, bit for
    bit; on accelerators torch chooses.
    """
    tensors = list(parameters.values())
    foreach = False if all(t.device.type == "cpu" for t in tensors) else None
    if train.optimizer == "sgd":
        return torch.optim.SGD(
            tensors, lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay, foreach=foreach
        )
    return torch.optim.AdamW(
        tensors,
        lr=train.lr,
        betas=train.betas,
        eps=train.eps,
        weight_decay=train.weight_decay,
        foreach=foreach,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def lr_at(step: int, train: TrainConfig) -> float:
    """The learning rate of a step, counted from 0.

    It rises linearly over `warmup_steps` (step 0 already has 1/warmup_steps of it), then falls from `lr` to
    `lr * min_lr_fraction`, which the last step has, along a line or half a cosine wave.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.lr_schedule == "constant":
        return train.lr
    span = max(1, train.steps - 1 - train.warmup_steps)
    done = min(1.0, (step - train.warmup_steps) / span)
    share = 1.0 - done if train.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return train.lr * (train.min_lr_fraction + (1.0 - train.min_lr_fraction) * share)


def clip_factor(norms: Mapping[str, float], max_norm: float) -> tuple[float, float]:
    """(global norm, factor for every gradient), the bits of `torch.nn.utils.clip_grad_norm_`.

    Args:
        norms: float32 gradient norm of each parameter that has a gradient, in the model's order.
        max_norm: greatest global norm; 0: no clipping, the factor is 1.
    """
    if not norms:
        return 0.0, 1.0
    total = torch.linalg.vector_norm(torch.tensor(list(norms.values()), dtype=torch.float32), 2.0)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0) if max_norm > 0 else torch.ones(())
    return total.item(), factor.item()


def state_names(train: TrainConfig, parameter: str) -> list[str]:
    """The names that `state_tensors` may give to a parameter's state."""
    if train.optimizer == "adamw":
        keys = ["step", "exp_avg", "exp_avg_sq"]
    else:
        keys = ["momentum_buffer"] if train.momentum else []
    return [f"{PREFIX}{key}/{parameter}" for key in keys]


def state_tensors(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> dict[str, Tensor]:
    """The optimizer's state as live tensors by name; empty before the first step. `names` are those of the
    parameters, in the order given to `build`."""
    found: dict[str, Tensor] = {}
    for name, parameter in zip(names, _parameters(optimizer), strict=True):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{PREFIX}{key}/{name}"] = value
    return found


def load_state_tensors(optimizer: torch.optim.Optimizer, names: Iterable[str], tensors: Mapping[str, Tensor]) -> None:
    """Gives the optimizer copies of state tensors. Parameters without any start fresh.

    Raises:
        CheckpointError: a state tensor has not the shape of its parameter, or no parameter is called so.
    """
    states: dict[str, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        key, _, name = full.removeprefix(PREFIX).partition("/")
        states.setdefault(name, {})[key] = tensor
    for name, parameter in zip(names, _parameters(optimizer), strict=True):
        optimizer.state.pop(parameter, None)
        for key, tensor in states.pop(name, {}).items():
            if key != "step" and tensor.shape != parameter.shape:
                shapes = f"{tuple(tensor.shape)}, its parameter {tuple(parameter.shape)}"
                raise CheckpointError(f"{PREFIX}{key}/{name} has shape {shapes}; this checkpoint is of another model")
            # torch keeps Adam's step counts in main memory.
            device = "cpu" if key == "step" else parameter.device
            optimizer.state[parameter][key] = tensor.detach().to(device, copy=True)
    if states:
        raise CheckpointError(
            f"optimizer state of unknown parameter {min(states)!r}; this checkpoint is of another model"
        )


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]
