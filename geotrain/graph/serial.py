"""Graphs <-> bytes. Pure.

The bytes are a magic number and records, each a little-endian u32 length and that many bytes of msgpack: first a
header, then one record an input, parameter, buffer, constant, value, tie, op, receive, send, ... A record is a list
that starts with its kind. Nothing in it is code: ops are looked up on the allow-list, names are only names. Records
are bounded one by one, so that decoding needs little more memory than the bytes themselves.
"""

# What is decoded has no type until it has been checked.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import torch

from ..base import MAX_GAPS, PROTOCOL_VERSION, TensorSpec
from ..errors import GraphFormatError
from .ir import (
    LITERAL,
    Arg,
    Buffer,
    Constant,
    Device,
    Dtype,
    Layout,
    MemoryFormat,
    Op,
    OpGraph,
    Parameter,
    Receive,
    Ref,
    Send,
    StageGraph,
    Value,
    op_refs,
)
from .ops import GETITEM, dtype_name, resolve, to_dtype

_msgpack: Any = msgpack  # it has no types

MAGIC = b"GTG1"
MAX_RECORD_BYTES = 1 << 16
"""An op with all its arguments; the longest seen (a concatenation of 128 pieces) takes 3 KB."""
MAX_CONSTANT_BYTES = 1 << 26
"""A tensor that a model makes from Python numbers; what is larger belongs into a buffer."""
MAX_INIT_BYTES = 1 << 20
"""A parameter or buffer with the program that makes it: thousands of ops, or 768 KiB of data (see `tape`)."""
MAX_RECORDS = 1_000_000
MAX_NAME = 512
MAX_DEPTH = 4
"""Arguments are scalars, lists, and at most lists of lists."""


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """Shape, dtype and layout. A tensor whose elements overlap in memory, or lie far apart, counts as contiguous."""
    spec = TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype))
    if tensor.is_contiguous():
        return spec
    strided = TensorSpec(spec.shape, spec.dtype, tuple(tensor.stride()))
    span = 1
    for d in reversed(strided.dims_in_memory):
        if tensor.stride(d) != 0 and tensor.shape[d] > 1:
            if tensor.stride(d) < span:
                return spec
            span = tensor.stride(d) * (tensor.shape[d] - 1) + span
    return strided if span <= MAX_GAPS * strided.packed.numel else spec


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in C order, little-endian."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def constant_tensor(constant: Constant, device: torch.device) -> torch.Tensor:
    """The inverse of `tensor_bytes`."""
    flat = torch.frombuffer(bytearray(constant.data or b"\0" * 8), dtype=torch.uint8)[: constant.spec.nbytes]
    return flat.view(to_dtype(constant.spec.dtype)).reshape(constant.spec.shape).to(device)


@lru_cache(maxsize=4)
def graph_hash(graph: OpGraph) -> str:
    """Names a graph: 32 hex digits of the SHA-256 of its bytes."""
    return hashlib.sha256(to_bytes(graph)).hexdigest()[:32]


# --- encoding ---------------------------------------------------------------------------------------------------


def to_bytes(graph: OpGraph | StageGraph) -> bytes:
    """The graph as bytes; equal graphs give equal bytes."""
    parts = [MAGIC]
    for record in _records(graph):
        data = _msgpack.packb(record, use_bin_type=True)
        parts += [struct.pack("<I", len(data)), data]
    return b"".join(parts)


def _records(graph: OpGraph | StageGraph) -> Iterator[list[Any]]:
    common = [PROTOCOL_VERSION, graph.loss, graph.autocast]
    if isinstance(graph, OpGraph):
        yield ["graph", *common]
        yield from (["tie", a, b] for a, b in graph.ties.items())
    else:
        yield ["stage", *common, graph.index, graph.num_stages, graph.first_op, graph.end_op]
        yield from (["receive", r.value, r.source, r.grad, r.grad_to, r.once] for r in graph.receives)
        yield from (["send", s.value, list(s.to), s.grad, s.once] for s in graph.sends)
        yield from (["grad_from", name, stage] for name, stage in graph.grads_from.items())
        yield from (["copy", name] for name in sorted(graph.copies))
    yield from (["input", name] for name in graph.inputs)
    yield from (["output", outside, name] for outside, name in graph.outputs.items())
    for name, p in graph.parameters.items():
        yield ["parameter", name, _spec(p.spec), p.requires_grad, _init(p.init)]
    for name, b in graph.buffers.items():
        yield ["buffer", name, _spec(b.spec), b.persistent, b.mutated, _init(b.init)]
    yield from (["constant", name, _spec(c.spec), c.data] for name, c in graph.constants.items())
    yield from (["value", name, _spec(v.spec), v.requires_grad] for name, v in graph.values.items())
    yield from (["op", *_op(op)] for op in graph.ops)


def _spec(spec: TensorSpec) -> list[Any]:
    return [list(spec.shape), spec.dtype, None if spec.stride is None else list(spec.stride)]


def _init(init: tuple[Op, ...] | None) -> list[Any] | None:
    return None if init is None else [_op(op) for op in init]


def _op(op: Op) -> list[Any]:
    args, kwargs = [_arg(a) for a in op.args], {k: _arg(a) for k, a in op.kwargs.items()}
    return [op.name, op.target, args, kwargs, op.module, op.grad, op.autocast, op.random]


def _arg(arg: Arg) -> Any:
    match arg:
        case Ref(name):
            return {"r": name}
        case Dtype(name):
            return {"d": name}
        case Layout(name):
            return {"l": name}
        case MemoryFormat(name):
            return {"m": name}
        case Device():
            return {"v": 0}
        case tuple():
            return [_arg(a) for a in arg]
        case _:
            return arg


# --- decoding ---------------------------------------------------------------------------------------------------


def from_bytes(data: bytes) -> OpGraph | StageGraph:
    """The inverse of `to_bytes`. Raises `GraphFormatError` for anything that `to_bytes` does not make: unknown or
    forbidden ops, names used before they are made, shapes that do not fit, wrong types, trailing bytes."""
    try:
        return _Decoder().run(data)
    except GraphFormatError:
        raise
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        OverflowError,
        struct.error,
        _msgpack.UnpackException,
    ) as error:
        raise GraphFormatError(f"malformed graph: {type(error).__name__}: {str(error)[:200]}") from None


class _Decoder:
    def __init__(self) -> None:
        self.inputs: dict[str, None] = {}
        self.outputs: dict[str, str] = {}
        self.parameters: dict[str, Parameter] = {}
        self.buffers: dict[str, Buffer] = {}
        self.constants: dict[str, Constant] = {}
        self.values: dict[str, Value] = {}
        self.ops: dict[str, Op] = {}
        self.ties: dict[str, str] = {}
        self.receives: dict[str, Receive] = {}
        self.sends: dict[str, Send] = {}
        self.grads_from: dict[str, int] = {}
        self.copies: dict[str, None] = {}

    def run(self, data: bytes) -> OpGraph | StageGraph:
        records = self._split(data)
        kind, header = next(records, ("", []))
        if kind not in ("graph", "stage"):
            raise GraphFormatError("graph bytes start with a graph or stage record")
        version, loss, autocast, *where = header
        if version != PROTOCOL_VERSION:
            raise GraphFormatError(f"the graph is of version {version!r}, this is version {PROTOCOL_VERSION}")
        if autocast is not None and autocast not in ("bfloat16", "float16"):
            raise GraphFormatError(f"autocast to {autocast!r} is not supported")
        for tag, fields in records:
            reader = _READERS.get(tag)
            if reader is None:
                raise GraphFormatError(f"unknown record {tag!r}")
            table_name, key, value = reader(fields)
            table = getattr(self, table_name)
            if key in table:
                raise GraphFormatError(f"{table_name} names {key!r} twice")
            table[key] = value
        self._check(loss, stage=kind == "stage")
        shared: dict[str, Any] = {
            "ops": tuple(self.ops.values()), "inputs": tuple(self.inputs), "values": self.values,
            "parameters": self.parameters, "buffers": self.buffers, "constants": self.constants,
            "outputs": self.outputs, "autocast": autocast, "loss": loss,
        }  # fmt: skip
        if kind == "graph":
            if where or self.receives or self.sends or self.grads_from or self.copies:
                raise GraphFormatError("a whole graph has no stage records")
            return OpGraph(ties=self.ties, **shared)
        index, num_stages, first, end = (_integer(x) for x in where)
        if not index < num_stages or first > end or self.ties:
            raise GraphFormatError("the stage record does not fit")
        return StageGraph(
            index, num_stages, first, end, receives=tuple(self.receives.values()), sends=tuple(self.sends.values()),
            grads_from=self.grads_from, copies=frozenset(self.copies), **shared,
        )  # fmt: skip

    def _split(self, data: bytes) -> Iterator[tuple[str, list[Any]]]:
        if data[:4] != MAGIC:
            raise GraphFormatError("these bytes are not a graph")
        view, position, count = memoryview(data), 4, 0
        while position < len(view):
            (length,) = struct.unpack_from("<I", view, position)
            position += 4
            count += 1
            if length > _max_bytes(view[position : position + 11].tobytes()) or count > MAX_RECORDS:
                raise GraphFormatError(f"record {count} is too large")
            if position + length > len(view):
                raise GraphFormatError("the graph is cut short")
            record = _msgpack.unpackb(view[position : position + length], raw=False, max_ext_len=0)
            if not isinstance(record, list) or not record:
                raise GraphFormatError("a record is a list that starts with its kind")
            yield _name(record[0]), record[1:]
            position += length

    def _check(self, loss: str | None, *, stage: bool) -> None:
        tables = (self.inputs, self.parameters, self.buffers, self.constants, self.receives)
        known: set[str] = set()
        for table in tables:
            if known & table.keys() - (self.parameters.keys() if table is self.receives else set()):
                raise GraphFormatError("a name stands for two things")
            known |= table.keys()
        for op in self.ops.values():
            if op.name in known:
                raise GraphFormatError(f"{op.name!r} is made twice")
            missing = [name for name in op_refs(op) if name not in known]
            if missing:
                raise GraphFormatError(f"op {op.name!r} reads {missing[0]!r}, which nothing made before it")
            known.add(op.name)
        wanted = [*self.outputs.values(), *self.grads_from, *self.sends, *self.copies, *self.values]
        if loss is not None:
            wanted.append(_name(loss))
        elif not stage:
            raise GraphFormatError("the graph has no loss")
        for name in wanted:
            if name not in known:
                raise GraphFormatError(f"{name!r} is used but never made")
        for name in (*self.inputs, *self.receives):
            if name not in self.values and name not in self.parameters:
                raise GraphFormatError(f"the shape of {name!r} is not told")


def _max_bytes(start: bytes) -> int:
    """How long a record that starts like this may be. Short strings in msgpack: 0xa0 + length, then the text."""
    if start[1:].startswith(b"\xa8constant"):
        return MAX_CONSTANT_BYTES
    return MAX_INIT_BYTES if start[1:].startswith((b"\xa9parameter", b"\xa6buffer")) else MAX_RECORD_BYTES


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
        raise GraphFormatError(f"{str(value)[:40]!r} is not a name")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise GraphFormatError(f"{str(value)[:40]!r} is neither true nor false")
    return value


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 48:
        raise GraphFormatError(f"{str(value)[:40]!r} is not a count")
    return value


def _read_spec(value: Any) -> TensorSpec:
    shape, dtype, stride = value
    sizes = tuple(_integer(n) for n in shape)
    to_dtype(_name(dtype))
    spec = TensorSpec(sizes, dtype, None if stride is None else tuple(_integer(n) for n in stride))
    if len(sizes) > 16 or spec.nbytes >= 1 << 48:
        raise GraphFormatError("a tensor is too large")
    if spec.stride is not None and len(spec.stride) != len(sizes):
        raise GraphFormatError("strides do not fit the shape")
    return spec


def _read_init(value: Any) -> tuple[Op, ...] | None:
    if value is None:
        return None
    ops = tuple(_read_op(op, literals=True) for op in value)
    known: set[str] = set()
    for op in ops:
        if op.name in known or not known.issuperset(op_refs(op)):
            raise GraphFormatError(f"init op {op.name!r} is made twice or reads what is not made")
        known.add(op.name)
    return ops


def _read_op(value: Any, *, literals: bool = False) -> Op:
    name, target, args, kwargs, module, grad, autocast, random = value
    if target != GETITEM and not (literals and target == LITERAL):
        resolve(_name(target))
    if not isinstance(args, list) or not isinstance(kwargs, dict) or not isinstance(module, str):
        raise GraphFormatError("an op has a list and a map of arguments, and a module")
    op = Op(
        _name(name), target, tuple(_read_arg(a, 0) for a in args),
        {_name(k): _read_arg(a, 0) for k, a in kwargs.items()}, module[:MAX_NAME], _flag(grad), _flag(autocast),
        None if random is None else _integer(random),
    )  # fmt: skip
    if target == GETITEM and not (len(op.args) == 2 and isinstance(op.args[0], Ref) and isinstance(op.args[1], int)):
        raise GraphFormatError("getitem takes a value and a number")
    return op


_MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
_MARKERS: Mapping[str, Callable[[Any], Arg]] = {
    "r": lambda v: Ref(_name(v)),
    "d": lambda v: (to_dtype(_name(v)), Dtype(v))[1],
    "l": lambda v: Layout(_one_of(v, ("strided",))),
    "m": lambda v: MemoryFormat(_one_of(v, _MEMORY_FORMATS)),
    "v": lambda _: Device(),
}  # fmt: skip


def _one_of(value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise GraphFormatError(f"{str(value)[:40]!r} is not one of {', '.join(allowed)}")
    return value


def _read_arg(value: Any, depth: int) -> Arg:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list) and depth < MAX_DEPTH:
        return tuple(_read_arg(a, depth + 1) for a in value)
    if isinstance(value, dict) and len(value) == 1:
        ((tag, content),) = value.items()
        if tag in _MARKERS:
            return _MARKERS[tag](content)
    raise GraphFormatError(f"{str(value)[:40]!r} is not an argument")


def _read_constant(name: Any, spec: Any, data: Any) -> tuple[str, str, Constant]:
    constant = Constant(_read_spec(spec), data)
    if not isinstance(data, bytes) or len(data) != constant.spec.nbytes:
        raise GraphFormatError(f"constant {name!r} has the wrong size")
    return "constants", _name(name), constant


_READERS: Mapping[str, Callable[[list[Any]], tuple[str, str, Any]]] = {
    "tie": lambda f: ("ties", _name(f[0]), _name(f[1])),
    "receive": lambda f: (
        "receives", _name(f[0]), Receive(f[0], _integer(f[1]), _flag(f[2]), _integer(f[3]), _flag(f[4])),
    ),
    "send": lambda f: ("sends", _name(f[0]), Send(f[0], tuple(_integer(s) for s in f[1]), _flag(f[2]), _flag(f[3]))),
    "grad_from": lambda f: ("grads_from", _name(f[0]), _integer(f[1])),
    "copy": lambda f: ("copies", _name(f[0]), None),
    "input": lambda f: ("inputs", _name(f[0]), None),
    "output": lambda f: ("outputs", _name(f[0]), _name(f[1])),
    "parameter": lambda f: ("parameters", _name(f[0]), Parameter(_read_spec(f[1]), _flag(f[2]), _read_init(f[3]))),
    "buffer": lambda f: ("buffers", _name(f[0]), Buffer(_read_spec(f[1]), _flag(f[2]), _flag(f[3]), _read_init(f[4]))),
    "constant": lambda f: _read_constant(*f),
    "value": lambda f: ("values", _name(f[0]), Value(_read_spec(f[1]), _flag(f[2]))),
    "op": lambda f: ("ops", _name(f[0]), _read_op(f)),
}  # fmt: skip
