"""Graphs written by hand, for tests that need exact sizes and no model."""

from collections.abc import Sequence
from itertools import pairwise

from geotrain.base import TensorSpec
from geotrain.graph.ir import Op, OpGraph, Parameter, Ref, Value


def floats(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "float32")


def chain(widths: Sequence[int], rows: int = 4) -> OpGraph:
    """Linear layers with ReLU between, from `widths[0]` to `widths[-1]` features, and the mean as the loss.

    Parameters are `w0`, `w1`, ...; ops are `linear0`, `relu0`, `linear1`, ..., `loss`; the input is `x`, of
    shape (rows, widths[0]), and needs no gradient.
    """
    ops: list[Op] = []
    values = {"x": Value(floats(rows, widths[0]))}
    parameters: dict[str, Parameter] = {}
    here = "x"
    for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
        parameters[f"w{i}"] = Parameter(floats(fan_out, fan_in), True)
        linear, relu = f"linear{i}", f"relu{i}"
        ops.append(Op(linear, "aten.linear.default", (Ref(here), Ref(f"w{i}")), {}, f"blocks.{i}"))
        ops.append(Op(relu, "aten.relu.default", (Ref(linear),), {}, f"blocks.{i}"))
        values |= {name: Value(floats(rows, fan_out), True) for name in (linear, relu)}
        here = relu
    ops.append(Op("loss", "aten.mean.default", (Ref(here),), {}, ""))
    values["loss"] = Value(floats(), True)
    return OpGraph(("x",), tuple(ops), values, parameters, {}, {}, "loss")
