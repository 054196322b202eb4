"""Blocks of a graph, what was measured of them, and the seconds of any stage that follow. Pure.

The graph is split at its narrow places. Blocks with the same ops, shapes and dtypes take the same time, so one of
them is measured for all (24 equal blocks, one measurement), once for each kind of peer. A measured block counts as
what it took times the speed of the machine while it was measured: FLOPs as that kind of machine feels them. A peer's
seconds are such FLOPs over its own speed, which duty cap and other load lower. What is not measured counts as the
FLOPs of `opcost`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from .base import Peer
from .graph.cut import allowed_cuts, candidate_cuts, cut, recomputed
from .graph.ir import Arg, OpGraph, Ref, StageGraph, op_refs
from .opcost import backward_flops, op_flops

Floats = NDArray[np.float64]

NARROW = 1.5
"""A border between blocks is at most so many times wider than the narrow places next to it: the residual stream of a
transformer is, the queries and keys inside its attention are not."""

LONGEST_S = 2.0
"""A block that takes longer is not measured, since all wait for it; of it FLOPs are estimate enough."""


@dataclass(frozen=True, slots=True)
class BlockTime:
    """What one microbatch of a block takes: seconds, and the bytes that autograd keeps between forward and backward.
    Backward is input gradient and weight gradient together."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    saved_bytes: int

    @property
    def backward_s(self) -> float:
        return self.input_gradient_s + self.weight_gradient_s


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured on one kind of peer: by block signature, while the machine did `flops_per_s`."""

    flops_per_s: float
    times: Mapping[str, BlockTime]


@dataclass(frozen=True, slots=True)
class Block:
    """Ops `[first_op, end_op)`. Blocks of one `signature` take equal time. `graph` is what to run to measure it: its
    own ops; all they read from elsewhere is received, masks and positions too."""

    first_op: int
    end_op: int
    signature: str
    graph: StageGraph


def blocks(graph: OpGraph) -> tuple[Block, ...]:
    """The graph as blocks, in op order, from its start to its end."""
    narrow = allowed_cuts(graph, candidate_cuts(graph))
    width = [place.boundary_bytes for place in narrow]
    least = [min(width[max(0, i - 1) : i + 2]) for i in range(len(width))]
    points = [
        place.op_index for place, near in zip(narrow, least, strict=True) if place.boundary_bytes <= NARROW * near
    ]
    everywhere = recomputed(graph) & graph.values.keys()  # an op with several results stays: only they are tensors
    found: list[Block] = []
    for stage in cut(graph, points):
        ops = tuple(op for op in stage.ops if op.name not in everywhere)
        read = dict.fromkeys(name for op in ops for name in op_refs(op))
        given = [name for name in read if name in everywhere]
        known = {*read, *(op.name for op in ops), *stage.inputs, *(r.value for r in stage.receives)}
        values = {name: value for name, value in stage.values.items() if name in known}
        block = replace(stage, ops=ops, inputs=(*stage.inputs, *given), values=values)
        found.append(Block(stage.first_op, stage.end_op, _signature(block), block))
    return tuple(found)


def distinct(found: Sequence[Block]) -> tuple[Block, ...]:
    """One block of each signature, in order."""
    firsts: dict[str, Block] = {}
    for block in found:
        firsts.setdefault(block.signature, block)
    return tuple(firsts.values())


def to_measure(graph: OpGraph, peer: Peer) -> tuple[Block, ...]:
    """One block of each signature, in order: those that the peer can hold, and runs in `LONGEST_S` as far as FLOPs
    tell."""
    costs, chosen = CostModel(graph), list[Block]()
    for block in distinct(blocks(graph)):
        tensors = (*block.graph.parameters.values(), *block.graph.values.values())
        seconds = sum(costs.seconds(peer, block.first_op, block.end_op))
        if seconds <= LONGEST_S and 2 * sum(tensor.spec.nbytes for tensor in tensors) <= peer.memory_bytes / 2:
            chosen.append(block)
    return tuple(chosen)


def _signature(stage: StageGraph) -> str:
    """A hash of what the time depends on: ops, shapes, dtypes and which gradients flow, but no names."""
    number: dict[str, int] = {}
    facts: list[object] = [stage.autocast]

    def seen(name: str) -> int:
        if name not in number:
            number[name] = len(number)
            value = stage.values.get(name)
            tensor = value or stage.parameters.get(name) or stage.buffers.get(name) or stage.constants.get(name)
            facts.append((None if tensor is None else tensor.spec, getattr(tensor, "requires_grad", False)))
        return number[name]

    def plain(arg: Arg) -> object:
        if isinstance(arg, Ref):
            return ("ref", seen(arg.name))
        return tuple(plain(item) for item in cast(tuple[Arg, ...], arg)) if isinstance(arg, tuple) else arg

    for op in stage.ops:
        arguments = (plain(op.args), {key: plain(arg) for key, arg in op.kwargs.items()})
        facts.append((op.target, arguments, op.grad, op.autocast, op.random is not None, seen(op.name)))
    facts.append(sorted(seen(r.value) for r in stage.receives if r.grad))
    facts.append(sorted(seen(name) for name in stage.grads_from))
    facts.append(None if stage.loss is None else seen(stage.loss))
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class CostModel:
    """Seconds of one microbatch of any stage on any peer.

    Args:
        kinds: the kind of each peer, by name.
        profiles: what was measured, by kind. Peers of other kinds are estimated from FLOPs.
    """

    graph: OpGraph
    kinds: Mapping[str, str] = field(default_factory=dict[str, str])
    profiles: Mapping[str, Profile] = field(default_factory=dict[str, Profile])
    _work: dict[str, Floats] = field(default_factory=dict[str, Floats], init=False, repr=False)

    def until(self, peer: Peer, points: Sequence[int]) -> Floats:
        """Seconds (forward, backward) from the graph's start to each of `points`, as an array (2, points): a stage
        `[points[i], points[j])` takes the difference of columns j and i."""
        return self._cumulated(self.kinds.get(peer.name, ""))[:, points] / peer.flops_per_s

    def seconds(self, peer: Peer, first_op: int, end_op: int) -> tuple[float, float]:
        """Seconds (forward, backward) of the stage `[first_op, end_op)`."""
        start, end = self.until(peer, [first_op, end_op]).T
        return float(end[0] - start[0]), float(end[1] - start[1])

    def matrix(self, peer: Peer, points: Sequence[int]) -> tuple[Floats, Floats]:
        """Seconds forward and backward: element (i, j) is of the stage `[points[i], points[j])`, i < j."""
        forward, backward = (row[None, :] - row[:, None] for row in self.until(peer, points))
        return forward, backward

    def _cumulated(self, kind: str) -> Floats:
        """FLOPs (forward, backward) before each op, (2, ops + 1), as this kind of machine feels them."""
        if kind not in self._work:
            profile = self.profiles.get(kind)
            work = self._estimated if profile is None else self._measured(profile)
            self._work[kind] = np.pad(work.cumsum(axis=1), ((0, 0), (1, 0)))
        return self._work[kind]

    @property
    def _estimated(self) -> Floats:
        """FLOPs (forward, backward) of each op."""
        rows = [[float(flops(op, self.graph)) for op in self.graph.ops] for flops in (op_flops, backward_flops)]
        return np.array(rows)

    def _measured(self, profile: Profile) -> Floats:
        """Each measured block's time, shared out among its ops as their FLOPs say."""
        work, everywhere = self._estimated, recomputed(self.graph)
        for block in blocks(self.graph):
            time = profile.times.get(block.signature)
            if time is None:
                continue
            ops = range(block.first_op, block.end_op)
            own = np.array([self.graph.ops[i].name not in everywhere for i in ops])
            for row, seconds in zip(work, (time.forward_s, time.backward_s), strict=True):
                share = row[block.first_op : block.end_op] * own
                share = share / share.sum() if share.any() else own / own.sum()
                row[block.first_op : block.end_op][own] = share[own] * seconds * profile.flops_per_s
        return work
