"""What each op costs: FLOPs forward and backward, and what autograd keeps for its derivative. Pure.

A FLOP here is one of a large matrix product. Other ops move more than they compute, so they are charged the
matrix-product FLOPs that fit into their time, by element; the figures were measured with torch on one AVX-512
core (96 GFLOP/s, float32) and rounded. They only have to be right in proportion: peers are measured.
"""

from collections.abc import Mapping
from math import prod

from .base import TensorSpec
from .graph.ir import Op, OpGraph, Ref, op_refs
from .graph.ops import GETITEM, argument, base_name, is_in_place

_ELEMENT = 10
"""FLOPs an element of an op that only moves memory (add, mul, copy): 7 to 13 measured."""
_SOFTMAX, _DROPOUT = 45, 500
_PER_ELEMENT: Mapping[str, int] = {
    "layer_norm": 30, "batch_norm": 30, "group_norm": 30, "instance_norm": 30, "rms_norm": 30,
    "native_layer_norm": 30, "native_batch_norm": 30, "native_group_norm": 30,
    "softmax": _SOFTMAX, "_softmax": _SOFTMAX, "log_softmax": _SOFTMAX, "_log_softmax": _SOFTMAX,
    "cross_entropy_loss": _SOFTMAX, "logsumexp": _SOFTMAX,
    "exp": 65, "log": 65, "sigmoid": 65, "softplus": 65,
    "gelu": 25, "silu": 25, "tanh": 220, "sin": 65, "cos": 65, "erf": 65,
    "dropout": _DROPOUT, "native_dropout": _DROPOUT, "feature_dropout": _ELEMENT, "bernoulli": 200,
    "rand": 200, "rand_like": 200, "randn": 200, "randn_like": 200,
}  # fmt: skip
_ATTENTION_DROPOUT = 1300
"""FLOPs a score: with dropout, torch on a CPU leaves its fused attention kernel (1200 to 1500 measured)."""

_VIEWS = frozenset(
    """
    adjoint alias broadcast_tensors broadcast_to chunk detach diagonal dsplit expand expand_as getitem
    hsplit imag lift lift_fresh mH mT moveaxis movedim narrow numpy_T permute real select slice split
    split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unfold unsafe_chunk
    unsafe_split unsafe_split_with_sizes unsqueeze view view_as view_as_complex view_as_real vsplit
    """.split()
)
_VIEWS_IF_CONTIGUOUS = frozenset(["reshape", "reshape_as", "contiguous", "flatten", "unflatten", "_unsafe_view"])
_FIRST_OPERANDS: Mapping[str, int] = {
    "linear": 0, "mm": 0, "bmm": 0, "matmul": 0, "linalg_matmul": 0, "mv": 0, "dot": 0, "inner": 0,
    "_grouped_mm": 0, "addmm": 1, "addbmm": 1, "baddbmm": 1, "addmv": 1,
}  # fmt: skip
"""Matrix products, and the position of the first factor; the second follows it."""
_CONVOLUTIONS = frozenset(
    """
    _convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
    """.split()
)
_RECURRENT = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])

_SAVE_NOTHING = frozenset(
    """
    _adaptive_avg_pool2d _to_copy adaptive_avg_pool2d add avg_pool1d avg_pool2d avg_pool3d cat clone
    concat concatenate constant_pad_nd copy cross_entropy_loss cumsum dropout feature_dropout fill flip
    mean native_dropout neg negative pad pixel_shuffle repeat repeat_interleave roll rsub select_scatter
    slice_scatter stack sub sum to tril triu type_as upsample_bilinear2d upsample_nearest1d
    upsample_nearest2d zeros_like
    """.split()
)
"""Their derivatives need shapes, or what `extra_saved_bytes` counts."""
_SAVE_OUTPUT = frozenset(
    """
    _log_softmax _softmax cumprod exp log_softmax reciprocal relu rsqrt sigmoid softmax sqrt tanh
    """.split()
)
_SAVE_THE_OTHER = frozenset(["mul", "div", "multiply", "divide", *_FIRST_OPERANDS, *_CONVOLUTIONS])
"""A factor is saved only where the other one needs a gradient."""


def _base(op: Op) -> str:
    base = base_name(op.target)
    return base[:-1] if op.target != GETITEM and is_in_place(op.target) else base


def spec_of(graph: OpGraph, name: str) -> TensorSpec | None:
    """What is known of a value, parameter, buffer or constant; None for an op with several results."""
    known = graph.values.get(name) or graph.parameters.get(name) or graph.buffers.get(name) or graph.constants.get(name)
    return None if known is None else known.spec


def needs_grad(graph: OpGraph, name: str) -> bool:
    known = graph.values.get(name) or graph.parameters.get(name)
    return known is not None and known.requires_grad


def op_flops(op: Op, graph: OpGraph) -> int:
    """FLOPs of one call, forward."""
    base = _base(op)
    shapes = [spec.shape for name in op_refs(op) if (spec := spec_of(graph, name)) is not None]
    out = spec_of(graph, op.name)
    elements = max([prod(shape) for shape in shapes] + [0 if out is None else out.numel])
    if base in _VIEWS or not elements:
        return 0
    if out is not None and shapes and base in _FIRST_OPERANDS:
        return 2 * out.numel * _shape(op, graph, _FIRST_OPERANDS[base])[-1]
    if out is not None and base in _CONVOLUTIONS:
        transposed = "transpose" in base or ("convolution" in base and bool(argument(op, 6, "transposed", False)))
        positions = prod(_shape(op, graph, 0)) if transposed else out.numel
        return 2 * positions * prod(_shape(op, graph, 1)[1:])
    if out is not None and base == "scaled_dot_product_attention":
        fused, scores = _attention(op, graph)
        return fused + scores * (_ATTENTION_DROPOUT if argument(op, 4, "dropout_p", 0.0) else 0)
    if out is not None and base == "einsum":
        return _einsum_flops(op, graph)
    if base in _RECURRENT:
        rows = prod(shapes[0][:-1])
        return 2 * rows * sum(prod(s) for s in shapes[1:] if len(s) == 2)
    if base in ("embedding", "index_select", "index", "gather") and out is not None:
        elements = out.numel
    return elements * _PER_ELEMENT.get(base, _ELEMENT)


def _shape(op: Op, graph: OpGraph, position: int) -> tuple[int, ...]:
    argument = op.args[position] if len(op.args) > position else None
    spec = spec_of(graph, argument.name) if isinstance(argument, Ref) else None
    return (1, 1) if spec is None else (spec.shape or (1,))


def _attention(op: Op, graph: OpGraph) -> tuple[int, int]:
    """FLOPs without dropout, and how many scores there are."""
    query, key, value = (_shape(op, graph, i) for i in range(3))
    scores = prod(query[:-1]) * key[-2]
    return scores * (2 * (query[-1] + value[-1]) + _SOFTMAX), scores


def _einsum_flops(op: Op, graph: OpGraph) -> int:
    """Twice the product of all index ranges. An ellipsis counts as nothing."""
    equation = str(op.args[0]).replace(" ", "").partition("->")[0].split(",")
    shapes = [spec.shape for name in op_refs(op) if (spec := spec_of(graph, name)) is not None]
    sizes = {
        letter: size
        for letters, shape in zip(equation, shapes, strict=False)
        for letter, size in zip(letters, shape, strict=False)
        if letter != "."
    }
    return 2 * prod(sizes.values())


def backward_flops(op: Op, graph: OpGraph) -> int:
    """FLOPs of one call's derivative: of a product, as much as the forward for each factor that needs it."""
    if not _differentiates(op, graph):
        return 0
    base, forward = _base(op), op_flops(op, graph)
    if base in _FIRST_OPERANDS or base in _CONVOLUTIONS:
        first = _FIRST_OPERANDS.get(base, 0)
        return forward * sum(needs_grad(graph, name) for arg in op.args[first : first + 2] for name in _names(arg))
    if base == "einsum":
        return forward * sum(needs_grad(graph, name) for name in op_refs(op))
    if base in _RECURRENT:
        return 2 * forward
    if base == "scaled_dot_product_attention":
        return _attention(op, graph)[0] * 5 // 2  # five products instead of two: the scores are made again
    return forward // _PER_ELEMENT.get(base, _ELEMENT) * min(_PER_ELEMENT.get(base, _ELEMENT), _SOFTMAX)


def _names(arg: object) -> tuple[str, ...]:
    return (arg.name,) if isinstance(arg, Ref) else ()


def _differentiates(op: Op, graph: OpGraph) -> bool:
    if op.name in graph.values:
        return graph.values[op.name].requires_grad
    return op.grad and any(needs_grad(graph, name) for name in op_refs(op))


def saved_values(op: Op, graph: OpGraph) -> list[str]:
    """The values that autograd keeps for the op's derivative."""
    base, names = _base(op), op_refs(op)
    if base in _VIEWS or base in _VIEWS_IF_CONTIGUOUS or base in _SAVE_NOTHING or not _differentiates(op, graph):
        return []
    if base in _SAVE_OUTPUT:
        return [op.name]
    if base in _SAVE_THE_OTHER:
        first = _FIRST_OPERANDS.get(base, 0)
        factors = [name for arg in op.args[first : first + 2] for name in _names(arg)]
        grads = [needs_grad(graph, name) for name in factors]
        kept = [name for i, name in enumerate(factors) if any(grads[:i] + grads[i + 1 :])]
        return factors if base == "div" and grads[1:] == [True] else kept
    return [*names, op.name] if base == "scaled_dot_product_attention" else list(names)


def extra_saved_bytes(op: Op, graph: OpGraph) -> int:
    """Bytes kept for the derivative that are no value of the graph: masks, results inside composite ops."""
    if not _differentiates(op, graph):
        return 0
    base, out = _base(op), spec_of(graph, op.name)
    size = 0 if out is None else out.nbytes
    if base in ("dropout", "native_dropout"):
        return size if op.random is not None else 0  # the mask, in the input's dtype
    if base == "cross_entropy_loss":
        spec = spec_of(graph, op_refs(op)[0])
        return 0 if spec is None else spec.nbytes  # the log-softmax
    if base == "scaled_dot_product_attention" and out is not None:
        scores = out.numel // out.shape[-1] * _shape(op, graph, 1)[-2] * (out.nbytes // out.numel)
        dropout = 4 * scores if argument(op, 4, "dropout_p", 0.0) else 0
        return dropout + out.nbytes // out.shape[-1]  # softmax, mask, their product; the log-sum-exp
    if base in ("rms_norm", "max_pool2d", "einsum", *_RECURRENT):
        return 2 * max(size, *(spec.nbytes for n in op_refs(op) if (spec := spec_of(graph, n)) is not None))
    if graph.autocast is not None and op.autocast and (base in _FIRST_OPERANDS or base in _CONVOLUTIONS):
        specs = (spec_of(graph, name) for name in op_refs(op))
        return sum(2 * spec.numel for spec in specs if spec is not None)  # 16-bit copies of the factors
    return 0


def storages(graph: OpGraph) -> Mapping[str, str]:
    """Value -> the value whose memory it is a view of."""
    root: dict[str, str] = {}
    for op in graph.ops:
        base, names = _base(op), op_refs(op)
        if not names:
            continue
        spec = spec_of(graph, names[0])
        dense = spec is not None and spec.stride is None
        if base in _VIEWS or (base in _VIEWS_IF_CONTIGUOUS and dense):
            root[op.name] = root.get(names[0], names[0])
    return root
