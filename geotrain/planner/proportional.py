"""The first planner: contiguous stages in proportion to the peers' speed, within their memory. Pure.

With c_k the seconds of stage k for a microbatch, and x those of a link for what crosses it (where links are
known), the period T is the largest c or x, and a step of M microbatches takes

    (M - 1) T + sum of all c_k + sum of all x and latencies, forward and back

For each set of peers the least T is found exactly, over orders and cuts, for up to `EXACT_PEERS` peers (for
more, only the fastest few in order of speed are tried); then the set with the shortest step; then its
narrowest cuts. A peer that makes the step longer is left out, and the plan says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf, isfinite
from typing import Literal, cast

import numpy as np

from ..base import Link, Peer, Plan, Stage
from ..cost import CostTable
from ..errors import PlanError
from ..graph import OpGraph, boundary_bytes, candidate_cuts, graph_hash, stage_modules
from ..graph.cut import Cut
from ..schedule import default_windows
from .memory import GIB, RUNTIME_BYTES, allowed_cuts
from .search import Floats, Peers, Pipeline, Search

EXACT_PEERS = 8
"""Subsets are searched up to here: 2^8 of them take well under a second with a hundred cuts."""

TIE = 1.02
"""Within 2% plans count as equally fast, since estimates are no better than that: of sets of peers the
largest is taken, of cuts those with the fewest bytes on the links."""

MOST_BORDERS = 400
"""Of more places to cut, the narrowest of every few is kept: tables grow with the square."""


def plan(
    graph: OpGraph,
    peers: Sequence[Peer],
    *,
    microbatches: int,
    schedule: str = "1f1b",
    optimizer: str = "adamw",
    momentum: float = 0.0,
    links: Sequence[Link] = (),
    stages: int | None = None,
    epoch: int = 1,
) -> Plan:
    """Assigns contiguous stages of a graph to peers.

    Args:
        links: rates and latencies of directed pairs; pairs not listed cost nothing.
        stages: exactly so many stages. None: as many as make the step fastest, all peers if it is equal.

    Returns:
        A plan whose `compute_seconds` are those of one microbatch, forward and backward, and whose `notes`
        say who was left out and why.

    Raises:
        PlanError: the peers or settings are wrong, or nothing fits; then the message names the tightest
            stage.
    """
    check_peers(peers)
    wanted = len(peers) if stages is None else stages
    if not 1 <= wanted <= len(peers):
        raise PlanError(f"{wanted} stages were asked for and there are {len(peers)} peers; use 1 to {len(peers)}")
    default_windows(schedule, wanted, microbatches)
    borders = _borders(graph, wanted)
    if stages is not None and stages >= len(borders):
        raise PlanError(f"the model can be cut into {len(borders) - 1} stages at most, not {stages}")
    table = CostTable(graph, [border.op_index for border in borders], optimizer, momentum)
    problem = _Problem(table, borders, tuple(peers), microbatches, schedule, tuple(links), stages)
    found = problem.fastest()
    if not found:
        raise PlanError(problem.why_nothing_fits(graph))
    steps = {group: problem.step_seconds(pipeline.stages()) for group, pipeline in found.items()}
    fast = [group for group in steps if steps[group] <= TIE * min(steps.values())]
    chosen = min(fast, key=lambda group: (-len(group), steps[group], sorted(group)))
    cuts = problem.narrowest(chosen, float(found[chosen].value[0]) * TIE)
    return Plan(
        graph_hash=graph_hash(graph),
        schedule=cast(Literal["gpipe", "1f1b"], schedule),
        microbatches=microbatches,
        stages=problem.stages_of(cuts),
        epoch=epoch,
        step_seconds=problem.step_seconds(cuts),
        notes=tuple(problem.notes(chosen, steps)),
    )


def check_peers(peers: Sequence[Peer]) -> None:
    """Raises `PlanError` where peers cannot be planned with."""
    if not peers:
        raise PlanError("there is no peer to plan for; let at least one join")
    names = [peer.name for peer in peers]
    for peer in peers:
        if names.count(peer.name) > 1:
            raise PlanError(f"two peers are called {peer.name!r}; names must differ")
        if not (isfinite(peer.flops_per_s) and peer.flops_per_s > 0 and peer.memory_bytes > 0):
            raise PlanError(
                f"peer {peer.name!r} has {peer.flops_per_s} FLOP/s and {peer.memory_bytes} bytes; both must be above 0"
            )


def _borders(graph: OpGraph, wanted: int) -> list[Cut]:
    """Where stages may begin and end, from the graph's start to its end: the narrow places, or all places
    where there are not twice as many pieces as stages, too few to balance."""
    cuts = allowed_cuts(graph, candidate_cuts(graph))
    if len(cuts) + 1 < 2 * wanted:
        cuts = allowed_cuts(graph, boundary_bytes(graph))
    if len(cuts) > MOST_BORDERS:
        ends = [len(cuts) * i // MOST_BORDERS for i in range(MOST_BORDERS + 1)]
        cuts = [min(cuts[a:b], key=lambda cut: cut.boundary_bytes) for a, b in pairwise(ends)]
    return [Cut(0, 0, 0, ""), *cuts, Cut(len(graph.ops), 0, 0, "")]


Stages = Sequence[tuple[int, int, int]]
"""(peer, first border, end border) of each stage."""


@dataclass(frozen=True)
class _Problem:
    table: CostTable
    borders: list[Cut]
    peers: tuple[Peer, ...]
    microbatches: int
    schedule: str
    links: tuple[Link, ...]
    num_stages: int | None
    _memories: dict[int, Floats] = field(default_factory=dict[int, Floats])

    @cached_property
    def _flops(self) -> Floats:
        """By (first, end) border; infinite where the stage would be empty."""
        flops = self.table.flops().astype(np.float64)
        flops[np.tril_indices(len(flops))] = inf
        return flops

    def _window(self, stages_to_end: int) -> int:
        return default_windows(self.schedule, stages_to_end, self.microbatches)[0]

    def _memory(self, window: int) -> Floats:
        """Bytes by (first, end) border, the runtime included."""
        if window not in self._memories:
            memory = self.table.memory_bytes(window).astype(np.float64) + RUNTIME_BYTES
            memory[np.tril_indices(len(memory))] = inf
            self._memories[window] = memory
        return self._memories[window]

    def _seconds(self, peer: int, stages_to_end: int) -> Floats:
        """Compute seconds of a microbatch; infinite where it does not fit into the peer's memory."""
        fits = self._memory(self._window(stages_to_end)) <= self.peers[peer].memory_bytes
        return np.where(fits, self._flops / self.peers[peer].flops_per_s, inf)

    @cached_property
    def _link_of(self) -> dict[tuple[str, str], Link]:
        return {(link.src, link.dst): link for link in self.links}

    def _transfers(self, src: int, dst: int) -> tuple[Floats, Floats, float]:
        """Between two stages: seconds forward and back by border, and the latency of both."""
        a, b = self.peers[src].name, self.peers[dst].name
        forward, backward = self._link_of.get((a, b)), self._link_of.get((b, a))
        out = np.array([cut.forward_bytes for cut in self.borders], np.float64)
        back = np.array([cut.backward_bytes for cut in self.borders], np.float64)
        return (
            out / (forward.rate_bytes_per_s if forward else inf),
            back / (backward.rate_bytes_per_s if backward else inf),
            sum(link.latency_s for link in (forward, backward) if link),
        )

    def _busiest(self, src: int, dst: int) -> Floats:
        out, back, _ = self._transfers(src, dst)
        return np.maximum(out, back)

    def _families(self, search: Search) -> dict[Peers, Pipeline]:
        """The best pipeline on each set of peers that is considered, where there is one."""
        most = self.num_stages or min(len(self.peers), len(self.borders) - 1)
        if len(self.peers) <= EXACT_PEERS:
            found = search.in_any_order(frozenset(range(len(self.peers))), most)
        else:
            found = search.in_order(self._by_speed, range(self.num_stages or 1, most + 1))
        right = [peers for peers in found if self.num_stages in (None, len(peers))]
        return {peers: found[peers] for peers in right if isfinite(found[peers].value[0])}

    @cached_property
    def _by_speed(self) -> list[int]:
        order = range(len(self.peers))
        return sorted(order, key=lambda i: (-self.peers[i].flops_per_s, -self.peers[i].memory_bytes, i))

    def fastest(self) -> dict[Peers, Pipeline]:
        """By set of peers, the pipeline with the least period."""
        return self._families(Search(self._seconds, self._busiest, np.maximum))

    def narrowest(self, chosen: Peers, period: float) -> Stages:
        """The cuts and order of the chosen peers with the least traffic of all that keep to the period:
        seconds on the links where they are known, else bytes."""

        def allowed(peer: int, stages_to_end: int) -> Floats:
            return np.where(self._seconds(peer, stages_to_end) <= period, 0.0, inf)

        def traffic(src: int, dst: int) -> Floats:
            out, back, latency = self._transfers(src, dst)
            total = np.array([float(cut.boundary_bytes) for cut in self.borders])
            return np.where(np.maximum(out, back) <= period, out + back + latency if self.links else total, inf)

        search = Search(allowed, traffic, np.add)
        if len(self.peers) <= EXACT_PEERS:
            return search.in_any_order(chosen, len(chosen))[chosen].stages()
        return search.in_order(self._by_speed, [len(chosen)])[chosen].stages()

    def stages_of(self, cuts: Stages) -> tuple[Stage, ...]:
        windows = default_windows(self.schedule, len(cuts), self.microbatches)
        return tuple(
            Stage(
                peer=self.peers[peer].name,
                first_op=self.borders[first].op_index,
                end_op=self.borders[end].op_index,
                window=window,
                compute_seconds=float(self._flops[first, end]) / self.peers[peer].flops_per_s,
                memory_bytes=int(self._memory(window)[first, end]),
            )
            for (peer, first, end), window in zip(cuts, windows, strict=True)
        )

    def step_seconds(self, cuts: Stages) -> float:
        compute = [float(self._flops[first, end]) / self.peers[peer].flops_per_s for peer, first, end in cuts]
        period, fill = max(compute), sum(compute)
        for (src, _, border), (dst, _, _) in pairwise(cuts):
            out, back, latency = self._transfers(src, dst)
            period = max(period, float(out[border]), float(back[border]))
            fill += float(out[border] + back[border]) + latency
        return (self.microbatches - 1) * period + fill

    def notes(self, chosen: Peers, steps: dict[Peers, float]) -> list[str]:
        """Who is left out, and why."""
        notes: list[str] = []
        for i, peer in enumerate(self.peers):
            if i in chosen:
                continue
            larger = chosen | {i}
            if self.num_stages is not None:
                why = f"{self.num_stages} stages were asked for, and others are faster"
            elif len(larger) >= len(self.borders):
                why = f"the model has only {len(self.borders) - 1} pieces"
            elif larger in steps:
                why = f"with it a step takes {steps[larger]:.3g} s, without it {steps[chosen]:.3g} s"
            elif len(self.peers) <= EXACT_PEERS:
                why = "no stage that helps fits into its memory"
            else:
                why = f"faster peers alone take {steps[chosen]:.3g} s a step, and more would take longer"
            notes.append(f"{peer.name} is left out: {why}")
        return notes

    def why_nothing_fits(self, graph: OpGraph) -> str:
        """Names the tightest stage of the plan that comes nearest to fitting."""

        def share(peer: int, stages_to_end: int) -> Floats:
            return self._memory(self._window(stages_to_end)) / self.peers[peer].memory_bytes

        zeros = np.zeros(len(self.borders))
        found = self._families(Search(share, lambda src, dst: zeros, np.maximum))
        nearest = min(found.values(), key=lambda pipeline: float(pipeline.value[0])).stages()
        shares = [float(share(peer, len(nearest) - s)[first, end]) for s, (peer, first, end) in enumerate(nearest)]
        s = int(np.argmax(shares))
        peer, first, end = nearest[s]
        window = self._window(len(nearest) - s)
        modules = stage_modules(graph, [self.borders[b].op_index for b in (first, end)])[0]
        needed, allowed = self._memory(window)[first, end] / GIB, self.peers[peer].memory_bytes / GIB
        live = "fewer microbatches" if self.schedule == "1f1b" else "schedule 1f1b, which holds fewer of them"
        peers = f"{len(self.peers)} peer{'s' * (len(self.peers) > 1)}"
        return (
            f"the model does not fit on {peers}: at best, stage {s} ({modules}) on "
            f"{self.peers[peer].name} needs {needed:.2f} GiB with {window} live microbatches and may use "
            f"{allowed:.2f} GiB; add peers or memory, make the microbatch smaller, or use {live}"
        )
