"""A network that drifts: what keep-or-switch gains over staying, and loses against knowing everything. Pure.

16 peers in 4 regions; now and then a pair of regions gets 3 to 16 times slower, or a peer 3 times, for a while. A step
takes what the planner's price says of the true network. We see it through noise: rates of links in use, test frames
within 1% of what is sent, speeds of peers (idle ones measure themselves every few steps).
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, permutations
from typing import Any

import numpy as np

from geotrain import replan
from geotrain.base import Link, LinkUse, Plan, Stage
from geotrain.links import SHIFT_SAMPLES, LinkBook
from geotrain.planner.chain import neighbours
from geotrain.planner.exact import Found
from geotrain.planner.heuristic import search
from geotrain.planner.make import standstill
from geotrain.planner.price import price
from geotrain.planner.problem import Network, Problem

from .tables import Table

PEERS, REGIONS, BLOCKS, MICROBATCHES = 16, 4, 24, 32
STEPS = 300
NOISE = 0.05
SURVEY_BYTES = 512 << 10
LOOKS = 8
"""A plan over links that turn out otherwise is made again, so often at most."""

IDLE_EVERY = 5
CHECK_EVERY = 20
EFFORT_S = 0.2
"""The planner's own measure of effort."""

PARAMETERS = 12 * 1024**2
"""Of a block: hidden size 1024; context 1024, half precision on the links, weights and AdamW's state in full."""

WEIGHT_BYTES, STATE_BYTES = 4.0 * PARAMETERS, 12.0 * PARAMETERS

BLOCK_FLOPS = 6.0 * PARAMETERS * 1024
BOUNDARY_BYTES = 2.0 * 1024 * 1024


@dataclass
class World:
    """The true network and speeds, by step."""

    seed: int
    problems: list[Problem] = field(default_factory=list[Problem])

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        region = np.sort(random.integers(REGIONS, size=PEERS))
        between = np.exp(random.uniform(math.log(8e6 / 8), math.log(10e9 / 8), (REGIONS, REGIONS)))
        np.fill_diagonal(between, random.uniform(1e9 / 8, 10e9 / 8, REGIONS))
        latency = random.uniform(0.01, 0.1, (REGIONS, REGIONS))
        latency = (latency + latency.T) / 2
        np.fill_diagonal(latency, 0.001)
        home = random.random(PEERS) < 0.25
        up, down = np.where(home, 20e6 / 8, 10e9 / 8), np.where(home, 100e6 / 8, 10e9 / 8)
        speed = 1e12 * np.exp(random.uniform(0, math.log(20), PEERS))
        events: list[tuple[int, str, tuple[int, int], float]] = []
        for step in range(STEPS):
            events = [event for event in events if event[0] > step]
            if random.random() < 1 / 25:
                until = step + int(random.integers(30, 90))
                if random.random() < 0.6:
                    a, b = random.integers(REGIONS, size=2)
                    events.append((until, "link", (int(a), int(b)), float(random.uniform(3, 16))))
                else:
                    events.append((until, "peer", (int(random.integers(PEERS)), 0), 3.0))
            rates, speeds = between.copy(), speed.copy()
            for _, kind, (a, b), factor in events:
                if kind == "link":
                    rates[a, b] /= factor
                    rates[b, a] /= factor if a != b else 1.0
                else:
                    speeds[a] /= factor
            self.problems.append(_problem(Network(up, down, rates, latency, region), speeds))


def _problem(network: Network, speed: np.ndarray) -> Problem:
    work = BLOCK_FLOPS * np.arange(BLOCKS + 1.0)
    held = np.maximum(0.0, np.subtract.outer(-np.arange(BLOCKS + 1.0), -np.arange(BLOCKS + 1.0)))
    boundary = np.full(BLOCKS + 1, BOUNDARY_BYTES)
    return Problem(
        tuple(f"p{i:02}" for i in range(PEERS)), work[None], work[None] / 3, np.zeros(PEERS, np.intp), speed,
        np.full(PEERS, 24e9), held * STATE_BYTES, held * 40e6, held * 0 + BOUNDARY_BYTES, boundary, boundary, network,
        MICROBATCHES,
    )  # fmt: skip


def best(problem: Problem, near: tuple[int, ...] = ()) -> Found:
    plan = search(problem, EFFORT_S, 0, near)
    assert plan is not None
    return plan


def step_s(problem: Problem, plan: Found) -> float:
    return price(problem, plan.order, plan.cuts, plan.codecs).step_seconds


def as_plan(problem: Problem, found: Found) -> Plan:
    bounds = pairwise([0, *found.cuts, BLOCKS])
    stages = (Stage(problem.names[p], a, b, 1) for p, (a, b) in zip(found.order, bounds, strict=True))
    return Plan("", "1f1b", MICROBATCHES, tuple(stages))


@dataclass
class Outcome:
    seconds: float = 0.0
    moving: float = 0.0
    moves: int = 0
    asked: int = 0


def _key(problem: Problem) -> bytes:
    """Of what drifts."""
    return problem.network.rate.tobytes() + problem.speed.tobytes()


def clairvoyant(world: World) -> Outcome:
    """The best plan for every step, of all that are best for some step, reached for nothing."""
    different = {_key(problem): problem for problem in world.problems}
    plans: list[Found] = []
    for problem in different.values():
        near = min(plans, key=lambda plan: step_s(problem, plan)).order if plans else ()
        plans.append(best(problem, near))
    least = {key: min(step_s(problem, plan) for plan in plans) for key, problem in different.items()}
    return Outcome(sum(least[_key(problem)] for problem in world.problems))


def never(world: World) -> Outcome:
    plan = best(world.problems[0])
    return Outcome(sum(step_s(problem, plan) for problem in world.problems))


class Ours:
    """What the coordinator does: a book of links, a watch, the planner, and the verdict."""

    def __init__(self, world: World, background: bool) -> None:
        self.world, self.background = world, background
        self.random = np.random.default_rng(world.seed + 1000)
        self.book, self.outcome, self.now_s = LinkBook(), Outcome(), 0.0
        first = world.problems[0]
        self.names, self.speed = first.names, first.speed * self._noise(PEERS)
        for pair in permutations(range(PEERS), 2):  # the survey
            self.book.saw([self._use(first, pair, SURVEY_BYTES)], -1e6, 0.0, probe=True)
        self.coming: tuple[Found, float] | None = None
        """A plan whose state is being copied, and the seconds that this still takes."""
        self.because: list[str] = []
        self.settled = True
        """Whether all that the last answer rests on was as believed, and nothing has changed since."""
        self.plan = best(self.believed())
        self.watch = replan.Watch(self._expected())

    def run(self) -> Outcome:
        for number, problem in enumerate(self.world.problems):
            seconds = step_s(problem, self.plan)
            if self.coming is not None:
                proposed, copy_s = self.coming
                slower = min(copy_s, seconds) * replan.BACKGROUND
                self.coming = (proposed, copy_s - seconds) if copy_s > seconds else None
                seconds += slower
                self.outcome.moving += slower
                if self.coming is None:
                    self._go_over(proposed)
            self.outcome.seconds += seconds
            self.now_s += seconds
            figures = self._see(problem, seconds, number)
            self.watch, deviations = replan.observe(self.watch, figures)
            self.because += map(str, deviations)
            if deviations and self.coming is not None:
                question = self.believed()
                if step_s(question, self.coming[0]) > step_s(question, self.plan) * (1 - replan.LEAST_GAIN):
                    self.coming = None
            if self.coming is None and (self.because or not self.settled or (number + 1) % CHECK_EVERY == 0):
                self._ask(problem, STEPS - 1 - number, self.because)
                self.because = []
        return self.outcome

    def _go_over(self, proposed: Found) -> None:
        self.outcome.moves += 1
        self.plan, self.settled = proposed, False
        self.watch = replan.Watch(self._expected())

    def _noise(self, size: int | None = None) -> Any:
        return np.exp(self.random.normal(0.0, NOISE, size))

    def _use(self, problem: Problem, pair: tuple[int, int], nbytes: float) -> LinkUse:
        rate = float(problem.network.rates(*pair)) * float(self._noise())
        return LinkUse(self.names[pair[0]], self.names[pair[1]], int(nbytes), int(nbytes), nbytes / rate, None)

    def _edges(self, order: Sequence[int]) -> list[tuple[int, int]]:
        return [*pairwise(order), *((b, a) for a, b in pairwise(order))]

    def believed(self) -> Problem:
        """The problem as far as it is known. No link is faster than its ends, and no end is known to be faster than
        its fastest link."""
        rate, latency = np.ones((PEERS, PEERS)), self.world.problems[0].network
        number = {name: i for i, name in enumerate(self.names)}
        for estimate in self.book.estimates(self.names, self.now_s):
            rate[number[estimate.src], number[estimate.dst]] = estimate.rate_bytes_per_s
        ids = np.arange(PEERS)
        network = Network(rate.max(axis=1), rate.max(axis=0), rate, latency.latencies(ids[:, None], ids))
        return replace(self.world.problems[0], network=network, speed=self.speed)

    def _expected(self) -> dict[replan.Part, float]:
        problem = self.believed()
        here = price(problem, self.plan.order, self.plan.cuts, self.plan.codecs)
        figures: dict[replan.Part, float] = {
            ("link", self.names[a], self.names[b]): 1 / float(problem.network.rates(a, b))
            for a, b in permutations(range(PEERS), 2)
        }
        for p, seconds in zip(self.plan.order, here.compute, strict=True):
            figures["stage", self.names[p]] = float(seconds)
        for p in set(range(PEERS)) - set(self.plan.order):
            figures["stage", self.names[p]] = 1 / float(self.speed[p])
        return figures

    def _see(self, problem: Problem, seconds: float, number: int) -> dict[replan.Part, float]:
        true = price(problem, self.plan.order, self.plan.cuts, self.plan.codecs)
        uses = [self._use(problem, edge, MICROBATCHES * BOUNDARY_BYTES) for edge in self._edges(self.plan.order)]
        for use in uses:
            self.book.saw([use], self.now_s - max(seconds, use.busy_s), self.now_s)
        pair = {name: i for i, name in enumerate(self.names)}
        used = {(use.src, use.dst) for use in uses}
        suspects = {(part[1], part[2]) for part in replan.suspected(self.watch) if part[0] == "link"} - used
        for probe in self.book.probes(self.names, self.now_s, suspects):
            use = self._use(problem, (pair[probe.src], pair[probe.dst]), probe.nbytes)
            self.book.saw([use], self.now_s - 1e3, self.now_s, probe=True)
            uses.append(use)
        figures: dict[replan.Part, float] = {("link", u.src, u.dst): u.busy_s / u.timed_bytes for u in uses}
        for k, p in enumerate(self.plan.order):
            figures["stage", self.names[p]] = float(true.compute[k] * self._noise())
            blocks = ([*self.plan.cuts, BLOCKS])[k] - ([0, *self.plan.cuts])[k]
            latest = BLOCK_FLOPS * blocks / figures["stage", self.names[p]]
            self.speed[p] = latest if abs(latest / self.speed[p] - 1) > 0.2 else 0.7 * self.speed[p] + 0.3 * latest
        if number % IDLE_EVERY == 0:
            for p in set(range(PEERS)) - set(self.plan.order):
                self.speed[p] = problem.speed[p] * float(self._noise())
                figures["stage", self.names[p]] = 1 / float(self.speed[p])
        return figures

    def _ask(self, problem: Problem, left: int, because: Sequence[str]) -> None:
        """The links that a plan would use are tried first; until all are as believed, we ask again. What pays within a
        horizon from now comes first; only if nothing does, a plan whose state takes longer to copy."""
        self.outcome.asked += 1

        def gain_s(option: Found, steps: int) -> float:
            here, there = step_s(question, self.plan), step_s(question, option)
            saved_s, cost_s = replan.balance(here, there, steps, **self._cost(question, option))
            return (saved_s - cost_s) * (here - there > replan.LEAST_GAIN * here)

        for _ in range(LOOKS):
            question = self.believed()
            options = [best(question, self.plan.order), *neighbours(question, self.plan)]
            for steps in (min(left, replan.HORIZON), left):
                proposed = max(options, key=lambda option: gain_s(option, steps))
                if gain_s(proposed, steps) > 0:
                    break
            self.settled = not self._probe(problem, [*self._edges(proposed.order), *self._ways(proposed)])
            if self.settled:
                break
        question = self.believed()
        verdict = replan.decide(
            as_plan(question, self.plan), as_plan(question, proposed), now_s=step_s(question, self.plan),
            proposed_s=step_s(question, proposed), steps_left=left, because=because, **self._cost(question, proposed),
        )  # fmt: skip
        if isinstance(verdict, replan.Keep):
            return
        if self.background:
            self.coming = proposed, self._copy_s(problem, proposed)
        else:
            stall_s = self._stall_s(problem, proposed)
            self.outcome.moving += stall_s
            self.outcome.seconds += stall_s
            self.now_s += stall_s
            self._go_over(proposed)

    def _moves(self, proposed: Found) -> list[replan.Transfer]:
        """The state of blocks that a peer gets and does not have."""
        found: list[replan.Transfer] = []
        for new in as_plan(self.world.problems[0], proposed).stages:
            for old in as_plan(self.world.problems[0], self.plan).stages:
                blocks = min(new.end_op, old.end_op) - max(new.first_op, old.first_op)
                if blocks > 0 and new.peer != old.peer:
                    found.append(replan.Transfer(old.peer, new.peer, int(STATE_BYTES * blocks)))
        return found

    def _ways(self, proposed: Found) -> list[tuple[int, int]]:
        """The links that the state would take."""
        return [(self.names.index(m.src), self.names.index(m.dst)) for m in self._moves(proposed)]

    def _cost(self, problem: Problem, proposed: Found) -> dict[str, float]:
        if self.background:
            return {"copy_s": self._copy_s(problem, proposed)}
        return {"stall_s": self._stall_s(problem, proposed)}

    def _stall_s(self, problem: Problem, proposed: Found) -> float:
        """As ours do: weights first, and the optimizer's state while the first step runs."""
        copy_s = self._copy_s(problem, proposed)
        return standstill(copy_s * WEIGHT_BYTES / STATE_BYTES, copy_s, step_s(problem, proposed))

    def _copy_s(self, problem: Problem, proposed: Found) -> float:
        moves = self._moves(proposed)
        ids = {name: i for i, name in enumerate(self.names)}
        links = [Link(m.src, m.dst, float(problem.network.rates(ids[m.src], ids[m.dst])), 0.0) for m in moves]
        ends = problem.network.up, problem.network.down
        up, down = (dict(zip(self.names, map(float, end), strict=True)) for end in ends)
        return replan.copy_seconds(moves, links, up, down)

    def _probe(self, problem: Problem, edges: Sequence[tuple[int, int]]) -> bool:
        """Test frames over links that are not in use; whether one is not as believed."""
        before = self.believed().network
        for edge in set(edges) - set(self._edges(self.plan.order)):
            for _ in range(SHIFT_SAMPLES):
                test = self.book.test((self.names[edge[0]], self.names[edge[1]]))
                self.book.saw([self._use(problem, edge, test.nbytes)], self.now_s - 1e3, self.now_s, probe=True)
        after = self.believed().network
        return any(abs(math.log(after.rate[edge] / before.rate[edge])) > math.log(replan.TOLERANCE) for edge in edges)


def benchmark(short: bool) -> list[Table]:
    policies: dict[str, Callable[[World], Outcome]] = {
        "never": never,
        "ours, training stands still while state moves": lambda world: Ours(world, False).run(),
        "ours, state moves in the background": lambda world: Ours(world, True).run(),
    }
    ratios: dict[str, list[float]] = {name: [] for name in policies}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in policies}
    for seed in range(2 if short else 20):
        world = World(seed)
        least = clairvoyant(world).seconds
        for name, policy in policies.items():
            outcome = policy(world)
            outcomes[name].append(outcome)
            ratios[name].append(outcome.seconds / least)
    rows = [
        (
            name, statistics.median(ratios[name]), statistics.fmean(ratios[name]), max(ratios[name]),
            statistics.fmean(o.asked for o in given), statistics.fmean(o.moves for o in given),
            sum(o.moving for o in given) / sum(o.seconds for o in given),
        )
        for name, given in outcomes.items()
    ]  # fmt: skip
    columns = ("policy", "median", "mean", "worst", "plans asked for", "moves", "part of the time moving")
    title = f"{len(ratios['never'])} drifting networks, {STEPS} steps: time over a clairvoyant's with free moves"
    return [Table(title, columns, rows, ratios={name: statistics.median(r) for name, r in ratios.items()})]
