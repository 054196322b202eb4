"""Lets a model without memory be traced as the same model on the CPU. Pure.

On the meta device some ops take another path than on the CPU (the layout of attention's result, the shape function
of `histc`), so the trace would not be that of the model people train. Fake tensors have no memory either, but
follow the CPU's rules: the trace is the same, op for op.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def on_fake_cpu(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """While it is open, a module with tensors on the meta device holds fake ones on the CPU; gives the inputs as such.
    A module without is left alone."""
    tables: list[dict[str, Any]] = [t for part in module.modules() for t in (part._parameters, part._buffers)]
    tensors = {id(t): t for table in tables for t in table.values() if t is not None}
    if not any(t.is_meta for t in (*tensors.values(), *inputs.values())):
        yield dict(inputs)
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = {i: _fake(t, mode) for i, t in tensors.items()}
    before = [dict(table) for table in tables]
    try:
        for table in tables:
            table.update({name: fakes[id(t)] for name, t in table.items() if t is not None})
        yield {name: _fake(t, mode) for name, t in inputs.items()}
    finally:
        for table, old in zip(tables, before, strict=True):
            table.update(old)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
    return fake
