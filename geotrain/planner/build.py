"""A graph, peers and links become a `Problem`. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ..base import ITEM_BYTES, Link, Peer, TensorSpec
from ..blocks import NARROW, CostModel
from ..codecs import get_codec
from ..codecs.ladder import RAW, Rung, extra_steps
from ..coding import compressible
from ..cost import CostTable
from ..errors import PlanError
from ..graph import OpGraph, boundary_bytes, candidate_cuts
from ..graph.cut import Cut, recomputed
from ..graph.ir import op_refs
from .memory import allowed_cuts, stage_memory, usable_bytes
from .problem import Floats, Network, Problem, Route

FREE_BYTES_PER_S = 1e12
"""The rate of a link of which nothing is known: it decides only between plans that are equal otherwise."""

MOST_BORDERS = 128
"""Of more places to cut, the narrowest of every few is kept: tables grow with the square."""

DENSE_PEERS = 2000
"""Of more, links are kept by pair of regions."""


@dataclass(frozen=True, slots=True)
class Instance:
    """`points` are the ops at the problem's borders."""

    problem: Problem
    points: tuple[int, ...]
    table: CostTable


FEW_BORDERS = 24
"""So few places to cut are all tried; of more, those that are wide between narrow ones are left out."""


@lru_cache(maxsize=8)
def borders(graph: OpGraph, wanted: int, most: int = MOST_BORDERS) -> tuple[Cut, ...]:
    """Where stages may begin and end, from the graph's start to its end: the narrow places, or all places where there
    are not twice as many pieces as stages, too few to balance."""
    cuts = allowed_cuts(graph, candidate_cuts(graph))
    width = [place.boundary_bytes for place in cuts]
    slim = [place for i, place in enumerate(cuts) if width[i] <= NARROW * min(width[max(0, i - 1) : i + 2])]
    if len(cuts) > FEW_BORDERS and len(slim) + 1 >= 2 * wanted:
        cuts = slim
    if len(cuts) + 1 < 2 * wanted:
        cuts = allowed_cuts(graph, boundary_bytes(graph))
    if len(cuts) > most:
        ends = [len(cuts) * i // most for i in range(most + 1)]
        cuts = [min(cuts[a:b], key=lambda cut: cut.boundary_bytes) for a, b in pairwise(ends)]
    return Cut(0, 0, 0, ""), *cuts, Cut(len(graph.ops), 0, 0, "")


def instance(
    graph: OpGraph,
    peers: Sequence[Peer],
    places: Sequence[Cut],
    *,
    microbatches: int,
    schedule: str = "1f1b",
    optimizer: str = "adamw",
    momentum: float = 0.0,
    links: Sequence[Link] = (),
    forward: Sequence[Rung] = (RAW,),
    backward: Sequence[Rung] = (RAW,),
    max_loss_increase: float = 0.01,
    costs: CostModel | None = None,
) -> Instance:
    """Raises `PlanError` for an unknown optimizer or codec."""
    points = [place.op_index for place in places]
    table = CostTable(graph, points, optimizer, momentum)
    model = costs or CostModel(graph)
    kinds = {kind: i for i, kind in enumerate(dict.fromkeys(model.kinds.get(p.name, "") for p in peers))}
    kind = np.array([kinds[model.kinds.get(peer.name, "")] for peer in peers], np.intp)
    first = [peers[int(np.argmax(kind == k))] for k in kinds.values()]
    work = np.stack([model.until(peer, points) * peer.flops_per_s for peer in first])  # (kinds, 2, B)
    inner = (
        np.array([float(place.forward_bytes) for place in places]),
        np.array([float(place.backward_bytes) for place in places]),
    )
    sent = _crossing(graph)
    elements, raw, rest = _elements(graph, sent, points)
    values = Counter(graph.values[name].spec for name, _, read in sent if read and _lossy(graph, name))
    ladders = [_ladder(rungs, values) for rungs in (forward, backward)]
    memory = stage_memory(table, microbatches, lossy=any(len(ladder) > 1 for ladder in ladders))
    problem = Problem(
        names=tuple(peer.name for peer in peers),
        work=work.sum(axis=1),
        forward_work=work[:, 0],
        kind=kind,
        speed=np.array([peer.flops_per_s for peer in peers]),
        memory=np.array([usable_bytes(peer) for peer in peers]),
        state_bytes=memory.state,
        activation_bytes=memory.live,
        received_bytes=memory.received,
        forward_bytes=inner[0],
        backward_bytes=inner[1],
        network=network(peers, links),
        microbatches=microbatches,
        schedule=schedule,
        forward_elements=elements,
        backward_elements=elements,
        forward_rest=rest,
        backward_rest=np.maximum(inner[1] - raw, 0.0),
        forward=ladders[0],
        backward=ladders[1],
        max_extra_steps=extra_steps(max_loss_increase),
        routes=tuple(_routes(graph, sent, points)),
    )
    return Instance(problem, tuple(points), table)


def _ladder(rungs: Sequence[Rung], values: Mapping[TensorSpec, int]) -> tuple[Rung, ...]:
    """With the raw rung first, and, as far as the job has not seen them, no fewer bytes than are typical of these
    values: some codecs need many rows. Raises `PlanError` for an unknown codec."""
    elements = sum(count * spec.packed.numel for spec, count in values.items())

    def fitted(rung: Rung) -> Rung:
        codec = get_codec(rung.codec)
        if rung.seen:
            return rung
        typical = sum(count * codec.size_bytes(spec) for spec, count in values.items()) / max(elements, 1)
        return replace(rung, bytes_per_element=max(rung.bytes_per_element, typical))

    return (RAW, *(fitted(rung) for rung in rungs if rung.codec != RAW.codec))


def network(peers: Sequence[Peer], links: Sequence[Link]) -> Network:
    """Pairs that are not in `links` have what their ends allow, and no latency."""
    up = np.minimum([peer.up_bytes_per_s for peer in peers], FREE_BYTES_PER_S)
    down = np.minimum([peer.down_bytes_per_s for peer in peers], FREE_BYTES_PER_S)
    number = {peer.name: i for i, peer in enumerate(peers)}
    region = np.arange(len(peers))
    if len(peers) > DENSE_PEERS:
        names = {name: i for i, name in enumerate(dict.fromkeys(peer.region for peer in peers))}
        region = np.array([names[peer.region] for peer in peers], np.intp)
    size = int(region.max(initial=-1)) + 1
    rate, latency, seen = np.zeros((size, size)), np.zeros((size, size)), np.zeros((size, size))
    for link in links:
        if link.src in number and link.dst in number:
            at = region[number[link.src]], region[number[link.dst]]
            rate[at] += min(link.rate_bytes_per_s, FREE_BYTES_PER_S)
            latency[at] += link.latency_s
            seen[at] += 1
    mean = np.where(seen > 0, rate / np.maximum(seen, 1), FREE_BYTES_PER_S)
    return Network(up, down, mean, latency / np.maximum(seen, 1), region if len(peers) > DENSE_PEERS else None)


Sent = tuple[str, int, list[int]]
"""A value that may be sent: its name, the op that makes it, the later ops that read it."""


@lru_cache(maxsize=4)
def _crossing(graph: OpGraph) -> Sequence[Sent]:
    nowhere = recomputed(graph)
    readers: dict[str, list[int]] = {}
    for i, op in enumerate(graph.ops):
        if op.name not in nowhere:
            for name in op_refs(op):
                readers.setdefault(name, []).append(i)
    position = graph.position
    found = [(name, position[name], readers.get(name, [])) for name in graph.values if name in position]
    return [(name, made, [i for i in read if i > made]) for name, made, read in found if name not in nowhere]


def _lossy(graph: OpGraph, name: str) -> bool:
    value = graph.values[name]
    return value.requires_grad and compressible(value.spec)


def _elements(graph: OpGraph, sent: Sequence[Sent], points: Sequence[int]) -> tuple[Floats, Floats, Floats]:
    """(B,): numbers that cross each border and a lossy codec may touch, their bytes, and the bytes that none may."""
    elements, raw, rest = np.zeros((3, len(points)))
    at = np.asarray(points)
    for name, made, read in sent:
        over = (at > made) & (at <= max(read, default=made))
        spec = graph.values[name].spec.packed
        if _lossy(graph, name):
            elements[over] += spec.numel
            raw[over] += spec.nbytes
        else:
            rest[over] += spec.nbytes
    return elements, raw, rest


def _routes(graph: OpGraph, sent: Sequence[Sent], points: Sequence[int]) -> list[Route]:
    """Values that jump over a whole piece between borders, and trainable parameters read in several."""
    at = np.asarray(points)

    def places(ops: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted({int(p) for p in np.searchsorted(at, ops, side="right") - 1}))

    routes: list[Route] = []
    for name, made, read in sent:
        (home,), to = places([made]), places(read)
        if not to or to[-1] <= home + 1:
            continue
        value = graph.values[name]
        nbytes, numbers = float(value.spec.packed.nbytes), float(value.spec.packed.numel)
        back = nbytes * value.requires_grad
        routes.append(Route(home, to, nbytes, back, numbers, lossy=_lossy(graph, name)))
    readers: dict[str, list[int]] = {}
    for i, op in enumerate(graph.ops):
        for name in op_refs(op):
            readers.setdefault(name, []).append(i)
    for name, parameter in graph.parameters.items():
        to = places(readers.get(name, [])) if parameter.requires_grad else ()
        if len(to) > 1:
            nbytes = float(parameter.spec.nbytes)
            routes.append(Route(to[0], to[1:], nbytes, nbytes, nbytes / ITEM_BYTES[parameter.spec.dtype], True, False))
    return routes


def check_peers(peers: Sequence[Peer]) -> None:
    """Raises `PlanError` where peers cannot be planned with."""
    if not peers:
        raise PlanError("there is no peer to plan for; let at least one join")
    names: set[str] = set()
    for peer in peers:
        if peer.name in names:
            raise PlanError(f"two peers are called {peer.name!r}; names must differ")
        names.add(peer.name)
        if not (np.isfinite(peer.flops_per_s) and peer.flops_per_s > 0 and peer.memory_bytes > 0):
            raise PlanError(
                f"peer {peer.name!r} has {peer.flops_per_s} FLOP/s and {peer.memory_bytes} bytes; both must be above 0"
            )
        if not (peer.up_bytes_per_s > 0 and peer.down_bytes_per_s > 0):
            raise PlanError(f"peer {peer.name!r} has no uplink or no downlink; both must be above 0")
