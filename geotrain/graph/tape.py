"""Writes down the ops that a model's constructor runs on tensors without memory. Pure.

Two modes are in force while it runs. The dispatch mode sends every factory to the meta device and appends every
op to a tape. The function mode keeps constructors on the path they take for real weights: a recorded tensor says
that it is on the CPU (`torch.nn.init` and transformers skip meta tensors), and hands out its values where they are
asked for and nothing random is in them (`.item()`, `.tolist()`, `if mask.any()`).

What a tensor holds at the end is the backward slice of the tape over storages: the ops that made or changed the
storage, except those whose work was overwritten entirely, and the views that they went through.
"""

import sys
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import CaptureError, GraphFormatError
from .init import literal_args, run_program
from .ir import LITERAL, Device, Dtype, Op, Ref, op_refs
from .ops import GETITEM, base_name, dtype_name, is_in_place, resolve, to_arg

LITERAL_BYTES = 3 << 18
"""The most data of a tensor that was made outside torch (by numpy, from lists) that a program carries."""

INSTEAD = "build the model with real weights instead"

_META = torch.device("meta")
_CPU = torch.device("cpu")
_UNINITIALIZED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "exponential_", "log_normal_", "bernoulli_"}

Geometry = tuple[Any, ...]


@dataclass(slots=True)
class _Call:
    """One op on the tape. Storages are by number: `reads` those whose contents it reads, `writes` those that it
    makes or changes, `whole` those of whose earlier contents it leaves nothing. `problem`: why it cannot travel."""

    op: Op
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    problem: str = ""


class Tape:
    """What has been run so far on recorded (meta) tensors.

    A tensor's name goes by its geometry (storage, offset, sizes, strides, dtype): that finds `nn.Parameter`s and
    `.data` again, which torch makes where no mode can see it.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._names: dict[Geometry, str] = {}
        self._makers: dict[str, int] = {}
        self._views: dict[int, list[str]] = {}
        self._writers: dict[int, list[int]] = {}
        self._storages: list[torch.UntypedStorage] = []  # kept, so that no two have the same number
        self._random = 0
        self.asleep = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Ops run inside are written down; factories make meta tensors."""
        with _Dispatch(self), _Function(self):
            yield

    @contextmanager
    def sleep(self) -> Iterator[None]:
        before, self.asleep = self.asleep, True
        try:
            yield
        finally:
            self.asleep = before

    # --- writing ------------------------------------------------------------------------------------------------

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one op: on meta tensors and onto the tape, or as it is where only real data takes part."""
        with self.sleep():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        has_device = any(a.name == "device" for a in func._schema.arguments)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        writes = _written(func, args, kwargs)
        if not any(t.is_meta for t in tensors) and not (has_device and not tensors) and not (draws and not writes):
            return func(*args, **kwargs)
        if any(not t.is_meta for t in writes):
            return self._run_on_values(func, args, kwargs)
        if "out" in kwargs:
            made = self._run(_without_out(func), args, {k: v for k, v in kwargs.items() if k != "out"})
            return self._run(torch.ops.aten.copy_.default, (kwargs["out"], made), {})
        args, kwargs = tree_map(self._lift, (args, kwargs))
        kwargs = {k: v for k, v in kwargs.items() if k not in ("generator", "pin_memory")}
        if has_device:
            kwargs["device"] = _META
        if func._schema.name == "aten::set_":  # it changes which storage a tensor shows, and no storage
            return func(*args, **kwargs)
        op, problem = self._op(func, args, kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:  # the op needs values
            if writes or draws:
                raise
            return self._run_on_values(func, args, kwargs, error)
        if draws:
            op = replace(op, random=self._random)
            self._random += 1
        if base_name(op.target) in _UNINITIALIZED:
            self._zeros(result, op.name)
        else:
            view = torch.Tag.inplace_view in func.tags
            self._write(_Call(op, problem=problem), tensors, [] if view else writes, result)
        return result

    def _op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Op, str]:
        """The call as a graph op, and why it cannot travel (empty if it can)."""
        target = str(func)
        if torch.Tag.inplace_view in func.tags:  # the program keeps the old view and gets a new one
            packet, overload = target.rsplit(".", 1)
            target = f"{packet.removesuffix('_')}.{overload}"
        try:
            resolve(target)
            ir_args = tuple(to_arg(a, self._name_or_none) for a in args)
            ir_kwargs = {k: to_arg(v, self._name_or_none) for k, v in kwargs.items()}
        except (CaptureError, GraphFormatError) as error:
            return Op(f"i{len(self._calls)}", target, (), {}, grad=False), f"op {target!r}{_where()}: {error}"
        return Op(f"i{len(self._calls)}", target, ir_args, ir_kwargs, grad=False), ""

    def _write(self, call: _Call, tensors: list[torch.Tensor], changed: list[torch.Tensor], result: Any) -> None:
        """Appends a call on `tensors` that changed some of them; its results get names."""
        before = {_storage(t) for t in tensors}
        results = [r for r in tree_leaves(result) if isinstance(r, torch.Tensor)]
        made = [_storage(r) for r in results if _storage(r) not in before]
        over = [t for t in changed if base_name(call.op.target) in _OVERWRITES and _covers(t)]
        call.writes = (*made, *(_storage(t) for t in changed))
        call.whole = (*made, *(_storage(t) for t in over))
        if call.writes:
            call.reads = tuple(_storage(t) for t in tensors if not any(t is o for o in over))
        self._append(call, results)
        if isinstance(result, torch.Tensor):
            self._name(result, call.op.name)
            return
        for i, item in enumerate(result if isinstance(result, list | tuple) else ()):
            if isinstance(item, torch.Tensor):
                part = Op(f"i{len(self._calls)}", GETITEM, (Ref(call.op.name), i), {}, grad=False)
                self._append(_Call(part), [item])
                self._name(item, part.name)

    def _zeros(self, tensor: torch.Tensor, name: str) -> None:
        """Memory that nobody has written to holds zeros: equal weights for every split."""
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        dense = tensor.is_contiguous()
        shape = tuple(tensor.shape) if dense else (elements,)
        kwargs = {"dtype": Dtype(dtype_name(tensor.dtype)), "device": Device()}
        op = Op(name, "aten.zeros.default", (shape,), kwargs, grad=False)
        self._append(_Call(op, (), (_storage(tensor),), (_storage(tensor),)), [tensor])
        if dense:
            self._name(tensor, name)
        else:
            self._views[_storage(tensor)].append(name)

    def _append(self, call: _Call, results: list[torch.Tensor]) -> None:
        index = len(self._calls)
        self._makers[call.op.name] = index
        self._calls.append(call)
        for result in results:
            storage = _storage(result)
            if storage not in self._writers:
                self._writers[storage], self._views[storage] = [], []
                self._storages.append(result.untyped_storage())
        for storage in dict.fromkeys(call.writes):
            self._writers[storage].append(index)

    def _name(self, tensor: torch.Tensor, name: str) -> None:
        if self._names.setdefault(_geometry(tensor), name) == name:
            self._views[_storage(tensor)].append(name)

    def _name_or_none(self, value: Any) -> str | None:
        return self._name_of(value) if isinstance(value, torch.Tensor) else None

    def _name_of(self, tensor: torch.Tensor) -> str:
        """The name of a recorded tensor; a view that torch made unseen is described by its geometry."""
        name = self._names.get(_geometry(tensor))
        if name is not None:
            return name
        for base in self._views.get(_storage(tensor), ()):
            args = (Ref(base), tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
            op = Op(f"i{len(self._calls)}", "aten.as_strided.default", args, {}, grad=False)
            self._append(_Call(op), [tensor])
            self._name(tensor, op.name)
            return op.name
        raise CaptureError(f"a tensor of shape {tuple(tensor.shape)} was made on the meta device before{_where()}")

    def _lift(self, value: Any) -> Any:
        """The recorded twin of a tensor that holds data."""
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return value
        data = value.detach().contiguous()
        twin = torch.empty(data.shape, dtype=data.dtype, device=_META)
        op = Op(f"i{len(self._calls)}", LITERAL, literal_args(data), {}, grad=False)
        problem = ""
        if data.nbytes > LITERAL_BYTES:
            op = replace(op, args=())
            problem = f"{data.nbytes >> 10} KiB of data{_where()} come from outside torch"
        self._append(_Call(op, (), (_storage(twin),), (_storage(twin),), problem), [twin])
        self._name(twin, op.name)
        return twin

    # --- reading ------------------------------------------------------------------------------------------------

    def program(self, tensor: torch.Tensor) -> tuple[Op, ...]:
        """The ops that make `tensor` as it is now; the last one's result is the tensor. Raises `CaptureError`."""
        if not tensor.is_meta:
            with self.sleep():
                tensor = self._lift(tensor)
        with self.sleep():
            name = self._name_of(tensor)
            calls = [self._calls[i] for i in self._slice(name, _storage(tensor))]
        for call in calls:
            if call.problem:
                raise CaptureError(f"{call.problem}; {INSTEAD}")
        ops = [call.op for call in calls]
        final = ops[-1]
        if final.name != name and not (is_in_place(final.target) and final.args[:1] == (Ref(name),)):
            ops.append(Op("last", "aten.alias.default", (Ref(name),), {}, grad=False))
        short = {op.name: f"i{i}" for i, op in enumerate(ops)}
        return tuple(_renamed(op, short) for op in ops)

    def _slice(self, name: str, storage: int) -> list[int]:
        """The calls that `name` and the contents of `storage` depend on, in order."""
        todo: list[int] = []

        def contents(storage: int, before: int) -> None:
            writers = self._writers.get(storage, [])
            place = bisect_left(writers, before)
            if place:
                heappush(todo, -writers[place - 1])

        heappush(todo, -self._makers[name])
        contents(storage, len(self._calls))
        chosen: list[int] = []
        while todo:
            index = -heappop(todo)
            if chosen and chosen[-1] == index:
                continue
            chosen.append(index)
            call = self._calls[index]
            for read in op_refs(call.op):
                heappush(todo, -self._makers[read])
            for storage in {*call.reads, *(s for s in call.writes if s not in call.whole)}:
                contents(storage, index)
        return chosen[::-1]

    def values(self, tensor: torch.Tensor, error: Exception | None = None) -> torch.Tensor:
        """What a recorded tensor holds. Raises `CaptureError` if that depends on random numbers."""
        if not tensor.is_meta:
            return tensor
        ops = self.program(tensor)
        random = next((op for op in ops if op.random is not None), None)
        if random is not None:
            raise CaptureError(
                f"the model's constructor needs the value of a random tensor ({random.target}){_where()}, which no "
                f"peer has made yet; {INSTEAD}"
            ) from error
        with self.sleep():
            return run_program(ops)

    def _run_on_values(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception | None = None
    ) -> Any:
        def value(x: Any) -> Any:
            return self.values(x, error) if isinstance(x, torch.Tensor) else x

        args, kwargs = tree_map(value, (args, kwargs))
        return func(*args, **{k: _CPU if v == _META else v for k, v in kwargs.items()})


class _Dispatch(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self._tape.asleep:
            return func(*args, **(kwargs or {}))
        return self._tape.run(func, args, kwargs or {})


class _Function(TorchFunctionMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._tape.asleep or not args or not isinstance(args[0], torch.Tensor) or not args[0].is_meta:
            return func(*args, **kwargs)
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return _CPU
        if func in (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__):
            values = self._tape.values(args[0])
            with self._tape.sleep():
                return func(values, *args[1:], **kwargs)
        if func in (torch.Tensor.cpu, torch.Tensor.cuda):
            return args[0]
        if func is torch.Tensor.to:  # to another device: there is only this one
            args = tuple(_META if isinstance(a, torch.device | str) else a for a in args)
            kwargs = {k: _META if k == "device" and v is not None else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


def _renamed(op: Op, names: dict[str, str]) -> Op:
    def arg(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(names[value.name])
        return tuple(arg(v) for v in value) if isinstance(value, tuple) else value

    kwargs = {k: arg(v) for k, v in op.kwargs.items()}
    return replace(op, name=names[op.name], args=arg(op.args), kwargs=kwargs)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _geometry(tensor: torch.Tensor) -> Geometry:
    view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return (_storage(tensor), *view, tensor.is_conj(), tensor.is_neg())


def _covers(tensor: torch.Tensor) -> bool:
    """True if the tensor shows every element of its storage."""
    dense = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return dense and all(step > 0 for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call changes, by the op's schema."""
    written: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return written


def _without_out(func: Any) -> Any:
    """The overload that makes what `func` writes to its `out`: `div.Tensor` for `div.out`."""

    def inputs(overload: Any) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in overload._schema.arguments if not a.kwarg_only]

    overloads = [getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads()]
    twins = [o for o in overloads if inputs(o) == inputs(func) and not any(a.is_out for a in o._schema.arguments)]
    if not twins:
        raise CaptureError(f"op {str(func)!r}{_where()} cannot be recorded; {INSTEAD}")
    return twins[0]


def _where() -> str:
    """` at file.py:12`, the innermost line of the user's code that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "geotrain.graph", "contextlib")):
            return f" at {frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
