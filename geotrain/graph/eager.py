"""Keeps a traced model on the path it takes in eager mode. Pure, but for what it patches while it traces.

Libraries ask whether they are being traced and then do something else: build a mask instead of `is_causal`, repeat
key heads instead of grouping them, call an op of their own. That path rounds differently from what the user trains
without us, and is slower. So while tracing, the questions are answered as eager mode would answer them.
"""

import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

_QUESTIONS = ("is_compiling", "is_exporting", "is_dynamo_compiling")


@contextmanager
def as_in_eager_mode(inputs: Collection[str]) -> Iterator[None]:
    """While this is open, `torch.compiler.is_exporting()` and its kin say no, and transformers takes a batch whose
    positions it makes itself (`position_ids` is not among the `inputs`) for what it is: not packed."""
    with ExitStack() as stack:
        for question in _QUESTIONS:
            stack.enter_context(mock.patch.object(torch.compiler, question, return_value=False))
        masking = sys.modules.get("transformers.masking_utils")
        if hasattr(masking, "find_packed_sequence_indices") and "position_ids" not in inputs:
            stack.enter_context(mock.patch.object(masking, "find_packed_sequence_indices", return_value=None))
        if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
            stack.enter_context(mock.patch.object(torch.nn.functional, "grouped_mm", _grouped_mm))
        yield


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor | None = None, **_: object) -> torch.Tensor:
    """A mixture of experts in float32: ATen's own op cannot be traced (its shape function admits bfloat16 only), so
    transformers' twin of it is, and `ops.REWRITES` puts ATen's op into the graph."""
    return torch.ops.transformers.grouped_mm_fallback(a, b, offs)
