"""What a stage costs: FLOPs, and bytes of weights, activations and boundaries. Pure.

Activation memory is an estimate of what autograd saves between a microbatch's forward and its backward: for
each op the tensors its derivative reads, a tensor and its views counted once. It errs towards too much.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .errors import PlanError
from .graph.cut import recomputed
from .graph.ir import OpGraph, op_refs
from .graph.ops import GETITEM
from .opcost import backward_flops, extra_saved_bytes, op_flops, saved_values, spec_of, storages


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage costs: FLOPs a microbatch, bytes of its weights and of one live microbatch.

    `bytes_in` and `bytes_out` cross its cuts forward in each microbatch, `gradient_bytes_in` come back for
    what it made, `gradient_bytes_out` leave for what it received. `gradient_bytes` are the parameters' own.
    `input_bytes` are the model's inputs that it reads. `transient_bytes` are held while an op runs.
    """

    flops_forward: int
    flops_backward: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    activation_bytes_per_microbatch: int
    bytes_in: int
    bytes_out: int
    gradient_bytes_in: int
    gradient_bytes_out: int
    input_bytes: int
    transient_bytes: int

    @property
    def flops(self) -> int:
        return self.flops_forward + self.flops_backward

    def memory_bytes(self, live_microbatches: int) -> int:
        """All that a stage holds but the runtime itself: state, live microbatches, frames on their way."""
        return sum(getattr(self, name) for name in _HELD) + (live_microbatches * self.activation_bytes_per_microbatch)


_SUMS = (
    "flops_forward", "flops_backward", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes",
    "activation_bytes_per_microbatch", "bytes_in", "bytes_out", "gradient_bytes_in", "gradient_bytes_out",
    "input_bytes",
)  # fmt: skip
_HELD = (
    "parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes", "bytes_in", "bytes_out",
    "gradient_bytes_in", "gradient_bytes_out", "transient_bytes",
)  # fmt: skip
_Add = Mapping[str, int]


def optimizer_states(optimizer: str, momentum: float) -> int:
    """How many tensors of a parameter's size and dtype the optimizer keeps. Raises `PlanError` if unknown."""
    if optimizer not in ("adamw", "sgd"):
        raise PlanError(f"unknown optimizer {optimizer!r}; use adamw or sgd")
    return 2 if optimizer == "adamw" else int(momentum != 0)


class CostTable:
    """The cost of every stage that begins and ends at one of `points`, looked up in constant time.

    Every quantity is a sum over things (an op's FLOPs, a parameter, a saved tensor) that a stage `[a, b)` has
    when it holds at least one of the thing's places. With the places in order, that is true of those (a, b)
    where, for exactly one place u, `previous place < a <= u < b`: a rectangle of (a, b). All rectangles go
    into one difference array, whose running sums are the table. O(places + points^2) to build; what does not
    depend on the points is kept for the next table of the graph.
    """

    def __init__(self, graph: OpGraph, points: Sequence[int], optimizer: str = "adamw", momentum: float = 0.0) -> None:
        if list(points) != sorted(set(points)) or points[0] < 0 or points[-1] > len(graph.ops):
            raise PlanError(f"stage borders must ascend from 0 to {len(graph.ops)}; got {list(points)}")
        self.points = tuple(points)
        things, size = _things(graph, optimizer_states(optimizer, momentum)), len(points)
        a0, a1, b0, b1 = np.searchsorted(np.asarray(points), things.bounds, side="right")
        planes = np.zeros((len(_SUMS), size + 1, size + 1), dtype=np.int64)
        for a, b, sign in ((a0, b0, 1), (a0, b1, -1), (a1, b0, -1), (a1, b1, 1)):
            np.add.at(planes, (things.quantities, a, b), sign * things.amounts)
        sums = planes.cumsum(axis=1).cumsum(axis=2)[:, :size, :size]
        self._sums = {name: sums[i] for i, name in enumerate(_SUMS)}
        transient = np.zeros((size, size), dtype=np.int64)
        segments = np.array([things.largest[a:b].max() for a, b in pairwise(points)], np.int64)
        for i in range(size - 1):
            transient[i, i + 1 :] = np.maximum.accumulate(segments[i:])
        self._sums["transient_bytes"] = transient

    def __getitem__(self, quantity: str) -> NDArray[np.int64]:
        """A `StageCost` field for all stages: element (i, j) is of `[points[i], points[j])`, i < j."""
        return self._sums[quantity]

    def flops(self) -> NDArray[np.int64]:
        """`StageCost.flops` for all stages."""
        return self["flops_forward"] + self["flops_backward"]

    def memory_bytes(self, live_microbatches: int) -> NDArray[np.int64]:
        """`StageCost.memory_bytes` for all stages."""
        held = np.sum([self[name] for name in _HELD], axis=0)
        return held + live_microbatches * self["activation_bytes_per_microbatch"]

    def stage(self, i: int, j: int) -> StageCost:
        """The cost of the stage `[points[i], points[j])`."""
        return StageCost(**{name: int(values[i, j]) for name, values in self._sums.items()})


@dataclass(frozen=True, slots=True)
class _Things:
    """Rectangles of stages `[a, b)`, a column each, and what they add to which quantity of `_SUMS`.

    The rows of `bounds` are x, y, z and w in `x < a <= y` and `z < b <= w`. `largest`: twice the largest tensor that
    the op at a place makes or reads, for the tensor and its gradient in the making.
    """

    bounds: NDArray[np.int64]
    quantities: NDArray[np.int64]
    amounts: NDArray[np.int64]
    largest: NDArray[np.int64]


@lru_cache(maxsize=4)
def _things(graph: OpGraph, states: int) -> _Things:
    found = _Finder(graph, states)
    columns = np.array(found.rectangles, dtype=np.int64).reshape(-1, 6).T
    return _Things(columns[:4], columns[4], columns[5], found.largest())


class _Finder:
    def __init__(self, graph: OpGraph, states: int) -> None:
        self._graph = graph
        self._places = _places(graph)
        self.rectangles: list[tuple[int, ...]] = []
        self._add_ops()
        self._add_weights(states)
        self._add_activations()
        self._add_boundaries()

    def _rectangle(self, first: tuple[int, int], end: tuple[int, int], add: _Add) -> None:
        """Adds to all stages `[a, b)` with `first[0] < a <= first[1]` and `end[0] < b <= end[1]`."""
        self.rectangles += [(*first, *end, _SUMS.index(name), amount) for name, amount in add.items() if amount]

    def _once(self, places: Iterable[int], add: _Add, after: int = -1, until: int | None = None) -> None:
        """Adds to every stage between `after` and `until` that holds one of `places`, once."""
        last = len(self._graph.ops) if until is None else until
        for place in sorted(set(places)):
            self._rectangle((after, place), (place, last), add)
            after = place

    def _add_ops(self) -> None:
        for op in self._graph.ops:
            work = {
                "flops_forward": op_flops(op, self._graph),
                "flops_backward": backward_flops(op, self._graph),
            }
            self._once(self._places.of(op.name), work)

    def _add_weights(self, states: int) -> None:
        for name, parameter in self._graph.parameters.items():
            places = self._places.readers.get(name) or [0]  # what nothing reads lives in the first stage
            nbytes, trains = parameter.spec.nbytes, parameter.requires_grad
            self._once(places, {"parameter_bytes": nbytes, "gradient_bytes": nbytes * trains})
            self._once(places[:1], {"optimizer_bytes": nbytes * trains * states})
        for kind in (self._graph.buffers, self._graph.constants):
            for name, tensor in kind.items():
                self._once(self._places.readers.get(name) or [0], {"buffer_bytes": tensor.spec.nbytes})

    def _add_activations(self) -> None:
        graph, keepers = self._graph, dict[str, list[int]]()
        roots = storages(graph)
        for op in graph.ops:
            places = self._places.of(op.name)
            self._once(places, {"activation_bytes_per_microbatch": extra_saved_bytes(op, graph)})
            for name in saved_values(op, graph):
                keepers.setdefault(roots.get(name, name), []).extend(places)
        for name, places in keepers.items():
            spec = graph.values[name].spec if name in graph.values else None
            if spec is not None:
                self._once(places, {"activation_bytes_per_microbatch": spec.packed.nbytes})

    def _add_boundaries(self) -> None:
        for name in self._graph.inputs:
            self._once(self._places.readers.get(name, ()), {"input_bytes": self._graph.values[name].spec.packed.nbytes})
        for name, made in self._places.home.items():
            value = self._graph.values.get(name)
            waits = [place for place in self._places.waits.get(name, ()) if place > made]
            if value is None or not waits:
                continue
            nbytes = value.spec.packed.nbytes
            gradient = nbytes * value.requires_grad
            received = {"bytes_in": nbytes, "gradient_bytes_out": gradient}
            for after, until in pairwise([made, *self._places.again[name], len(self._graph.ops)]):
                self._once((place for place in waits if after < place < until), received, after, until)
            sent = {  # even where all later readers happen to compute it again: their cuts decide that
                "bytes_out": nbytes,
                "gradient_bytes_in": gradient,
                "activation_bytes_per_microbatch": gradient,  # kept until its gradient is back
            }
            self._rectangle((-1, made), (made, waits[-1]), sent)

    def largest(self) -> NDArray[np.int64]:
        graph = self._graph
        largest = np.zeros(len(graph.ops) + 1, dtype=np.int64)
        for op in graph.ops:
            specs = [spec for n in (op.name, *op_refs(op)) if (spec := spec_of(graph, n)) is not None]
            nbytes = 2 * max((spec.packed.nbytes for spec in specs), default=0)
            for place in self._places.of(op.name):
                largest[place] = max(largest[place], nbytes)
        return largest


@dataclass(frozen=True, slots=True)
class _Places:
    """Where things happen, as op indices in order.

    An op happens at its own place (`home`), or is computed `again` wherever an op that reads it is; what such
    an op is made from comes with it. Results that `getitem` reads stay with their op. `readers` are
    all places that read a value or weight, `waits` those of them that a value would be sent to.
    """

    home: Mapping[str, int]
    again: Mapping[str, list[int]]
    readers: Mapping[str, list[int]]
    waits: Mapping[str, list[int]]

    def of(self, op: str) -> list[int]:
        return sorted({*self.again[op], *([self.home[op]] if op in self.home else [])})


def _places(graph: OpGraph) -> _Places:
    nowhere, home = recomputed(graph), dict[str, int]()
    for i, op in enumerate(graph.ops):
        home[op.name] = home[op_refs(op)[0]] if op.target == GETITEM else i
    again, readers, waits = (defaultdict[str, set[int]](set) for _ in range(3))
    for name in nowhere.intersection((graph.loss, *graph.outputs.values())):
        again[name].add(home[name])
    for op in reversed(graph.ops):
        own = set[int]() if op.name in nowhere else {home[op.name]}
        for name in op_refs(op):
            readers[name] |= own | again[op.name]
            again[name] |= again[op.name] | (own if name in nowhere else set())
            waits[name] |= own
    return _Places(
        {name: place for name, place in home.items() if name not in nowhere},
        {op.name: sorted(again[op.name]) for op in graph.ops},
        *({name: sorted(found) for name, found in places.items()} for places in (readers, waits)),
    )


def stage_cost(graph: OpGraph, first: int, end: int, optimizer: str = "adamw", momentum: float = 0.0) -> StageCost:
    """The cost of the stage `[first, end)` alone. For many stages of one graph use a `CostTable`."""
    return CostTable(graph, (first, end), optimizer, momentum).stage(0, 1)
