"""The best plan of all: every subset and order of peers, every cut, every pair of codecs. Pure.

Plans grow from their end. A beginning is given up only if every plan that ends so takes longer than one that is known:
its transfers, compute and windows so far, and the rest of the work on all peers that are left, are no more than what
`price` says of the whole. What remains is priced by it.
"""

from dataclasses import dataclass, fields, replace
from math import comb, perm

import numpy as np

from geotrain.planner.exact import Found, found
from geotrain.planner.problem import Floats, Ints, Problem

_ROWS = 50_000
"""So many plans are continued at once."""


def plans(problem: Problem) -> int:
    """How many there are."""
    n, inner, pairs = problem.size, problem.borders - 2, len(problem.pairs)
    return sum(perm(n, k) * comb(inner, k - 1) * pairs ** (k - 1) for k in range(1, min(n, inner + 1) + 1))


def exhaustive(problem: Problem, known: Found) -> Found:
    """The best of all plans; `known` itself if none is better. Values that jump over stages are not supported."""
    assert not problem.routes and problem.schedule == "1f1b"
    search = _Search(problem, known)
    stack = [search.ends()]
    while stack:
        ways = stack.pop()
        if len(ways.peer) > _ROWS:
            stack += [ways.take(slice(_ROWS, None)), ways.take(slice(_ROWS))]
        elif len(ways.peer):
            stack.append(search.on(ways))
    return search.best


@dataclass
class _Ways:
    """Ends of plans, one a row: `peer` runs from border `first` to `end`, and what follows is known. `seconds` is its
    compute (without the codecs at `first`), `fill` is from its end to the end of the plan and back; `period` and `loss`
    are those of what is known, `out` and `into` bytes of its boundary with the next stage. `plan` (rows, stages, 3):
    peer, first border and pair behind, from the last stage on."""

    peer: Ints
    used: Ints
    first: Ints
    end: Ints
    seconds: Floats
    fill: Floats
    period: Floats
    loss: Floats
    out: Floats
    into: Floats
    plan: Ints

    def take(self, rows: slice | Ints) -> "_Ways":
        return _Ways(*(getattr(self, f.name)[rows] for f in fields(self)))


class _Search:
    def __init__(self, problem: Problem, known: Found) -> None:
        self.problem, self.best = problem, known
        ids, peers = np.arange(problem.size), range(problem.size)
        self.seconds = np.stack([problem.seconds(i) for i in peers])
        self.windows = np.stack(
            [np.maximum(problem.max_windows(i, False), problem.max_windows(i, True)) for i in peers]
        )
        self.rate = problem.network.rates(ids[:, None], ids)
        latency = problem.network.latencies(ids[:, None], ids)
        self.latency = latency + latency.T
        f, g = problem.pairs.T
        self.ahead, self.back = problem.forward_sizes[f], problem.backward_sizes[g]
        far = np.where(np.eye(problem.size, dtype=bool), np.inf, 0.0)[..., None]
        there, home = (self.ahead.min(axis=0) / self.rate[..., None], self.back.min(axis=0) / self.rate.T[..., None])
        self.entry_load = (np.maximum(there, home) + far).min(axis=0)
        self.entry = (there + home + self.latency[..., None] + far).min(axis=0)
        """(peers, borders): the least that the boundary before a stage takes."""

    def ends(self) -> _Ways:
        n, last = self.problem.size, self.problem.borders - 1
        peer, first = (a.ravel() for a in np.indices((n, last)))
        zero = np.zeros(len(peer))
        plan = np.stack([peer, first, 0 * peer], axis=-1)[:, None]
        return self._promising(_Ways(
            peer, 1 << peer, first, np.full_like(peer, last), self.seconds[peer, first, last], zero, zero, zero, zero,
            zero, plan,
        ))  # fmt: skip

    def on(self, ways: _Ways) -> _Ways:
        """With each pair of codecs at its first border, on each other peer, from each earlier border."""
        whole = ways.take(np.flatnonzero(ways.first == 0))
        self._price(self._promising(self._before(whole, 0.0, 0.0, 0.0)))
        open_ = ways.take(np.flatnonzero(ways.first > 0))
        parts = [
            self._promising(self._joined(open_, pair, peer))
            for pair in range(len(self.problem.pairs)) for peer in range(self.problem.size)
        ]  # fmt: skip
        return _Ways(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(_Ways)))

    def _before(self, ways: _Ways, codec_s: Floats | float, out: Floats | float, into: Floats | float) -> _Ways:
        """Its first stage with all that it sends and computes."""
        net, peer = self.problem.network, ways.peer
        seconds = ways.seconds + codec_s
        window = self.windows[peer, ways.first, ways.end]
        with np.errstate(divide="ignore"):
            starved = np.where(window >= self.problem.microbatches, 0.0, (ways.fill + seconds) / window)
        loads = (ways.period, seconds, (ways.out + out) / net.up[peer], (ways.into + into) / net.down[peer], starved)
        return replace(ways, seconds=seconds, period=np.maximum.reduce(loads))

    def _joined(self, ways: _Ways, pair: int, peer: int) -> _Ways:
        """`peer` before them, by each border where it may begin."""
        problem = self.problem
        ways = ways.take(np.flatnonzero((ways.used >> peer) & 1 == 0))
        at = ways.first
        ahead, back = self.ahead[pair, at], self.back[pair, at]
        ways = self._before(ways, problem.receiver_seconds[pair, at], back, ahead)
        there, home = ahead / self.rate[peer, ways.peer], back / self.rate[ways.peer, peer]
        way = there + home + self.latency[peer, ways.peer]
        ways = replace(
            ways, fill=ways.fill + ways.seconds + way, period=np.maximum(ways.period, np.maximum(there, home)),
            loss=ways.loss + problem.pair_cost[pair], out=ahead, into=back,
        )  # fmt: skip
        row, first = np.nonzero(np.arange(problem.borders)[None] < at[:, None])
        ways = ways.take(row)
        at = ways.first
        stage = np.stack([np.full_like(first, peer), first, np.full_like(first, pair)], axis=-1)[:, None]
        return replace(
            ways, peer=np.full_like(first, peer), used=ways.used | (1 << peer), first=first, end=at,
            seconds=self.seconds[peer, first, at] + problem.sender_seconds[pair, at],
            plan=np.concatenate([ways.plan, stage], axis=1),
        )  # fmt: skip

    def _promising(self, ways: _Ways) -> _Ways:
        """Those that could be better than the best one. An open first stage counts with what is known of it."""
        problem = self.problem
        open_ = ways.first > 0
        left = open_[:, None] & ((ways.used[:, None] >> np.arange(problem.size)) & 1 == 0)
        with np.errstate(divide="ignore", invalid="ignore"):  # with one microbatch, 0 times infinity: not promising
            speed = np.where(left, 1 / self.seconds[:, 0, ways.first].T, 0.0)
            shared, alone = (np.where(open_, 1 / part, 0.0) for part in (speed.sum(axis=1), speed.max(axis=1)))
            entry, load = (
                np.where(open_, least[ways.peer, ways.first], 0.0) for least in (self.entry, self.entry_load)
            )
            period = np.maximum.reduce((ways.period, ways.seconds, shared, load))
            bound = (problem.microbatches - 1) * period + ways.fill + ways.seconds + entry + alone
        keep = bound * np.exp(ways.loss) < self.best.value * (1 - 1e-9)
        keep &= (ways.loss <= problem.loss_budget) & (self.windows[ways.peer, ways.first, ways.end] >= 1)
        return ways.take(np.flatnonzero(keep))

    def _price(self, whole: _Ways) -> None:
        for plan in whole.plan[:, ::-1]:
            order, cuts = [int(p) for p in plan[:, 0]], [int(first) for first in plan[1:, 1]]
            codecs = [(int(f), int(g)) for f, g in self.problem.pairs[plan[:-1, 2]]]
            made = found(self.problem, order, cuts, codecs)
            if made.value < self.best.value:
                self.best = made
