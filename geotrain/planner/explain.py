"""Why a plan is as it is, in words: bottleneck, what each peer adds, who is left out. Pure."""

import numpy as np

from ..graph import OpGraph, stage_modules
from ..words import duration, number_of, size
from .bound import Capacity
from .build import Instance
from .chain import along
from .exact import Found
from .memory import ways_out
from .problem import Problem

FEW = 12
"""What each peer adds, and what a left-out one would, is computed for so many; else it is said in shares."""


def explain(problem: Problem, best: Found, bound: float, stages: int | None) -> list[str]:
    notes = [_bottleneck(problem, best), _certificate(best, bound)]
    if len(best.order) > 1:
        notes += [_link(problem, best, k) for k in range(len(best.cuts))]
    if 1 < problem.size <= FEW:
        notes += _added(problem, best)
    notes += _left_out(problem, best, stages)
    return notes


def _bottleneck(problem: Problem, best: Found) -> str:
    what, where = best.price.bottleneck
    names = [problem.names[i] for i in best.order]
    phrases = {
        "compute": f"{names[where]} computes longest",
        "out": f"the uplink of {names[where]} is the slowest part",
        "into": f"the downlink of {names[where]} is the slowest part",
        "tied": f"what {names[where]} sends over other stages is the slowest part",
        "window": "memory holds too few microbatches for the way there and back",
    }
    if what in ("forward", "backward"):
        ends = (names[where], names[where + 1])[:: 1 if what == "forward" else -1]
        phrases[what] = f"the link from {ends[0]} to {ends[1]} is the slowest part"
    period = duration(best.price.period_seconds)
    return f"a microbatch every {period}: {phrases[what]}; the first and the last one take {_fill(best)} more"


def _fill(best: Found) -> str:
    return duration(best.price.fill_seconds)


def _certificate(best: Found, bound: float) -> str:
    loss = f"; its codecs cost {best.price.loss:.2%} more steps" if best.price.loss else ""
    return (
        f"a step takes {duration(best.price.step_seconds)}, at most {best.price.step_seconds / bound:.3g} times "
        f"what the best plan can{loss}"
    )


def _link(problem: Problem, best: Found, k: int) -> str:
    a, b = (problem.names[i] for i in best.order[k : k + 2])
    f, g = best.codecs[k]
    cost = best.price
    return (
        f"{a} to {b}: {size(cost.forward_bytes[k])} a microbatch ({problem.forward[f].codec}), "
        f"{size(cost.backward_bytes[k])} back ({problem.backward[g].codec})"
    )


def _added(problem: Problem, best: Found) -> list[str]:
    notes: list[str] = []
    for k, peer in enumerate(best.order):
        rest = [*best.order[:k], *best.order[k + 1 :]]
        without = along(problem, rest, tolerance=1e-2, runs=8) if rest else None
        seconds = "nothing runs" if without is None else f"a step takes {duration(without.price.step_seconds)}"
        notes.append(f"without {problem.names[peer]} {seconds}")
    return notes


def _left_out(problem: Problem, best: Found, stages: int | None) -> list[str]:
    out = sorted(set(range(problem.size)) - set(best.order))
    if not out:
        return []
    caps = Capacity(problem).caps(np.array([best.price.period_seconds, np.inf]))
    fastest = float(problem.speed[list(best.order)].min())
    step = duration(best.price.step_seconds)
    notes: list[str] = []
    for i in out:
        if stages is not None:
            why = f"{stages} stages were asked for, and others are faster"
        elif len(best.order) + 1 >= problem.borders:
            why = f"the model has only {problem.borders - 1} pieces"
        elif caps[i, 1] <= 0:
            why = "no stage fits into its memory"
        elif len(out) * len(best.order) <= FEW * 3 and (slower := _with(problem, best, i)) is not None:
            why = f"with it a step takes {duration(slower)}, without it {step}"
        elif caps[i, 0] <= 0:
            why = f"the smallest stage would take it longer than {duration(best.price.period_seconds)}"
        elif _nearest(problem, best, i) > best.price.period_seconds:
            why = "its links are too slow"
        elif problem.speed[i] < fastest:
            why = "what it would compute is not worth the way there and back"
        else:
            why = "its links would add more than its computing saves"
        notes.append(f"{problem.names[i]} is left out: {why}")
    return notes


def _with(problem: Problem, best: Found, peer: int) -> float | None:
    """The least step with one more peer, wherever it is put in."""
    order = list(best.order)
    tries = [along(problem, [*order[:k], peer, *order[k:]], tolerance=1e-2, runs=6) for k in range(len(order) + 1)]
    return min((tried.price.step_seconds for tried in tries if tried is not None), default=None)


def _nearest(problem: Problem, best: Found, peer: int) -> float:
    """Seconds of the quickest transfer to a peer of the plan, raw, the slower way."""
    ids = np.array(best.order)
    ahead = float(np.median(problem.forward_bytes[1:-1])) if problem.borders > 2 else 0.0
    rate = np.minimum(problem.network.rates(peer, ids), problem.network.rates(ids, peer))
    return float((ahead / rate).min())


def why_nothing_fits(graph: OpGraph, made: Instance, stages: int | None) -> str:
    """Names the tightest stage of a split in proportion to memory, with the windows of the schedule."""
    problem = made.problem
    count = min(stages or problem.size, problem.borders - 1)
    peers = [int(i) for i in np.argsort(-problem.memory, kind="stable")[:count]]
    live = problem.microbatches if problem.schedule == "gpipe" else 1
    plain = problem.state_bytes + live * problem.activation_bytes
    again = problem.state_bytes + problem.activation_bytes + live * problem.received_bytes
    held = np.minimum(plain, again)
    share = _fairest(held, problem.memory[peers])
    s = int(np.argmax([held[a, b] / problem.memory[p] for p, (a, b) in zip(peers, share, strict=True)]))
    peer, (first, end) = peers[s], share[s]
    modules = stage_modules(graph, [made.points[b] for b in (first, end)])[0]
    recomputes = bool(again[first, end] < plain[first, end])
    who = number_of("peer", problem.size)
    rest = ways_out(problem.names[peer], held[first, end], problem.memory[peer], live, recomputes)
    return f"the model does not fit on {who}: at best, stage {s} ({modules}) on {rest}"


def _fairest(held: np.ndarray, memory: np.ndarray) -> list[tuple[int, int]]:
    """Stages whose largest part of their peer's memory is least, the peers in the given order."""
    borders, count = len(held), len(memory)
    part = np.full(borders, np.inf)
    part[-1] = 0.0
    ends: list[np.ndarray] = []
    upper = np.triu_indices(borders, 1)
    for k in reversed(range(count)):
        options = np.full((borders, borders), np.inf)
        options[upper] = np.maximum(held[upper] / memory[k], part[upper[1]])
        ends.append(options.argmin(axis=1))
        part = options.min(axis=1)
    stages: list[tuple[int, int]] = []
    at = 0
    for chosen in ends[::-1]:
        stages.append((at, int(chosen[at])))
        at = int(chosen[at])
    return stages
