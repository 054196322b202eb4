"""`plan`: who runs which ops, with what codecs and windows, and why. Pure.

Few peers are searched exactly, many by local search; both on the same price. A step is compared with its proven lower
bound, and the plan says what limits it, what each peer adds, and who is left out.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, cast

import numpy as np

from ..base import Link, Peer, Plan, Stage
from ..blocks import CostModel
from ..codecs.ladder import RAW, Rung
from ..errors import PlanError
from ..graph import OpGraph, graph_hash
from ..schedule import default_windows
from .bound import lower_bound
from .build import Instance, borders, check_peers, instance
from .chain import along, nearby, neighbours, resized
from .exact import EXACT_PEERS, TOLERANCE, Found, exact, found
from .explain import explain, why_nothing_fits
from .heuristic import paths, search, useful
from .polish import lightened, polish
from .problem import Problem

COARSE_BORDERS, FINE_BORDERS = 26, 80
"""With many subsets of peers or codecs to try, only so many borders; then, around the best order, more, and all."""

LOSSY_EXACT_PEERS = 10
"""Of more, the exact search with codecs takes long."""

ENOUGH = 12
"""Pieces for twice so many stages are enough to choose from, however many peers there are."""

HORIZON = 30
"""Steps over which moving a stage's state to another peer must pay."""

LEAST_GAIN = 0.03
"""The part of a step that a new plan must save."""

BACKGROUND = 0.1
"""What a second of copying costs while the run goes on: the copy takes a part of the links."""


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
    forward: Sequence[Rung] = (RAW,),
    backward: Sequence[Rung] = (RAW,),
    max_loss_increase: float = 0.01,
    deadline_s: float = 1.0,
    seed: int = 0,
    near: Plan | None = None,
    costs: CostModel | None = None,
) -> Plan:
    """Assigns contiguous stages of a graph to peers.

    Args:
        links: rates and latencies of directed pairs; a pair not listed has what its ends allow, and no latency.
        stages: exactly so many stages. None: as many as make the step fastest.
        forward, backward: the codecs to choose from. Raw tensors always may be sent.
        max_loss_increase: how much higher, as a fraction, all codecs of the plan may leave the loss after equal steps.
        deadline_s: how long to search, on one core; it is turned into a number of rounds, so that the same input
            gives the same plan.
        near: the plan that runs now. Another one must be worth moving the state.
        costs: seconds of stages; without it, FLOPs.

    Raises:
        PlanError: the peers or settings are wrong, or nothing fits; then the message names the tightest stage.
    """
    check_peers(peers)
    wanted = len(peers) if stages is None else stages
    if not 1 <= wanted <= len(peers):
        raise PlanError(f"{wanted} stages were asked for and there are {len(peers)} peers; use 1 to {len(peers)}")
    default_windows(schedule, wanted, microbatches)
    most = ENOUGH if stages is None else wanted
    places = borders(graph, min(wanted, most))
    if stages is not None and stages >= len(places):
        raise PlanError(f"the model can be cut into {len(places) - 1} stages at most, not {stages}")
    made = instance(
        graph, peers, places, microbatches=microbatches, schedule=schedule, optimizer=optimizer, momentum=momentum,
        links=links, forward=forward, backward=backward, max_loss_increase=max_loss_increase, costs=costs,
    )  # fmt: skip
    problem = made.problem
    best = _best(problem, stages, deadline_s, seed, _order(near, problem))
    if best is None:
        raise PlanError(why_nothing_fits(graph, made, stages))
    best = polish(problem, best)
    if near is not None:
        best = _nearest(made, best, near, stages)
    best = lightened(problem, best)
    bound = lower_bound(problem, best.price.step_seconds)
    return _as_plan(graph, made, best, bound, epoch, stages)


def _order(near: Plan | None, problem: Problem) -> list[int]:
    number = {name: i for i, name in enumerate(problem.names)}
    return [] if near is None else [number[stage.peer] for stage in near.stages if stage.peer in number]


def _best(problem: Problem, stages: int | None, deadline_s: float, seed: int, near: list[int]) -> Found | None:
    if problem.size <= EXACT_PEERS:
        return _of_few_peers(problem, stages, deadline_s, seed)
    if stages is None:
        return search(problem, deadline_s, seed, near)
    chosen = useful(problem)
    ranked = sorted(chosen, key=lambda i: (-problem.speed[i], i))
    if stages <= EXACT_PEERS:
        ids = ranked[:EXACT_PEERS]
        part = _best(problem.take(ids), stages, deadline_s, seed, [])
        return None if part is None else found(problem, [ids[i] for i in part.order], [*part.cuts], [*part.codecs])
    return along(problem, ranked[:stages])


def _of_few_peers(problem: Problem, stages: int | None, deadline_s: float, seed: int) -> Found | None:
    """Exact if nothing is compressed. Codecs share a loss budget, which the exact search knows only as a price: there
    what it and the local search find is changed for as long as that helps."""
    lossy, free = len(problem.pairs) > 1, stages is None
    if not lossy and problem.size <= 8:
        return exact(problem, stages=stages)
    keep = _narrow(problem, max(COARSE_BORDERS, 2 * (stages or 1)))
    few = _fewer_borders(problem, keep)
    tolerance = TOLERANCE if few is problem else 1e-3
    if lossy and problem.size > LOSSY_EXACT_PEERS:
        starts = [exact(few.uncompressed(), stages=stages)]
        starts += [paths(few, deadline_s, seed)] if free else []
    else:
        starts = [exact(few, stages=stages, tolerance=tolerance)]
    known = [start for start in starts if start is not None]
    if not known:
        return None if few is problem else exact(problem, stages=stages)
    if lossy:
        known = [nearby(few, start, longer=free) for start in known]
    best = min(known, key=lambda made: made.value)
    if lossy and free and (other := resized(few, best)) is not best:
        best = nearby(few, other)
    if few is problem:
        return best
    best = found(problem, list(best.order), [keep[cut] for cut in best.cuts], list(best.codecs))
    if lossy and free and problem.borders > FINE_BORDERS:
        best = _finer(problem, best)
    return along(problem, best.order, best) or best


def _finer(problem: Problem, best: Found) -> Found:
    """With more borders to choose from, and then perhaps with one peer fewer or more."""
    keep = sorted({*best.cuts, *_narrow(problem, FINE_BORDERS)})
    few = _fewer_borders(problem, keep)
    start = found(few, list(best.order), [keep.index(cut) for cut in best.cuts], list(best.codecs))
    made = along(few, start.order, start) or start
    if len(keep) < problem.borders:
        made = nearby(few, made, exchanged=False, passes=2)
    return found(problem, list(made.order), [keep[cut] for cut in made.cuts], list(made.codecs))


def _narrow(problem: Problem, most: int) -> list[int]:
    """The borders to use: all if they are few; else narrow ones at even distances."""
    last = problem.borders - 1
    if last < most:
        return list(range(last + 1))
    crossing = problem.forward_bytes + problem.backward_bytes
    ends = np.linspace(1, last, most - 1).astype(int)
    inner = [int(a + np.argmin(crossing[a:b])) for a, b in pairwise(ends) if b > a]
    return [0, *inner, last]


def _fewer_borders(problem: Problem, keep: Sequence[int]) -> Problem:
    if len(keep) == problem.borders:
        return problem
    k = np.asarray(keep, np.intp)
    at = np.ix_(k, k)
    place = np.searchsorted(k, np.arange(problem.borders), side="right") - 1
    optional = {
        name: None if (value := getattr(problem, name)) is None else value[k]
        for name in ("forward_elements", "backward_elements", "forward_rest", "backward_rest")
    }
    routes = tuple(
        replace(r, made=int(place[r.made]), readers=tuple(sorted({int(place[x]) for x in r.readers})))
        for r in problem.routes
    )
    return replace(
        problem, work=problem.work[:, k], forward_work=problem.forward_work[:, k],
        state_bytes=problem.state_bytes[at], activation_bytes=problem.activation_bytes[at],
        received_bytes=problem.received_bytes[at], forward_bytes=problem.forward_bytes[k],
        backward_bytes=problem.backward_bytes[k], routes=routes, **optional,
    )  # fmt: skip


def _nearest(made: Instance, best: Found, near: Plan, stages: int | None) -> Found:
    """Of the best plan, the one that runs and those that move little state, the one that is cheapest with its moves."""
    problem, order = made.problem, _order(near, made.problem)
    if len(order) < len(near.stages):
        return best
    kept = _kept(made, near, order)
    now = along(problem, order) if kept is None else polish(problem, kept, moves=False)
    if now is None:
        return best
    options = [best, now]
    if _moving(made, best, near) / HORIZON > LEAST_GAIN * best.value:  # none of the others saves more than that
        options += neighbours(problem, now)
    options = [option for option in options if stages in (None, len(option.order))]
    return min(options, key=lambda option: option.value + _moving(made, option, near) / HORIZON)


def _kept(made: Instance, near: Plan, order: list[int]) -> Found | None:
    """The plan that runs, if its cuts are among the borders."""
    problem, place = made.problem, {point: b for b, point in enumerate(made.points)}
    cuts = [place.get(stage.first_op, -1) for stage in near.stages[1:]]
    names = [rung.codec for rung in problem.forward], [rung.codec for rung in problem.backward]
    codecs = [
        (names[0].index(a.codec_forward), names[1].index(b.codec_backward))
        for a, b in zip(near.stages, near.stages[1:], strict=False)
        if a.codec_forward in names[0] and b.codec_backward in names[1]
    ]
    if -1 in cuts or len(codecs) < len(cuts):  # a codec may have shown that it costs more than the budget
        return None
    return found(problem, order, cuts, [pair if pair in problem.pair_number else (0, 0) for pair in codecs])


def _moving(made: Instance, option: Found, near: Plan) -> float:
    """Seconds to bring each stage what its peer does not hold yet, all at once. What is frozen is copied meanwhile."""
    problem, net = made.problem, made.problem.network
    number = {name: i for i, name in enumerate(problem.names)}
    points = np.asarray(made.points)
    bounds = [0, *option.cuts, problem.borders - 1]
    trained, following = made.table["gradient_bytes"], made.table["optimizer_bytes"]
    frozen = made.table["parameter_bytes"] - trained
    longest = 0.0
    for k, peer in enumerate(option.order):
        weights_s = state_s = 0.0
        for stage in near.stages:
            a, b = np.searchsorted(points, [stage.first_op, stage.end_op])
            first, end = max(int(a), bounds[k]), min(int(b), bounds[k + 1])
            source = number.get(stage.peer)
            if first < end and source != peer:
                rate = net.up.min() if source is None else float(net.rates(source, peer))
                weights_s += float(trained[first, end] + BACKGROUND * frozen[first, end]) / rate
                state_s += float(following[first, end]) / rate
        longest = max(longest, standstill(weights_s, weights_s + state_s, option.price.step_seconds))
    return longest


def standstill(weights_s: float, all_s: float, step_s: float) -> float:
    """Seconds that a run waits for what moves: first for the weights; what optimizers have kept of them follows, and is
    needed when the first step is applied."""
    return max(weights_s, all_s - step_s)


def _as_plan(graph: OpGraph, made: Instance, best: Found, bound: float, epoch: int, stages: int | None) -> Plan:
    problem, cost = made.problem, best.price
    bounds = [made.points[b] for b in (0, *best.cuts, problem.borders - 1)]
    ahead = [problem.forward[f].codec for f, _ in best.codecs] + ["identity"]
    back = ["identity"] + [problem.backward[g].codec for _, g in best.codecs]
    rows = tuple(
        Stage(
            peer=problem.names[peer],
            first_op=bounds[k],
            end_op=bounds[k + 1],
            window=cost.windows[k],
            compute_seconds=float(cost.compute[k]),
            memory_bytes=int(cost.memory_bytes[k]),
            codec_forward=ahead[k],
            codec_backward=back[k],
            recompute=cost.recompute[k],
        )
        for k, peer in enumerate(best.order)
    )
    used = set(best.order)
    return Plan(
        graph_hash=graph_hash(graph),
        schedule=cast(Literal["gpipe", "1f1b"], problem.schedule),
        microbatches=problem.microbatches,
        stages=rows,
        epoch=epoch,
        step_seconds=float(cost.step_seconds),
        period_seconds=float(cost.period_seconds),
        lower_bound_seconds=float(min(bound, cost.step_seconds)),
        benched=tuple(name for i, name in enumerate(problem.names) if i not in used),
        notes=tuple(explain(problem, best, bound, stages)),
    )
