"""In-place changes of activations become new values, so that a cut may fall anywhere. Pure.

A value that one stage sends must not change afterwards, and views of one tensor do not stay views when they cross
a link. So `y = x.add_(1)` becomes `y = x.add(1)`, later uses of `x` read `y`, and where other views of the same
memory are read later the change is written through: the viewed tensor is rebuilt (`slice_scatter`, ...) and the
views are taken anew. Values are computed by the same kernels as before; gradients of what was not touched pass
through copies only. Changes of buffers stay in place. This is what `torch.func.functionalize` does, without its
decomposition of composite ops (dropout, batch norm), which would change the random numbers and the last bits.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import CaptureError, GraphFormatError
from .ir import Dtype, Op, Ref, Value, op_refs
from .ops import GETITEM, base_name, dtype_name, from_arg, is_in_place, resolve, to_dtype
from .serial import tensor_spec

_SAME_ELEMENTS = frozenset(
    "view reshape unsqueeze squeeze flatten unflatten contiguous alias detach to view_as _unsafe_view reshape_as "
    "lift_fresh type_as expand_as positive ravel atleast_1d atleast_2d atleast_3d dropout feature_dropout "
    "resolve_conj resolve_neg _to_copy".split()
)
"""Views that hold the same elements in the same order (some of these return their input itself)."""

_FUNCTIONAL = {
    "normal_": "aten.normal_functional.default",
    "uniform_": "aten.uniform.default",
    "exponential_": "aten.exponential.default",
    "log_normal_": "aten.log_normal.default",
}


_SHAPES: Mapping[str, Callable[..., torch.Tensor]] = {
    # Its shape function admits bfloat16 only; its kernels do not mind.
    "aten._grouped_mm.default": lambda a, b, *_, **__: a @ b[0],
}
"""Stand-ins with the same result shape, for ops that fake tensors cannot run."""


@dataclass(frozen=True)
class Functional:
    """Ops without in-place changes of activations; `outputs` are the names asked for, as they are called now;
    `changes` maps each op that changes buffers to their names."""

    ops: list[Op]
    values: dict[str, Value]
    outputs: list[str]
    changes: dict[str, tuple[str, ...]]


class Functionalizer:
    """One use: walks the ops over fake tensors, which know which values share memory.

    `tensors` are all inputs, parameters, buffers and constants by name.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        tensors: Mapping[str, torch.Tensor],
        parameters: set[str],
        buffers: set[str],
        autocast: str | None,
    ) -> None:
        self._raw = ops
        self._parameters = parameters
        self._buffers = buffers
        self._autocast = None if autocast is None else to_dtype(autocast)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = torch.device("cpu")
        self._env: dict[str, Any] = {}
        self._ops: list[Op] = []
        self._changes: dict[str, tuple[str, ...]] = {}
        self._current: dict[str, str] = {}
        self._parent: dict[str, str] = {}
        self._made_by: dict[str, Op] = {}
        self._root_of_storage: dict[int, str] = {}
        self._last_use = {name: i for i, op in enumerate(ops) for name in op_refs(op)}
        with self._mode:
            for name, tensor in tensors.items():
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                self._env[name] = fake.requires_grad_(tensor.requires_grad)
                self._root_of_storage[fake.untyped_storage()._cdata] = name

    def run(self, loss: str, extras: Sequence[str]) -> Functional:
        for name in (loss, *extras):
            self._last_use[name] = len(self._raw)
        with self._mode:
            for i, op in enumerate(self._raw):
                op = self._renamed(op)
                if op.target != GETITEM and is_in_place(op.target):
                    self._change(i, op)
                else:
                    self._emit(op)
        outputs = [self._now(name) for name in (loss, *extras)]
        if not self._env[outputs[0]].requires_grad:
            raise CaptureError("the loss depends on no trainable parameter; set requires_grad on what is to be trained")
        values = {
            name: Value(tensor_spec(value), value.requires_grad)
            for name, value in self._env.items()
            if isinstance(value, torch.Tensor)
        }
        return Functional(self._ops, values, outputs, self._changes)

    def _now(self, name: str) -> str:
        while name in self._current:
            name = self._current[name]
        return name

    def _renamed(self, op: Op) -> Op:
        return replace(
            op,
            args=tuple(_rename(a, self._now) for a in op.args),
            kwargs={k: _rename(a, self._now) for k, a in op.kwargs.items()},
        )

    def _emit(self, op: Op) -> None:
        try:
            function = _SHAPES.get(op.target) or ((lambda x, i: x[i]) if op.target == GETITEM else resolve(op.target))
        except GraphFormatError as error:
            raise CaptureError(f"module {op.module or '(root)'!r} changes a tensor in place: {error}") from None
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(op.grad))
            if self._autocast is not None:
                stack.enter_context(torch.autocast("cpu", self._autocast, enabled=op.autocast))
            args = [from_arg(a, self._env, self._device) for a in op.args]
            kwargs = {k: from_arg(a, self._env, self._device) for k, a in op.kwargs.items()}
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                raise CaptureError(
                    f"module {op.module or '(root)'!r}, op {op.target!r}: {' '.join(str(error).split())[:200]}"
                ) from error
        self._env[op.name] = result
        self._ops.append(op)
        self._made_by[op.name] = op
        if isinstance(result, torch.Tensor):
            if any(isinstance(n, torch.SymInt) for n in result.shape):
                raise CaptureError(
                    f"module {op.module or '(root)'!r}: the shape of the result of {op.target!r} depends on the values "
                    "of its inputs; use masks instead of selecting by them"
                )
            storage = result.untyped_storage()._cdata
            root = self._root_of_storage.setdefault(storage, op.name)
            if root != op.name:
                self._parent[op.name] = self._viewed(op, storage)

    def _viewed(self, op: Op, storage: int) -> str:
        """The tensor that the result of `op` is a view of: an argument of it (or of its maker) with that storage."""
        for name in op_refs(op):
            value = self._env[name]
            if isinstance(value, torch.Tensor):
                if value.untyped_storage()._cdata == storage:
                    return name
            elif name in self._made_by:
                return self._viewed(self._made_by[name], storage)
        raise CaptureError(f"module {op.module or '(root)'!r}: cannot tell what {op.target!r} is a view of")

    def _root(self, name: str) -> str:
        while name in self._parent:
            name = self._parent[name]
        return name

    def _change(self, position: int, op: Op) -> None:
        """An op that changes its first argument."""
        old = op_refs(op)[0]
        root = self._root(old)
        if root in self._buffers:
            self._changes[op.name] = (root,)
            self._ops.append(op)
            self._env[op.name] = self._env[old]
            self._parent[op.name] = old
            self._made_by[op.name] = op
            return
        if root in self._parameters:
            raise CaptureError(
                f"module {op.module or '(root)'!r} changes parameter {root!r} in place ({op.target}); make it a buffer"
            )
        base = base_name(op.target)
        before = self._env[old]
        if base == "copy_":  # ATen's own functional form has no derivative
            self._emit(replace(op, target="aten.expand.default", args=(op.args[1], tuple(before.shape)), kwargs={}))
        else:
            target = _FUNCTIONAL.get(base, op.target.replace(f".{base}.", f".{base[:-1]}.", 1))
            self._emit(replace(op, target=target))
        new = op.name
        if self._env[new].dtype != before.dtype:
            self._emit(
                Op(
                    f"{new}:cast",
                    "aten.to.dtype",
                    (Ref(new), Dtype(dtype_name(before.dtype))),
                    {},
                    op.module,
                    op.grad,
                    op.autocast,
                )
            )
            new = f"{new}:cast"
        shared = [name for name in self._env if name != old and self._shares(name, root)]
        if torch.Tag.inplace_view in resolve(op.target).tags or not any(self._used_after(n, position) for n in shared):
            self._current[old] = new
            return
        self._write_through(op, old, new, root)

    def _shares(self, name: str, root: str) -> bool:
        return self._root(name) == root and name not in self._current

    def _used_after(self, name: str, position: int) -> bool:
        return any(last > position and self._now(raw) == name for raw, last in self._last_use.items())

    def _write_through(self, op: Op, changed: str, new: str, root: str) -> None:
        """Rebuilds the tensor at `root` around the new value of its view `changed`, and takes all views anew."""
        views = [o for o in self._ops if o.name in self._parent and self._shares(o.name, root)]
        value, view = new, changed
        while view in self._parent:
            parent = self._parent[view]
            inverse = self._inverse(self._made_by[view], parent, value)
            name = f"{op.name}:{len(self._ops)}"
            self._emit(replace(inverse, name=name, module=op.module, grad=op.grad, autocast=op.autocast))
            value, view = name, parent
        self._current[root] = value
        for made in views:
            makers = [self._made_by[n] for n in op_refs(made) if not isinstance(self._env[n], torch.Tensor)]
            for maker in (*makers, made):
                again = self._renamed(maker)
                name = f"{op.name}:{len(self._ops)}"
                self._emit(replace(again, name=name))
                self._current[maker.name] = name

    def _inverse(self, view: Op, parent: str, value: str) -> Op:
        """The op that gives the tensor `parent` with the elements that `view` shows replaced by `value`."""
        base, whole, part = base_name(view.target), self._env[parent], self._env[value]
        rest = view.args[1:]
        if base == "slice":
            return Op("", "aten.slice_scatter.default", (Ref(parent), Ref(value), *rest), view.kwargs)
        if base == "select":
            return Op("", "aten.select_scatter.default", (Ref(parent), Ref(value), *rest), view.kwargs)
        if base == "diagonal":
            return Op("", "aten.diagonal_scatter.default", (Ref(parent), Ref(value), *rest), view.kwargs)
        if base in ("transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT"):
            return Op("", view.target, (Ref(value), *rest), view.kwargs)
        if base == "permute":
            dims = [d % whole.dim() for d in rest[0]]
            return Op("", view.target, (Ref(value), tuple(dims.index(i) for i in range(len(dims)))), {})
        if base in _SAME_ELEMENTS and whole.numel() == part.numel():
            return Op("", "aten.reshape.default", (Ref(value), tuple(whole.shape)), {})
        if view.target == GETITEM:
            maker, index = self._made_by[op_refs(view)[0]], view.args[1]
            kind, dim = base_name(maker.target), (maker.args[2:3] or (maker.kwargs.get("dim", 0),))[0]
            if kind == "unbind":
                dim = (maker.args[1:2] or (maker.kwargs.get("dim", 0),))[0]
                return Op("", "aten.select_scatter.default", (Ref(parent), Ref(value), dim, index), {})
            if kind in ("split", "split_with_sizes", "chunk"):
                start = sum(piece.shape[dim] for piece in self._env[maker.name][:index])
                end = start + part.shape[dim]
                return Op("", "aten.slice_scatter.default", (Ref(parent), Ref(value), dim, start, end), {})
        raise CaptureError(
            f"module {view.module or '(root)'!r} changes a tensor through a view made by {view.target!r}; "
            "write it without the in-place change"
        )


def _rename(arg: Any, now: Any) -> Any:
    if isinstance(arg, Ref):
        return Ref(now(arg.name))
    if isinstance(arg, tuple):
        return tuple(_rename(a, now) for a in arg)
    return arg
