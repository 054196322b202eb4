"""The operator graph: plain records, no torch objects but the constants' bytes. Pure.

An op's arguments are nested tuples of scalars, strings and the markers below. `Ref` is the only way to name a
tensor; which kind of tensor it is (input, parameter, buffer, constant, an earlier op's result) follows from the
name, and names are unique over all kinds. Ops that return several tensors are read through ops whose target is
`getitem`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from ..base import TensorSpec

LOGITS = "logits"
"""The output that a model of text has beside its loss: [B, T, V]."""

LITERAL = "literal"
"""The target of ops that hold a tensor's data: (shape, dtype, base64 of its bytes). Only init programs have them."""


@dataclass(frozen=True, slots=True)
class Ref:
    """The value called `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class Dtype:
    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """The device the stage runs on; the graph never says which."""


@dataclass(frozen=True, slots=True)
class Layout:
    name: str


@dataclass(frozen=True, slots=True)
class MemoryFormat:
    name: str


Arg = Any
"""None, bool, int, float, str, a marker above, or a tuple of these."""


@dataclass(frozen=True, slots=True)
class Op:
    """One call of an ATen op. The op's name is also the name of its result.

    `target` is an allow-listed overload such as `aten.linear.default`, or `getitem`. `module` is the path of the
    module that called it (`transformer.h.0.attn`), for people. `grad` is false inside `torch.no_grad()`;
    `autocast` is false inside `torch.autocast(enabled=False)`. `random` numbers the ops that draw random
    numbers, in graph order, and is None for the others.
    """

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]
    module: str = ""
    grad: bool = True
    autocast: bool = True
    random: int | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of an op's result, or of an input. `requires_grad`: a gradient flows back through it."""

    spec: TensorSpec
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter by its name in the model. `init` makes a fresh one (see `graph.deferred`); None: it is loaded."""

    spec: TensorSpec
    requires_grad: bool
    init: "tuple[Op, ...] | None" = None


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer by its name in the model. `persistent` ones are in the state dict; `mutated` ones are changed in
    place by the forward pass (batch norm's statistics) and then belong to exactly one stage."""

    spec: TensorSpec
    persistent: bool
    mutated: bool
    init: "tuple[Op, ...] | None" = None


@dataclass(frozen=True, slots=True)
class Constant:
    """A small tensor that is part of the graph itself, as raw little-endian bytes."""

    spec: TensorSpec
    data: bytes


@dataclass(frozen=True)
class OpGraph:
    """A whole model from inputs to loss. Ops are in execution order.

    `values` has the spec of every input and every op's result (ops with several results have none; their
    `getitem`s have). `ties` maps each other name of a shared parameter to the name it is kept under. `outputs`
    names extra results worth having (such as `logits`) by what they are called outside. `autocast` is the dtype
    the ops run under (`bfloat16`), or None.
    """

    inputs: tuple[str, ...]
    ops: tuple[Op, ...]
    values: Mapping[str, Value]
    parameters: Mapping[str, Parameter]
    buffers: Mapping[str, Buffer]
    constants: Mapping[str, Constant]
    loss: str
    outputs: Mapping[str, str] = field(default_factory=dict[str, str])
    ties: Mapping[str, str] = field(default_factory=dict[str, str])
    autocast: str | None = None

    def __hash__(self) -> int:
        """What follows from a graph is kept by it: equal graphs have equal loss, sizes and ops' names."""
        return hash((self.inputs, self.loss, len(self.parameters), *(op.name for op in self.ops)))

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Op name -> its index in `ops`."""
        return {op.name: i for i, op in enumerate(self.ops)}

    @property
    def num_parameters(self) -> int:
        return sum(p.spec.numel for p in self.parameters.values())


@dataclass(frozen=True, slots=True)
class Receive:
    """A value this stage gets from stage `source` and, where `grad`, the stage its gradient goes to: the holder
    of the value before this one (see `graph.cut` for why not simply the producer). `once` values are parameters
    shared with another stage: they come once a step and not once a microbatch."""

    value: str
    source: int
    grad: bool
    grad_to: int
    once: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """A value this stage makes, the stages it goes to, and, where `grad`, the one stage its gradient comes from."""

    value: str
    to: tuple[int, ...]
    grad: bool
    once: bool = False


@dataclass(frozen=True)
class StageGraph:
    """One stage of a cut graph: what one peer needs to run it, and nothing else.

    `grads_from` maps every value whose gradient another stage has summed so far (made here or received here) to
    that stage. `parameters` are owned here: this stage holds their optimizer state. `inputs` come from the
    coordinator. `loss` and `outputs` are set where they are made here. `copies` are the frozen parameters and the
    unchanging buffers that an earlier stage holds too, and keeps in its checkpoints.
    """

    index: int
    num_stages: int
    first_op: int
    end_op: int
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    receives: tuple[Receive, ...]
    sends: tuple[Send, ...]
    grads_from: Mapping[str, int]
    values: Mapping[str, Value]
    parameters: Mapping[str, Parameter]
    buffers: Mapping[str, Buffer]
    constants: Mapping[str, Constant]
    loss: str | None
    outputs: Mapping[str, str]
    autocast: str | None
    copies: frozenset[str] = frozenset()


def refs(arg: Arg) -> Iterator[str]:
    """The names of all values an argument mentions, in order."""
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, tuple):
        for item in cast(tuple[Arg, ...], arg):
            yield from refs(item)


def op_refs(op: Op) -> tuple[str, ...]:
    """The names of all values an op reads, in argument order, repeats kept."""
    return tuple(name for arg in (*op.args, *op.kwargs.values()) for name in refs(arg))
