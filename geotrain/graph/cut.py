"""An `OpGraph` and cut points -> one `StageGraph` a stage. Pure.

A value goes from the stage that makes it straight to every stage that reads it. What needs no parameter and no
input (masks, positions, rotary tables) is recomputed in each stage that reads it, and so is what is made from inputs
alone and is larger than they are; neither is ever sent.

Gradients take another way than values. A value read in stages 1 and 3 gets two gradient contributions, and one
process would add them in the reverse order of its ops: stage 3's first, then each one of stage 1. Floating-point
addition is not associative, so the sum of sums would differ in the last bit. Therefore the gradient travels as a
running sum: stage 3 sends to stage 1, which starts its own sum from it, and only stage 1 sends to the maker. The
bytes are the same and so is the result. Parameters shared by several stages (tied embeddings) are such values too:
the first stage that reads one owns it, sends it to the others once a step, and gets the running sum a microbatch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ..errors import PlanError
from .ir import Op, OpGraph, Receive, Send, StageGraph, Value, op_refs
from .ops import GETITEM, STATISTICS, base_name, is_in_place


@dataclass(frozen=True, slots=True)
class Cut:
    """A place to cut: before op `op_index`. `forward_bytes` cross it a microbatch, and `backward_bytes` come back.
    `module` is where the op behind the cut is in the model."""

    op_index: int
    forward_bytes: int
    backward_bytes: int
    module: str

    @property
    def boundary_bytes(self) -> int:
        return self.forward_bytes + self.backward_bytes


class _Facts:
    """What the cutter must know of every op, whatever the cut points."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.op_of = {op.name: op for op in graph.ops}
        self.mutated = {name for name, buffer in graph.buffers.items() if buffer.mutated}
        self.recomputed = self._recomputed()

    def _recomputed(self) -> frozenset[str]:
        """Results that each stage computes for itself instead of receiving them."""
        graph = self.graph
        sources: dict[str, frozenset[str]] = {name: frozenset((name,)) for name in graph.inputs}
        sources |= {name: frozenset() for name in (*graph.constants, *(graph.buffers.keys() - self.mutated))}
        chosen: set[str] = set()
        for op in graph.ops:
            names = op_refs(op)
            changes = op.target != GETITEM and (is_in_place(op.target) or base_name(op.target) in STATISTICS)
            if op.random is not None or changes or any(name not in sources for name in names):
                continue
            sources[op.name] = frozenset().union(*(sources[name] for name in names))
            value = graph.values.get(op.name)
            input_bytes = sum(graph.values[name].spec.packed.nbytes for name in sources[op.name])
            if not input_bytes or (value is not None and value.spec.packed.nbytes >= input_bytes):
                chosen.add(op.name)
        for op in reversed(graph.ops):  # what they are made from comes with them
            if op.name in chosen:
                chosen.update(n for n in op_refs(op) if n in self.op_of)
        return frozenset(chosen)


@lru_cache(maxsize=4)
def _facts(graph: OpGraph) -> _Facts:
    return _Facts(graph)


def candidate_cuts(graph: OpGraph) -> list[Cut]:
    """The narrow places: where fewer bytes cross than just before and after, in op order. In a chain of blocks these
    are the block borders (and the borders of their halves)."""
    cuts = boundary_bytes(graph)
    narrow: list[Cut] = []
    start = 0
    while start < len(cuts):
        end = start
        while end + 1 < len(cuts) and cuts[end + 1].boundary_bytes == cuts[start].boundary_bytes:
            end += 1
        here = cuts[start].boundary_bytes
        falls = start == 0 or cuts[start - 1].boundary_bytes > here
        rises = end + 1 == len(cuts) or cuts[end + 1].boundary_bytes > here
        if falls and rises and here > 0:
            narrow.append(cuts[end])  # of equally narrow places the last one: there the next block begins
        start = end + 1
    return narrow


def boundary_bytes(graph: OpGraph) -> list[Cut]:
    """Every place to cut, with the bytes that cross it."""
    facts = _facts(graph)
    last_use: dict[str, int] = {}
    for i, op in enumerate(graph.ops):
        if op.name not in facts.recomputed:
            last_use.update(dict.fromkeys(op_refs(op), i))
    for name in (graph.loss, *graph.outputs.values()):
        last_use.setdefault(name, graph.position[name])
    forward, backward = [0] * (len(graph.ops) + 1), [0] * (len(graph.ops) + 1)
    for name, value in graph.values.items():
        made = graph.position.get(name)
        if made is None or name in facts.recomputed or last_use.get(name, made) == made:
            continue
        nbytes = value.spec.packed.nbytes
        for total, counts in ((forward, True), (backward, value.requires_grad)):
            total[made + 1] += nbytes * counts
            total[last_use[name] + 1] -= nbytes * counts
    cuts: list[Cut] = []
    f = b = 0
    for i, op in enumerate(graph.ops):
        f, b = f + forward[i], b + backward[i]
        if i > 0 and op.target != GETITEM:
            cuts.append(Cut(i, f, b, op.module))
    return cuts


def allowed_cuts(graph: OpGraph, cuts: Sequence[Cut]) -> list[Cut]:
    """Those that leave all ops touching one buffer that the forward pass changes in one stage."""
    spans: dict[str, tuple[int, int]] = {}
    for i, op in enumerate(graph.ops):
        for name in op_refs(op):
            if name in graph.buffers and graph.buffers[name].mutated:
                spans[name] = (spans.get(name, (i, i))[0], i)
    return [cut for cut in cuts if not any(first < cut.op_index <= last for first, last in spans.values())]


def recomputed(graph: OpGraph) -> frozenset[str]:
    """Results that each stage that reads them computes for itself: they belong to no place in the graph."""
    return _facts(graph).recomputed


def cut(graph: OpGraph, points: Iterable[int]) -> list[StageGraph]:
    """The stages between cut points, in order.

    Args:
        points: ascending op indices; a cut at i is before op i. No points: one stage.

    Raises:
        PlanError: a point is not inside the graph or out of order, or two stages would need the same buffer that the
            forward pass changes.
    """
    bounds = [0, *points, len(graph.ops)]
    if any(a >= b for a, b in pairwise(bounds)):
        raise PlanError(f"cut points must ascend and lie between 1 and {len(graph.ops) - 1}; got {bounds[1:-1]}")
    return _Cutter(graph, bounds).stages()


class _Cutter:
    def __init__(self, graph: OpGraph, bounds: Sequence[int]) -> None:
        self.graph = graph
        self.facts = _facts(graph)
        self.bounds = bounds
        self.count = len(bounds) - 1
        self.home = self._homes()
        self.ops = [self._stage_ops(s) for s in range(self.count)]
        self.readers = self._readers()

    def _homes(self) -> dict[str, int]:
        """Op name -> the stage it falls into; results stay with the op that made them."""
        home: dict[str, int] = {}
        stage = 0
        for i, op in enumerate(self.graph.ops):
            while i >= self.bounds[stage + 1]:
                stage += 1
            home[op.name] = home[op_refs(op)[0]] if op.target == GETITEM else stage
        return home

    def _stage_ops(self, stage: int) -> tuple[Op, ...]:
        """Its own ops, and those recomputed here because something here reads them. What a recomputed op is made
        from is recomputed with it."""
        graph, recomputed = self.graph, self.facts.recomputed
        wanted = {n for n in (graph.loss, *graph.outputs.values()) if self.home.get(n) == stage} & recomputed
        chosen: list[Op] = []
        for op in reversed(graph.ops):
            mine = self.home[op.name] == stage and op.name not in recomputed
            if mine or op.name in wanted:
                names = op_refs(op)
                wanted.update(names if op.name in wanted else (n for n in names if n in recomputed))
                chosen.append(op)
        return tuple(chosen[::-1])

    def _readers(self) -> dict[str, list[int]]:
        """Value, parameter or buffer name -> the stages that read it, ascending."""
        readers: dict[str, list[int]] = {}
        for stage, ops in enumerate(self.ops):
            for name in dict.fromkeys(n for op in ops for n in op_refs(op)):
                readers.setdefault(name, []).append(stage)
        return readers

    def stages(self) -> list[StageGraph]:
        self._check_buffers()
        return [self._stage(s) for s in range(self.count)]

    def _check_buffers(self) -> None:
        for name in self.facts.mutated:
            users = self.readers.get(name, [])
            if len(users) > 1:
                raise PlanError(
                    f"stages {users[0]} and {users[-1]} would both need buffer {name!r}, which the forward pass "
                    "changes; move the cut so that all ops that touch it are in one stage"
                )

    def _holders(self, name: str) -> list[int]:
        """The stages that hold a value, maker (or owner) first; empty where it never crosses a cut."""
        readers = self.readers.get(name, [])
        if name in self.graph.parameters:
            return readers if self.graph.parameters[name].requires_grad else []
        if name not in self.home:
            return []
        made = self.home[name]
        elsewhere = [s for s in readers if s != made and not self._has(s, name)]
        return [made, *elsewhere] if elsewhere else []

    def _has(self, stage: int, name: str) -> bool:
        return any(op.name == name for op in self.ops[stage])

    def _stage(self, stage: int) -> StageGraph:
        graph, ops = self.graph, self.ops[stage]
        made = {op.name for op in ops}
        read = dict.fromkeys(n for op in ops for n in op_refs(op))
        receives: list[Receive] = []
        sends: list[Send] = []
        grads_from: dict[str, int] = {}
        for name in (*read, *(op.name for op in ops if op.name not in read)):
            holders = self._holders(name)
            if len(holders) < 2 or stage not in holders:
                continue
            once = name in graph.parameters
            grad = once or graph.values[name].requires_grad
            position = holders.index(stage)
            if position == 0:
                sends.append(Send(name, tuple(holders[1:]), grad, once))
            else:
                receives.append(Receive(name, holders[0], grad, holders[position - 1], once))
            if grad and position + 1 < len(holders):
                grads_from[name] = holders[position + 1]
        received = {r.value for r in receives}
        homeless = stage == 0
        parameters = {
            n: p
            for n, p in graph.parameters.items()
            if (n in read and n not in received) or (homeless and n not in self.readers)
        }
        buffers = {n: b for n, b in graph.buffers.items() if n in read or (homeless and n not in self.readers)}
        copies = frozenset(n for n in (*parameters, *buffers) if self.readers.get(n, [stage])[0] != stage)
        return StageGraph(
            index=stage,
            num_stages=self.count,
            first_op=self.bounds[stage],
            end_op=self.bounds[stage + 1],
            ops=ops,
            inputs=tuple(n for n in graph.inputs if n in read),
            receives=tuple(receives),
            sends=tuple(sends),
            grads_from=grads_from,
            values={n: v for n, v in graph.values.items() if n in made or n in read}
            | {r.value: Value(graph.parameters[r.value].spec, True) for r in receives if r.once},
            parameters=parameters,
            buffers=buffers,
            constants={n: c for n, c in graph.constants.items() if n in read},
            loss=graph.loss if graph.loss in made else None,
            outputs={o: n for o, n in graph.outputs.items() if n in made},
            autocast=graph.autocast,
            copies=copies,
        )


def stage_edges(stages: Sequence[StageGraph]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Who waits for whom: (source, reader) of forward values, and (sender, receiver) of gradients."""
    forward = {(r.source, s.index) for s in stages for r in s.receives if not r.once}
    backward = {(s.index, r.grad_to) for s in stages for r in s.receives if r.grad}
    return forward, backward


def stage_modules(graph: OpGraph, bounds: Sequence[int]) -> list[str]:
    """By stage, the modules it starts and ends in, for people: `h.0 - h.3`."""
    phrases: list[str] = []
    for first, end in pairwise(bounds):
        modules = [op.module for op in graph.ops[first:end] if op.module]
        ends = [_short(m) for m in (modules[:1] + modules[-1:])]
        phrases.append(" - ".join(dict.fromkeys(ends)) or "(top level)")
    return phrases


def _short(module: str) -> str:
    """A module path up to and including its first number: `transformer.h.3.attn` -> `transformer.h.3`."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return module
