"""The ATen ops a graph may name, and what the rest of the package must know of them. Pure.

A peer interprets only these: they compute tensors from tensors, touch no file, process or device setting, and
return no uninitialized memory (`empty` is captured as `zeros`, so that a graph cannot read what was in a
volunteer's memory before). In-place twins of a listed op (`add_`) are allowed where they change a buffer.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from ..errors import CaptureError, GraphFormatError
from .ir import Arg, Device, Dtype, Layout, MemoryFormat, Op, Ref

GETITEM = "getitem"

ALLOWED = frozenset(
    """
    __and__ __lshift__ __or__ __rshift__ __xor__ _adaptive_avg_pool2d _adaptive_avg_pool3d _cdist_forward
    _convolution _embedding_bag _fft_c2c _fft_c2r _fft_r2c _grouped_mm _log_softmax _softmax _to_copy
    _unsafe_index _unsafe_view _weight_norm
    abs absolute acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d add addbmm addcdiv addcmul addmm addmv addr adjoint
    affine_grid_generator alias all alpha_dropout amax amin aminmax angle any arange arccos arccosh arcsin arcsinh
    arctan arctan2 arctanh argmax argmin argsort as_strided asin asinh atan atan2 atanh atleast_1d atleast_2d
    atleast_3d avg_pool1d avg_pool2d avg_pool3d baddbmm bartlett_window batch_norm bernoulli bilinear
    binary_cross_entropy binary_cross_entropy_with_logits bincount bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor blackman_window block_diag bmm broadcast_tensors broadcast_to
    bucketize cat cdist ceil celu channel_shuffle cholesky chunk clamp clamp_max clamp_min clip clone col2im
    column_stack complex concat concatenate conj conj_physical constant_pad_nd contiguous conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d convolution copy copysign cos cosh cosine_embedding_loss
    cosine_similarity cross cross_entropy_loss ctc_loss cummax cummin cumprod cumsum cumulative_trapezoid deg2rad
    det detach diag diag_embed diagflat diagonal diagonal_copy diagonal_scatter diff digamma dist div divide dot dropout
    dsplit dstack einsum elu embedding embedding_bag eq erf erfc erfinv exp exp2 expand expand_as expm1 exponential eye
    feature_alpha_dropout feature_dropout fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_ifft
    fft_ifft2 fft_ifftn fft_ifftshift fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn
    fill fix flatten flip fliplr flipud float_power floor floor_divide fmax fmin fmod frac full full_like gather
    ge gelu ger glu grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru greater greater_equal gt
    hamming_window hann_window hardshrink hardsigmoid hardswish hardtanh heaviside hinge_embedding_loss histc
    hsplit hstack huber_loss hypot i0 im2col imag index index_add index_copy index_fill index_put index_reduce
    index_select inner instance_norm inverse isclose isfinite isin isinf isnan isneginf isposinf isreal kl_div
    kron kthvalue l1_loss layer_norm ldexp le leaky_relu lerp less less_equal lgamma lift lift_fresh
    lift_fresh_copy linalg_cross linalg_det linalg_diagonal linalg_inv linalg_matmul linalg_matrix_norm
    linalg_multi_dot linalg_norm linalg_qr linalg_slogdet linalg_solve linalg_vecdot linalg_vector_norm linear
    linspace log log10 log1p log2 log_normal log_sigmoid log_softmax logaddexp logaddexp2 logcumsumexp logdet
    logical_and logical_not logical_or logical_xor logit logspace logsumexp lstm lt mH mT margin_ranking_loss
    masked_fill masked_scatter matmul matrix_exp matrix_power max max_pool1d max_pool1d_with_indices max_pool2d
    max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d max_unpool3d maximum mean median
    meshgrid min minimum mish mm mode moveaxis movedim mse_loss msort mul multi_margin_loss multilabel_margin_loss
    multinomial multiply mv mvlgamma nan_to_num nanmean nanmedian nansum narrow narrow_copy native_batch_norm
    native_dropout native_group_norm native_layer_norm ne neg negative new_full new_ones new_zeros nll_loss
    nll_loss2d nll_loss_nd norm normal not_equal numpy_T one_hot ones ones_like outer pad pairwise_distance
    permute pinverse pixel_shuffle pixel_unshuffle polar polygamma positive pow prelu prod qr quantile rad2deg
    rand rand_like randint randint_like randn randn_like random randperm range ravel real reciprocal
    reflection_pad1d reflection_pad2d
    reflection_pad3d relu relu6 remainder renorm repeat repeat_interleave replication_pad1d
    replication_pad2d replication_pad3d reshape reshape_as resolve_conj resolve_neg rms_norm rnn_relu rnn_tanh
    roll rot90 round rrelu rsqrt rsub scalar_tensor scaled_dot_product_attention scatter scatter_add
    scatter_reduce searchsorted select select_scatter selu sgn sigmoid sign signbit silu sin sinc sinh slice
    slice_scatter smooth_l1_loss soft_margin_loss softmax softplus softshrink sort special_bessel_j0 special_entr
    special_erf special_erfcx special_erfinv special_expit special_expm1 special_gammaln special_i0e
    special_log1p special_log_ndtr special_log_softmax special_logit special_logsumexp special_ndtr special_softmax
    special_xlog1py split split_with_sizes sqrt square squeeze stack std std_mean stft sub subtract sum swapaxes
    swapdims t take take_along_dim tan tanh tensor_split tensordot threshold tile to topk trace transpose
    trapezoid trapz triangular_solve tril tril_indices triplet_margin_loss triu triu_indices true_divide trunc
    type_as unbind unflatten unfold uniform unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_trilinear3d vander var var_mean view view_as view_as_complex view_as_real vsplit
    vstack where xlogy zero zeros zeros_like
    """.split()
)

REWRITES: Mapping[str, str] = {
    # Uninitialized memory never leaves a peer.
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
    # What transformers' mixtures of experts call while they are traced; eager mode calls the ATen op.
    "transformers.grouped_mm_fallback.default": "aten._grouped_mm.default",
}

DROPPED = frozenset(
    """
    aten._assert_async.default aten._assert_async.msg aten._assert_scalar.default
    aten._assert_tensor_metadata.default aten._functional_assert_async.msg
    aten.sym_constrain_range.default aten.sym_constrain_range_for_size.default
    """.split()
)
"""Checks that export records; a static graph has passed them already."""

# Position and name of the argument that turns training behavior on, and its value in evaluation. Keyed by base
# name; what is not given keeps its default, which is already the evaluation value.
_EVALUATION: Mapping[str, tuple[int, str, Any]] = {
    "dropout": (2, "train", False),
    "feature_dropout": (2, "train", False),
    "alpha_dropout": (2, "train", False),
    "feature_alpha_dropout": (2, "train", False),
    "native_dropout": (2, "train", False),
    "batch_norm": (5, "training", False),
    "native_batch_norm": (5, "training", False),
    "rrelu": (3, "training", False),
    "scaled_dot_product_attention": (4, "dropout_p", 0.0),
    "lstm": (6, "train", False),
    "gru": (6, "train", False),
    "rnn_tanh": (6, "train", False),
    "rnn_relu": (6, "train", False),
}

# Updates running statistics that its schema does not declare: positions of (running mean, running variance).
STATISTICS: Mapping[str, tuple[int, int]] = {
    "batch_norm": (3, 4),
    "native_batch_norm": (3, 4),
    "instance_norm": (3, 4),
}

_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64 float32 bfloat16 float16 int64 int32 int16 int8 uint8 uint16 uint32 bool complex64 complex128"
    ).split()
}
_LAYOUTS = {"strided": torch.strided}
_MEMORY_FORMATS = {
    name: getattr(torch, name) for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}


def base_name(target: str) -> str:
    """`aten.add_.Tensor` -> `add_`."""
    return target.split(".")[1] if "." in target else target


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def to_dtype(name: str) -> torch.dtype:
    """Raises `GraphFormatError` for a dtype that does not travel."""
    if name not in _DTYPES:
        raise GraphFormatError(f"dtype {name!r} is not supported")
    return _DTYPES[name]


@lru_cache(maxsize=4096)
def resolve(target: str) -> torch._ops.OpOverload:
    """The overload called `target`. Raises `GraphFormatError` if it is not on the allow-list."""
    parts = target.split(".")
    if len(parts) != 3 or parts[0] != "aten" or not is_allowed(parts[1]):
        raise GraphFormatError(f"op {target!r} is not allowed")
    try:
        packet = getattr(torch.ops.aten, parts[1])
        overload = getattr(packet, parts[2])
    except AttributeError:
        raise GraphFormatError(f"op {target!r} does not exist in torch {torch.__version__}") from None
    if any(a.name == "out" and a.kwarg_only for a in overload._schema.arguments):
        raise GraphFormatError(f"op {target!r} is not allowed")
    return overload


def is_allowed(base: str) -> bool:
    return base in ALLOWED or (base.endswith("_") and not base.endswith("__") and base[:-1] in ALLOWED)


def is_in_place(target: str) -> bool:
    base = base_name(target)
    return base.endswith("_") and not base.endswith("__")


def argument(op: Op, position: int, name: str, default: Arg = None) -> Arg:
    """An argument given by position or by name."""
    return op.args[position] if len(op.args) > position else op.kwargs.get(name, default)


def draws_random(op: Op) -> bool:
    """True when running the op in training mode advances the random generator."""
    base = base_name(op.target)
    if base in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout"):
        return bool(argument(op, 2, "train")) and 0 < argument(op, 1, "p") < 1
    if base == "scaled_dot_product_attention":
        return argument(op, 4, "dropout_p", 0.0) > 0
    if base == "rrelu":
        return bool(argument(op, 3, "training", False))
    if base in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return bool(argument(op, 6, "train")) and argument(op, 5, "dropout") > 0
    return op.target != GETITEM and torch.Tag.nondeterministic_seeded in resolve(op.target).tags


def evaluation_form(op: Op) -> Op:
    """The op as it runs when the model is evaluated: no dropout, running statistics instead of the batch's."""
    rule = _EVALUATION.get(base_name(op.target))
    if rule is None:
        return op
    position, name, value = rule
    if len(op.args) > position:
        args = (*op.args[:position], value, *op.args[position + 1 :])
        return Op(op.name, op.target, args, op.kwargs, op.module, op.grad, op.autocast, None)
    if name in op.kwargs:
        kwargs = {**op.kwargs, name: value}
        return Op(op.name, op.target, op.args, kwargs, op.module, op.grad, op.autocast, None)
    return op


def to_arg(value: Any, name_of: Any) -> Arg:
    """A traced argument as a graph argument. `name_of(x)` gives the name of a tensor-like `x`, or None.

    Raises `CaptureError` for what a static graph cannot hold.
    """
    name = name_of(value)
    if name is not None:
        return Ref(name)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return Dtype(dtype_name(value))
    if isinstance(value, torch.device):
        return Device()
    if isinstance(value, torch.layout):
        return Layout(str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return MemoryFormat(str(value).removeprefix("torch."))
    if isinstance(value, list | tuple):
        return tuple(to_arg(item, name_of) for item in value)
    raise CaptureError(
        f"an argument of type {type(value).__name__} cannot be part of a graph; "
        "the model must not compute shapes or numbers from the values of its inputs"
    )


def from_arg(arg: Arg, tensors: Mapping[str, Any], device: torch.device) -> Any:
    """The runtime form of an argument: tuples become lists, `Ref`s the tensors they name."""
    if isinstance(arg, Ref):
        return tensors[arg.name]
    if isinstance(arg, tuple):
        return [from_arg(item, tensors, device) for item in arg]
    if isinstance(arg, Dtype):
        return to_dtype(arg.name)
    if isinstance(arg, Device):
        return device
    if isinstance(arg, Layout):
        return _LAYOUTS[arg.name]
    if isinstance(arg, MemoryFormat):
        return _MEMORY_FORMATS[arg.name]
    return arg
