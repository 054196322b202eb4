"""An `nn.Module` becomes an `OpGraph`, by `torch.export`. Pure (it traces; it computes nothing real).

Three passes over what export traced: blocks under `no_grad` or `autocast` are inlined and their ops marked;
in-place changes of activations are rewritten into new values (`functional`); what does not lead to the loss is
dropped. A last walk over fake tensors records the shape, strides, dtype and `requires_grad` of every value.
"""

import inspect
import io
import logging
import operator
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind

from ..errors import CaptureError, GraphFormatError
from ..words import number_of
from .eager import as_in_eager_mode
from .fake import on_fake_cpu
from .functional import Functionalizer
from .ir import LOGITS, Buffer, Constant, Op, OpGraph, Parameter, Ref, Value, op_refs
from .ops import DROPPED, GETITEM, REWRITES, STATISTICS, argument, base_name, draws_random, resolve, to_arg
from .serial import tensor_bytes, tensor_spec

Inputs = Mapping[str, torch.Tensor] | Sequence[torch.Tensor]


class _LossModule(nn.Module):
    """Gives a user's model one calling convention: named tensors in, (loss, named extras) out."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self.names = names

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return split_loss(self.module(**dict(zip(self.names, tensors, strict=True))))


def split_loss(output: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A model's output as (loss, extras). Understands a loss, `(loss, {"name": tensor})`, `(loss, ...)`, and
    anything with a `loss` (and `logits`) attribute or key. Raises `CaptureError` for the rest."""
    extras: dict[str, torch.Tensor] = {}
    loss = output
    if isinstance(output, tuple | list) and output:
        loss = output[0]
        if len(output) > 1 and isinstance(output[1], Mapping):
            extras = {k: v for k, v in output[1].items() if isinstance(v, torch.Tensor)}
    elif not isinstance(output, torch.Tensor):
        read = output.get if isinstance(output, Mapping) else lambda name: getattr(output, name, None)
        loss = read("loss")
        logits = read(LOGITS)
        if isinstance(logits, torch.Tensor):
            extras = {LOGITS: logits}
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise CaptureError(
            f"the model must return its loss, one number, but its forward gave {type(loss).__name__}"
            + (f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else "")
            + "; return the loss, (loss, {'logits': ...}), or an output with a .loss (pass the labels too), "
            + "or give Trainer a loss function"
        )
    return loss, extras


def name_inputs(module: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Inputs by the names of the parameters of the module's forward. Raises `CaptureError` when they don't fit."""
    if isinstance(inputs, Mapping):
        named = dict(inputs)
    else:
        names = [
            p.name
            for p in inspect.signature(module.forward).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if len(inputs) > len(names):
            raise CaptureError(
                f"the model's forward takes {number_of('input', len(names))} ({', '.join(names)}), not {len(inputs)}; "
                "if the last is the target, give Trainer a loss function"
            )
        named = dict(zip(names, inputs, strict=False))
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(f"input {name!r} is {type(tensor).__name__}, not a tensor; fix it in the model instead")
    return named


def capture(
    module: nn.Module,
    example_inputs: Inputs,
    *,
    autocast: str | None = None,
    init: Mapping[str, Any] | None = None,
) -> OpGraph:
    """The graph of one microbatch, from inputs to loss.

    Args:
        module: any module whose forward returns the loss (see `split_loss`), in the mode (train or eval) it is to
            run in. Its tensors, and the inputs, may be on the meta device.
        example_inputs: one microbatch, by the names of forward's parameters, or in their order. Shapes are static.
        autocast: `bfloat16` or `float16` to run the ops under `torch.autocast`, as a training loop would.
        init: fresh-value programs by parameter and buffer name, from `graph.deferred.record`.

    Raises:
        CaptureError: the model has control flow that depends on values, or an op that may not travel; the message
            names the module or the op.
    """
    with on_fake_cpu(module, name_inputs(module, example_inputs)) as named:
        program = _export(_LossModule(module, tuple(named)).train(module.training), tuple(named.values()))
        return _Capture(module, program, tuple(named), autocast, init or {}).graph()


def _export(module: _LossModule, inputs: tuple[torch.Tensor, ...]) -> torch.export.ExportedProgram:
    """Traces the module along the path that it takes in eager mode or, where that one depends on values, along the
    one that it takes when it is traced."""
    try:
        with _quiet(), as_in_eager_mode(module.names):
            return torch.export.export(module, inputs, strict=False)
    except CaptureError:
        raise
    except Exception:
        pass  # the second attempt tells what is wrong
    try:
        with _quiet():
            return torch.export.export(module, inputs, strict=False)
    except Exception as error:  # export raises many kinds, none of them documented
        raise CaptureError(_explain(error)) from error


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Whatever goes wrong is raised; torch's pages of logs and prints about it help nobody."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _explain(error: Exception) -> str:
    text = " ".join(str(error).split())
    kind = type(error).__name__
    if "data-dependent" in text.lower() or "DataDependent" in kind or "Could not guard" in text:
        what = "its control flow or its shapes depend on the values of tensors"
        todo = "replace Python `if`/`for`/`.item()` on tensor values by tensor ops such as torch.where"
    else:
        what, todo = f"{kind}: {text[:300]}", "check that the model runs on these example inputs"
    where = _user_frame(error)
    return f"the model cannot be captured: {what}{f' (in {where})' if where else ''}; {todo}"


def _user_frame(error: Exception) -> str:
    """The innermost frame of the user's code, as `file.py:12 in forward`."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/torch/" not in code.co_filename and "geotrain/graph" not in code.co_filename:
            found = f"{code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found


class _Capture:
    """From an exported program to an `OpGraph`; one use."""

    def __init__(
        self,
        module: nn.Module,
        program: torch.export.ExportedProgram,
        input_names: tuple[str, ...],
        autocast: str | None,
        init: Mapping[str, Any],
    ) -> None:
        self._module = module
        self._program = program
        self._inputs = input_names
        self._autocast = autocast
        self._init = init
        self._names: dict[torch.fx.Node, str] = {}
        self._ops: list[Op] = []
        self._taken: set[str] = set()

    def graph(self) -> OpGraph:
        parameters, ties, tensors = self._parameters()
        buffers = self._buffers(tensors)
        constants: dict[str, Constant] = {}
        self._bind_placeholders(ties, tensors, constants)
        outputs = self._inline(self._program.graph_module, "", grad=True, autocast=True)
        loss, *extras = (self._names[node] for node in outputs)
        layout: Any = self._program.call_spec.out_spec
        names = list(layout.child(1).context) if len(extras) else []
        result = Functionalizer(self._ops, tensors, set(parameters), set(buffers), self._autocast).run(loss, extras)
        loss, extras = result.outputs[0], result.outputs[1:]
        ops = [replace(op, random=None) for op in result.ops]
        number = 0
        for i, op in enumerate(ops):
            if draws_random(op):
                ops[i] = replace(op, random=number)
                number += 1
        changes = {**result.changes, **_statistics(ops, set(buffers))}
        mutated = {name for names in changes.values() for name in names}
        ops = _live(ops, [loss, *extras], changes)
        ops = _results_next_to_makers(ops)
        used = {name for op in ops for name in op_refs(op)} | {op.name for op in ops} | {loss, *extras}
        return OpGraph(
            inputs=tuple(n for n in self._inputs if n in used),
            ops=tuple(ops),
            values={n: v for n, v in result.values.items() if n in used and n not in tensors}
            | self._input_values(used),
            parameters=parameters,
            buffers={n: replace(b, mutated=n in mutated) for n, b in buffers.items() if n in used or b.persistent},
            constants={n: c for n, c in constants.items() if n in used},
            loss=loss,
            outputs=dict(zip(names, extras, strict=True)),
            ties=ties,
            autocast=self._autocast,
        )

    def _input_values(self, used: set[str]) -> dict[str, Value]:
        specs = (n.meta["val"] for n in self._program.graph.nodes if n.op == "placeholder" and n in self._user_inputs)
        return {
            name: Value(tensor_spec(fake), False)
            for name, fake in zip(self._inputs, specs, strict=True)
            if name in used
        }

    def _parameters(self) -> tuple[dict[str, Parameter], dict[str, str], dict[str, torch.Tensor]]:
        """Parameters by the first name each has, the other names they are known by, and the tensors."""
        first: dict[int, str] = {}
        ties: dict[str, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        parameters: dict[str, Parameter] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            if id(parameter) in first:
                ties[name] = first[id(parameter)]
                continue
            first[id(parameter)] = name
            tensors[name] = parameter
            parameters[name] = Parameter(tensor_spec(parameter), parameter.requires_grad, self._init.get(name))
        return parameters, ties, tensors

    def _buffers(self, tensors: dict[str, torch.Tensor]) -> dict[str, Buffer]:
        buffers: dict[str, Buffer] = {}
        for prefix, module in self._module.named_modules(remove_duplicate=False):
            hidden = module._non_persistent_buffers_set
            for local, buffer in module._buffers.items():
                name = f"{prefix}.{local}" if prefix else local
                if buffer is not None:
                    tensors[name] = buffer
                    buffers[name] = Buffer(tensor_spec(buffer), local not in hidden, False, self._init.get(name))
        return buffers

    def _bind_placeholders(
        self, ties: Mapping[str, str], tensors: dict[str, torch.Tensor], constants: dict[str, Constant]
    ) -> None:
        specs = {s.arg.name: s for s in self._program.graph_signature.input_specs}  # type: ignore[union-attr]
        inputs = iter(self._inputs)
        self._user_inputs: set[torch.fx.Node] = set()
        for node in self._program.graph.nodes:
            if node.op != "placeholder":
                continue
            spec = specs[node.name]
            if spec.kind == InputKind.USER_INPUT:
                self._user_inputs.add(node)
                name = next(inputs)
                if name in tensors:
                    raise CaptureError(f"input {name!r} has the name of a parameter or buffer; rename it in forward")
                tensors[name] = node.meta["val"]
            else:
                name = (spec.target or "").removeprefix("module.")
                name = ties.get(name, name)
                if name not in tensors:
                    value = self._program.constants.get(spec.target or "")
                    if not isinstance(value, torch.Tensor):
                        raise CaptureError(f"the model uses {spec.target!r}, which is not a tensor; make it a buffer")
                    if value.device.type == "meta":
                        raise CaptureError(
                            f"the model makes a constant tensor on the meta device ({name}); build the model with "
                            "real weights, or register the tensor as a buffer"
                        )
                    name = f"constant.{len(constants)}"
                    constants[name] = Constant(tensor_spec(value), tensor_bytes(value))
                    tensors[name] = value
            self._names[node] = name

    def _inline(self, module: torch.fx.GraphModule, module_path: str, *, grad: bool, autocast: bool) -> list[Any]:
        """Appends the ops of a traced module; returns its output nodes."""
        outputs: list[Any] = []
        for node in module.graph.nodes:
            if node.op == "call_function":
                path = _module_path(node) or module_path
                self._call(module, node, path, grad, autocast)
            elif node.op == "output":
                outputs = list(node.args[0])
        return outputs

    def _call(self, module: torch.fx.GraphModule, node: torch.fx.Node, path: str, grad: bool, autocast: bool) -> None:
        target = node.target
        kind = getattr(target, "__name__", str(target))
        if kind == "wrap_with_set_grad_enabled":
            enabled, body, *args = node.args
            self._enter(module, node, body, args, path, grad=grad and bool(enabled), autocast=autocast)
        elif kind == "wrap_with_autocast":
            _, _, enabled, _, body, *args = node.args
            self._enter(module, node, body, args, path, grad=grad, autocast=autocast and bool(enabled))
        elif target is operator.getitem:
            source, index = node.args
            if isinstance(self._names.get(source), tuple):  # type: ignore[arg-type]
                self._names[node] = self._names[source][index]  # type: ignore[index]
            else:
                self._append(node, GETITEM, path, grad, autocast)
        else:
            name = str(target)
            if name in DROPPED:
                return
            if name.startswith("aten.sym_"):
                raise CaptureError(
                    f"module {path or '(root)'!r}: a shape depends on the values of the inputs; "
                    "use masks instead of selecting by them"
                )
            name = REWRITES.get(name, name)
            try:
                resolve(name)
            except GraphFormatError:
                raise CaptureError(
                    f"the model cannot be captured: module {path or '(root)'!r} uses op {name!r}, which peers do not "
                    "run; rewrite that module with ordinary tensor ops"
                ) from None
            self._append(node, name, path, grad, autocast)

    def _enter(
        self, module: torch.fx.GraphModule, node: torch.fx.Node, body: Any, args: Sequence[Any], path: str,
        *, grad: bool, autocast: bool,
    ) -> None:  # fmt: skip
        inner = getattr(module, body.target)
        for placeholder, arg in zip((n for n in inner.graph.nodes if n.op == "placeholder"), args, strict=True):
            self._names[placeholder] = self._names[arg]
        outputs = self._inline(inner, path, grad=grad, autocast=autocast)
        self._names[node] = tuple(self._names.get(o) for o in outputs)  # type: ignore[assignment]

    def _append(self, node: torch.fx.Node, target: str, path: str, grad: bool, autocast: bool) -> None:
        def name_of(value: Any) -> str | None:
            return self._names[value] if isinstance(value, torch.fx.Node) else None

        try:
            args = tuple(to_arg(a, name_of) for a in node.args)
            kwargs = {k: to_arg(a, name_of) for k, a in node.kwargs.items() if k != "pin_memory"}
        except (CaptureError, KeyError) as error:
            raise CaptureError(f"module {path or '(root)'!r}, op {target!r}: {error}") from None
        name = f"%{node.name}"
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        self._names[node] = name
        self._ops.append(Op(name, target, args, kwargs, path, grad, autocast))


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    return path.removeprefix("module.").removeprefix("module")


def _statistics(ops: Sequence[Op], buffers: set[str]) -> dict[str, tuple[str, ...]]:
    """Op name -> the running statistics it updates, which ATen's schemas do not tell."""
    changes: dict[str, tuple[str, ...]] = {}
    for op in ops:
        positions = STATISTICS.get(base_name(op.target), ())
        if positions and argument(op, 5, "training", True):
            names = [a.name for a in (op.args[p] for p in positions if p < len(op.args)) if isinstance(a, Ref)]
            if any(n in buffers for n in names):
                changes[op.name] = tuple(names)
    return changes


def _live(ops: Sequence[Op], outputs: Sequence[str], changes: Mapping[str, Any]) -> list[Op]:
    """The ops that lead to an output or change a buffer."""
    needed = set(outputs)
    kept: list[Op] = []
    for op in reversed(ops):
        if op.name in needed or op.name in changes:
            needed.update(op_refs(op))
            kept.append(op)
    return kept[::-1]


def _results_next_to_makers(ops: Sequence[Op]) -> list[Op]:
    """`getitem`s right behind the op whose results they read, so that no cut separates them."""
    readers: dict[str, list[Op]] = {}
    for op in ops:
        if op.target == GETITEM:
            readers.setdefault(op_refs(op)[0], []).append(op)
    return [o for op in ops if op.target != GETITEM for o in (op, *readers.get(op.name, ()))]
