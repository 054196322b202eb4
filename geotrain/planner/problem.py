"""What there is to plan: borders, work, peers, network, codecs, as arrays. Pure.

Borders 0 to B - 1 are where a stage may begin or end, from the graph's start to its end; peers are numbers, in the
order of `names`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codecs.ladder import RAW, Rung

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True)
class Network:
    """Rates in bytes/s and one-way latencies in seconds, by (source, destination).

    `rate` and `latency` are by pair of peers (N, N) or, where `region` tells each peer's, by pair of regions (R, R).
    `up` and `down` (N,) are shared by all links from and to a peer.
    """

    up: Floats
    down: Floats
    rate: Floats
    latency: Floats
    region: Ints | None = None

    def rates(self, src: Any, dst: Any) -> Floats:
        """Bytes/s with nothing else on the way; `src` and `dst` broadcast."""
        between = self.rate[src, dst] if self.region is None else self.rate[self.region[src], self.region[dst]]
        return np.minimum(between, np.minimum(self.up[src], self.down[dst]))

    def latencies(self, src: Any, dst: Any) -> Floats:
        return self.latency[src, dst] if self.region is None else self.latency[self.region[src], self.region[dst]]

    def take(self, peers: Any) -> "Network":
        """Of some peers, by pair."""
        ids = np.asarray(peers, np.intp)
        a, b = ids[:, None], ids[None, :]
        return Network(self.up[ids], self.down[ids], self.rates(a, b), self.latencies(a, b))


@dataclass(frozen=True, slots=True)
class Route:
    """What goes straight from its maker to each reader, over borders between them, instead of from stage to stage.

    A place is a border's number: what lies behind that border and before the next one. The value goes forward from
    `made` to every stage with one of `readers`, and its gradient back from reader to reader to the maker (a running
    sum). `once`: a shared parameter, whose value travels once a step. Only the `lossy` are compressed.
    """

    made: int
    readers: tuple[int, ...]
    forward_bytes: float
    backward_bytes: float
    elements: float
    once: bool = False
    lossy: bool = True


@dataclass(frozen=True)
class Problem:
    """Args:

    work: (kinds, B) FLOPs of a microbatch, forward and backward, from the graph's start to each border.
    forward_work: the forward part of it, which activation recompute pays again.
    kind, speed, memory: (N,) each peer's row of `work`, FLOPs a second, bytes.
    state_bytes, activation_bytes: (B, B) by (first, end) border: held whatever runs; held by a live microbatch.
    received_bytes: (B, B) what a live microbatch holds with activation recompute.
    forward_bytes, backward_bytes: (B,) raw bytes that cross each border in a microbatch; of `forward_elements` and
        `backward_elements` numbers in them a lossy codec makes fewer bytes, the rest travels raw: `forward_rest`,
        `backward_rest`.
    routes: corrects the crossing bytes for values that jump over stages.
    forward, backward: the codecs to choose from; all that a plan uses cost at most `max_extra_steps`, a fraction.
    """

    names: tuple[str, ...]
    work: Floats
    forward_work: Floats
    kind: Ints
    speed: Floats
    memory: Floats
    state_bytes: Floats
    activation_bytes: Floats
    received_bytes: Floats
    forward_bytes: Floats
    backward_bytes: Floats
    network: Network
    microbatches: int
    schedule: str = "1f1b"
    forward_elements: Floats | None = None
    backward_elements: Floats | None = None
    forward_rest: Floats | None = None
    backward_rest: Floats | None = None
    forward: tuple[Rung, ...] = (RAW,)
    backward: tuple[Rung, ...] = (RAW,)
    max_extra_steps: float = 0.06
    routes: tuple[Route, ...] = field(default=())

    @property
    def size(self) -> int:
        """How many peers."""
        return len(self.names)

    @property
    def borders(self) -> int:
        return self.work.shape[1]

    @cached_property
    def forward_sizes(self) -> Floats:
        """(rungs, B): bytes across each border."""
        return _sizes(self.forward, self.forward_bytes, self.forward_elements, self.forward_rest)

    @cached_property
    def backward_sizes(self) -> Floats:
        return _sizes(self.backward, self.backward_bytes, self.backward_elements, self.backward_rest)

    @cached_property
    def pairs(self) -> Ints:
        """(P, 2): the pairs (forward rung, backward rung) that a boundary may use, the raw one first."""
        grid = [
            (f, g)
            for f in range(len(self.forward))
            for g in range(len(self.backward))
            if (1 + self.forward[f].cost) * (1 + self.backward[g].cost) <= 1 + self.max_extra_steps + 1e-12
        ]
        return np.array(grid, np.intp).reshape(-1, 2)

    @cached_property
    def pair_number(self) -> dict[tuple[int, int], int]:
        """Where a pair is in `pairs`."""
        return {(int(f), int(g)): number for number, (f, g) in enumerate(self.pairs)}

    @cached_property
    def pair_cost(self) -> Floats:
        """(P,): log(1 + cost) of both directions together."""
        return np.array(
            [np.log1p(self.forward[int(f)].cost) + np.log1p(self.backward[int(g)].cost) for f, g in self.pairs],
            np.float64,
        )

    @cached_property
    def sender_seconds(self) -> Floats:
        """(P, B): what the codecs of a boundary take on its earlier side: encode forward, decode backward."""
        f, g = self.pairs.T
        zeros = np.zeros(self.borders)
        elements = zeros if self.forward_elements is None else self.forward_elements
        back = zeros if self.backward_elements is None else self.backward_elements
        encode = np.array([rung.encode_seconds_per_element for rung in self.forward])
        decode = np.array([rung.decode_seconds_per_element for rung in self.backward])
        return encode[f][:, None] * elements + decode[g][:, None] * back

    @cached_property
    def receiver_seconds(self) -> Floats:
        """(P, B): on its later side: decode forward, encode backward."""
        f, g = self.pairs.T
        zeros = np.zeros(self.borders)
        elements = zeros if self.forward_elements is None else self.forward_elements
        back = zeros if self.backward_elements is None else self.backward_elements
        decode = np.array([rung.decode_seconds_per_element for rung in self.forward])
        encode = np.array([rung.encode_seconds_per_element for rung in self.backward])
        return decode[f][:, None] * elements + encode[g][:, None] * back

    @property
    def loss_budget(self) -> float:
        """In the unit of `pair_cost`, with room for rounding."""
        return float(np.log1p(self.max_extra_steps)) + 1e-12

    def seconds(self, peer: int) -> Floats:
        """(B, B): compute of a microbatch by (first, end) border."""
        until = self.work[self.kind[peer]] / self.speed[peer]
        return until[None, :] - until[:, None]

    def again_seconds(self, peer: int) -> Floats:
        """(B, B): what recompute adds."""
        until = self.forward_work[self.kind[peer]] / self.speed[peer]
        return until[None, :] - until[:, None]

    def max_windows(self, peer: int, recompute: bool, first: Any = None, end: Any = None) -> Floats:
        """How many microbatches a stage may hold within the peer's memory, by (first, end) border (B, B) or of the
        given ones; at most all of a step. 0 where it cannot run: it is empty, or not one fits (with GPipe: not all)."""
        borders = np.arange(self.borders)
        i, j = (borders[:, None], borders) if first is None else (np.asarray(first), np.asarray(end))
        held, each = self.state_bytes[i, j], self.activation_bytes[i, j]
        if recompute:
            held, each = held + each, self.received_bytes[i, j]
        room = self.memory[peer] - held
        with np.errstate(divide="ignore", invalid="ignore"):
            live = np.where(each > 0, np.floor(room / each), np.inf)
        live = np.where((room >= 0) & (i < j), np.clip(live, 0, self.microbatches), 0)
        if self.schedule == "gpipe":
            live = np.where(live >= self.microbatches, live, 0)
        return live

    def stage_bytes(self, first: int, end: int, window: int, recompute: bool) -> float:
        state, activation = self.state_bytes[first, end], self.activation_bytes[first, end]
        if recompute:
            return float(state + activation + window * self.received_bytes[first, end])
        return float(state + window * activation)

    def uncompressed(self) -> "Problem":
        """The same with raw tensors only. Its plans, and their prices, are those of this problem, too."""
        return replace(self, forward=self.forward[:1], backward=self.backward[:1])

    def take(self, peers: Sequence[int]) -> "Problem":
        """The same for some of the peers, in the given order."""
        ids = np.asarray(peers, np.intp)
        return replace(
            self,
            names=tuple(self.names[int(i)] for i in ids),
            kind=self.kind[ids],
            speed=self.speed[ids],
            memory=self.memory[ids],
            network=self.network.take(ids),
        )


def _sizes(rungs: Sequence[Rung], raw: Floats, elements: Floats | None, rest: Floats | None) -> Floats:
    rows = [raw]
    for rung in rungs[1:]:
        coded = 0.0 if elements is None else elements * rung.bytes_per_element
        rows.append(np.minimum(raw, coded + (0.0 if rest is None else rest)) if elements is not None else raw)
    return np.array(rows)
