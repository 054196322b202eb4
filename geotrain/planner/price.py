"""What a plan takes: seconds a step, and what they are spent on. Pure.

With c_k the compute of stage k (recompute and codecs included) and x the seconds of a transfer,

    T    = max( c_k,  x of each link,  bytes out of k / its uplink,  bytes into k / its downlink,  RTT_k / W_k )
    step = (M - 1) T + sum of c_k + sum of (x forward + x backward + latency both ways)

RTT_k is from stage k to the end and back, W_k the largest window that its memory allows (M needs no wait).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .problem import Floats, Ints, Problem, Route

Pairs = Sequence[tuple[int, int]]
"""By boundary: which of `Problem.forward` and of `Problem.backward` it uses."""


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds by stage (K,), or by boundary (K - 1,). `loss` is the fraction of extra steps that the codecs need.
    `bottleneck` is (what, stage or boundary). A plan that cannot run takes infinitely long."""

    step_seconds: float
    period_seconds: float
    fill_seconds: float
    once_seconds: float
    loss: float
    bottleneck: tuple[str, int]
    compute: Floats
    forward: Floats
    backward: Floats
    out: Floats
    into: Floats
    windows: tuple[int, ...]
    recompute: tuple[bool, ...]
    memory_bytes: tuple[float, ...]
    forward_bytes: Floats
    backward_bytes: Floats

    @property
    def objective(self) -> float:
        """Seconds a step, times how many more steps are needed."""
        return self.step_seconds * (1 + self.loss)


def price(problem: Problem, order: Sequence[int], cuts: Sequence[int], codecs: Pairs | None = None) -> Price:
    """The step of the peers `order`, with stage borders `cuts` between them (one fewer)."""
    pairs = [(0, 0)] * len(cuts) if codecs is None else list(codecs)
    bounds = [0, *cuts, problem.borders - 1]
    flows = _Flows(problem, order, bounds, pairs)
    peers, row = np.asarray(order, np.intp), np.arange(len(order))
    work = problem.work[problem.kind[peers]]
    compute = (work[row, bounds[1:]] - work[row, bounds[:-1]]) / problem.speed[peers]
    for k, ((f, g), border) in enumerate(zip(pairs, cuts, strict=True)):
        pair = problem.pair_number[f, g]
        compute[k] += problem.sender_seconds[pair, border]
        compute[k + 1] += problem.receiver_seconds[pair, border]
    held = _hold(problem, order, bounds, compute, flows)
    costs = [np.log1p(problem.forward[f].cost) + np.log1p(problem.backward[g].cost) for f, g in pairs]
    logs = float(sum(costs))
    if held is None:
        period = fill = np.inf
        windows, again = (0,) * len(order), (False,) * len(order)
        memory, seconds = (np.inf,) * len(order), compute
    else:
        period, windows, again, seconds = held
        fill = float(seconds.sum() + flows.transfers.sum())
        memory = tuple(
            problem.stage_bytes(a, b, w, r) for (a, b), w, r in zip(pairwise(bounds), windows, again, strict=True)
        )
    if logs > problem.loss_budget:
        period = np.inf
    loads = {
        "compute": seconds, "forward": flows.forward, "backward": flows.backward, "out": flows.out, "into": flows.into,
        "tied": flows.others,
    }  # fmt: skip
    what = max(loads, key=lambda name: float(max(loads[name], default=0.0)))
    where = int(np.argmax(loads[what]))
    if period > float(max(loads[what], default=0.0)) * (1 + 1e-9):
        what, where = "window", 0
    step = (problem.microbatches - 1) * period + fill + flows.once if np.isfinite(period) else np.inf
    return Price(
        step, period, fill, flows.once, float(np.expm1(logs)), (what, where), seconds, flows.forward, flows.backward,
        flows.out, flows.into, windows, again, memory, flows.forward_bytes, flows.backward_bytes,
    )  # fmt: skip


class _Flows:
    """Bytes between stages, and their seconds."""

    def __init__(self, problem: Problem, order: Sequence[int], bounds: Sequence[int], pairs: Pairs) -> None:
        count, net = len(order), problem.network
        peers, cuts = np.asarray(order, np.intp), np.asarray(bounds[1:-1], np.intp)
        f, g = np.asarray(pairs, np.intp).reshape(-1, 2).T
        flow = np.zeros((count, count))
        k = np.arange(count - 1)
        flow[k, k + 1] = problem.forward_sizes[f, cuts]
        flow[k + 1, k] = problem.backward_sizes[g, cuts]
        self.once = 0.0
        for route in problem.routes:
            self._reroute(route, problem, peers, bounds, flow, f, g)
        flow = np.maximum(flow, 0.0)
        src, dst = peers[:, None], peers[None, :]
        seconds = flow / net.rates(src, dst)
        np.fill_diagonal(seconds, 0.0)
        self.forward, self.backward = seconds[k, k + 1], seconds[k + 1, k]
        self.forward_bytes, self.backward_bytes = flow[k, k + 1], flow[k + 1, k]
        self.out, self.into = flow.sum(axis=1) / net.up[peers], flow.sum(axis=0) / net.down[peers]
        latency = net.latencies(peers[:-1], peers[1:]) + net.latencies(peers[1:], peers[:-1])
        self.transfers: Floats = self.forward + self.backward + latency
        far = seconds.copy()
        far[k, k + 1] = far[k + 1, k] = 0.0
        self.others: Floats = far.max(axis=1)
        parts = (self.forward, self.backward, self.out, self.into, self.others)
        self.period = max((float(part.max()) for part in parts if len(part)), default=0.0)

    def _reroute(
        self, route: Route, problem: Problem, peers: Ints, bounds: Sequence[int], flow: Floats,
        f: Ints, g: Ints,
    ) -> None:  # fmt: skip
        """From boundary to boundary, as the borders count it, to straight from its maker to its readers."""
        inner = np.asarray(bounds[1:-1], np.intp)

        def stage(place: int) -> int:
            return int(np.searchsorted(inner, place, side="right"))

        home = stage(route.made)
        stops = [home, *sorted({stage(place) for place in route.readers} - {home})]
        if len(stops) < 2:
            return
        ahead = [_size(problem.forward[int(i)].bytes_per_element if i else None, route, route.forward_bytes) for i in f]
        back = [
            _size(problem.backward[int(i)].bytes_per_element if i else None, route, route.backward_bytes) for i in g
        ]
        if not route.once:
            for k in range(home, stops[-1]):
                flow[k, k + 1] -= ahead[k]
                flow[k + 1, k] -= back[k]
        for to in stops[1:]:
            if route.once:
                rate = float(problem.network.rates(peers[home], peers[to]))
                self.once += route.forward_bytes / rate + float(problem.network.latencies(peers[home], peers[to]))
            else:
                flow[home, to] += ahead[home]
        for to, after in pairwise(stops):
            flow[after, to] += route.backward_bytes if route.once else back[after - 1]


def _size(bytes_per_element: float | None, route: Route, raw: float) -> float:
    if bytes_per_element is None or not route.lossy:
        return raw
    return min(raw, route.elements * bytes_per_element)


def _hold(
    problem: Problem, order: Sequence[int], bounds: Sequence[int], compute: Floats, flows: _Flows
) -> tuple[float, tuple[int, ...], tuple[bool, ...], Floats] | None:
    """The least period that compute, links and memory allow, with windows and who recomputes. None: does not fit."""
    first, end = np.asarray(bounds[:-1]), np.asarray(bounds[1:])
    peers = np.asarray(order, np.intp)
    plain, again = (
        np.array([float(problem.max_windows(p, r, a, b)) for p, a, b in zip(order, first, end, strict=True)])
        for r in (False, True)
    )
    row = problem.forward_work[problem.kind[peers]]
    stages = np.arange(len(order))
    extra = (row[stages, end] - row[stages, first]) / problem.speed[peers]
    many = problem.microbatches
    if not np.isfinite(flows.period) or np.any(np.maximum(plain, again) < 1):
        return None
    period = max(flows.period, float(compute.max()))
    after = np.append(flows.transfers, 0.0)

    def needed(seconds: float, rtt: float, window: float) -> float:
        if window < 1:
            return np.inf
        return seconds if window >= many else max(seconds, rtt / window)

    while True:
        rest, seconds, chosen = 0.0, compute.copy(), [False] * len(order)
        least = period
        for k in reversed(range(len(order))):
            c, c2 = float(compute[k]), float(compute[k] + extra[k])
            rest += after[k]
            one, two = needed(c, rest + c, plain[k]), needed(c2, rest + c2, again[k])
            if one > period * (1 + 1e-12) and two <= one:
                if two > period * (1 + 1e-12):
                    least = max(least, min(one, two))
                chosen[k], seconds[k] = two <= one, c2 if two <= one else c
            elif one > period * (1 + 1e-12):
                least = max(least, one)
            rest += float(seconds[k])
        if least <= period:
            break
        period = least
    most = [again[k] if chosen[k] else plain[k] for k in range(len(order))]
    windows = [1] * len(order)
    for k in reversed(range(len(order) - 1)):
        loop = float(seconds[k] + seconds[k + 1] + after[k])  # with a neighbor; see `windows`
        windows[k] = windows[k + 1] + int(np.ceil(loop / period - 1e-9))
    windows = [int(min(window, limit, many)) for window, limit in zip(windows, most, strict=True)]
    if problem.schedule == "gpipe":
        windows = [many] * len(order)
    return period, tuple(windows), tuple(chosen), seconds
