"""How many places a model's loss is the mean over, and a weight for it: exact sums over uneven microbatches. Pure.

A model gives the mean loss over the places that count: labels of -100 do not. The mean of such means is not the mean
over all places of a step when microbatches hold different numbers of them (padding, masks, packed samples, a short
last batch). So the graph gets one more input, the microbatch's weight: its share of the step's places times the
number of microbatches. The mean over microbatches of loss times weight is then the mean over places; so are its
gradients. Where all hold as many, the weight is exactly 1 and changes no bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..base import TensorSpec
from .interpret import Program
from .ir import Op, OpGraph, Ref, Value, op_refs
from .ops import argument, base_name, to_dtype
from .serial import constant_tensor

WEIGHT = "loss_weight"
"""The name of the input."""

_MEAN = 1
"""`at::Reduction::Mean`, ATen's own default."""


class Places:
    """Counts the places of a microbatch that a model's loss counts."""

    def __init__(self, graph: OpGraph, loss: Op, ops: Sequence[Op]) -> None:
        """`ops` make the loss's target."""
        target = loss.args[1]
        assert isinstance(target, Ref)
        self._target, self._ignored = target.name, int(argument(loss, 4, "ignore_index", -100))
        self._constants = {name: constant_tensor(c, torch.device("cpu")) for name, c in graph.constants.items()}
        self._program = Program(ops, keep={self._target}, device=torch.device("cpu"))

    @staticmethod
    def of(graph: OpGraph) -> "Places | None":
        """None for a loss that is not one mean cross-entropy over labels that are made from inputs alone."""
        losses = [op for op in graph.ops if base_name(op.target) in ("cross_entropy_loss", "nll_loss_nd")]
        if len(losses) != 1 or argument(losses[0], 3, "reduction", _MEAN) != _MEAN:
            return None
        target = losses[0].args[1]
        if argument(losses[0], 2, "weight") is not None or not isinstance(target, Ref):
            return None
        ops = _made_from_inputs(graph, target.name)
        return None if ops is None else Places(graph, losses[0], ops)

    def count(self, inputs: Mapping[str, torch.Tensor]) -> int:
        """Of one microbatch. Inputs that the model does not take are ignored."""
        env = {**self._constants, **inputs}
        self._program.run(env)
        target = env[self._target]
        return target.shape[0] if target.is_floating_point() else int((target != self._ignored).sum())


def weighted(graph: OpGraph) -> OpGraph:
    """The graph with its loss multiplied by a further input, a float32 number called `WEIGHT`. A weight of zero makes
    the loss zero, also where it is the mean over nothing."""
    spec = graph.values[graph.loss].spec
    weight = TensorSpec((), "float32")
    dtype = torch.promote_types(to_dtype(spec.dtype), torch.float32)
    result = TensorSpec(spec.shape, str(dtype).removeprefix("torch."))
    some, product, loss = "%weight_some", "%weight_product", "%weight_loss"
    ops = (
        Op(some, "aten.gt.Scalar", (Ref(WEIGHT), 0), {}),
        Op(product, "aten.mul.Tensor", (Ref(graph.loss), Ref(WEIGHT)), {}),
        Op(loss, "aten.where.ScalarOther", (Ref(some), Ref(product), 0), {}),
    )
    values = {
        WEIGHT: Value(weight), some: Value(TensorSpec((), "bool")),
        product: Value(result, True), loss: Value(result, True),
    }  # fmt: skip
    return replace(
        graph, inputs=(*graph.inputs, WEIGHT), ops=(*graph.ops, *ops), values={**graph.values, **values}, loss=loss
    )


def _made_from_inputs(graph: OpGraph, name: str) -> list[Op] | None:
    """The ops that make a value, or None if it depends on a parameter or a buffer, or on chance."""
    needed, ops = {name}, list[Op]()
    for op in reversed(graph.ops):
        if op.name in needed:
            if op.random is not None:
                return None
            needed.update(op_refs(op))
            ops.append(op)
    known = {*graph.inputs, *graph.constants, *(op.name for op in ops)}
    return ops[::-1] if needed <= known else None
