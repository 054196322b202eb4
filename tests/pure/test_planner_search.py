"""The searches against trying everything, and the bound against the optimum, on small random problems."""

from dataclasses import replace
from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.codecs.ladder import RAW, Rung
from geotrain.planner.bound import lower_bound
from geotrain.planner.chain import along
from geotrain.planner.exact import exact, found
from geotrain.planner.heuristic import paths, search
from geotrain.planner.make import _best
from geotrain.planner.polish import ALIKE, lightened
from geotrain.planner.price import price
from geotrain.planner.problem import Network, Problem
from tests.benchmarks.exhaustive import exhaustive
from tests.benchmarks.planning import instance


def random_problem(seed: int, peers: int = 4, blocks: int = 5, codecs: bool = False) -> Problem:
    rng = np.random.default_rng(seed)
    place = np.arange(blocks + 1)
    pieces = np.maximum(place - place[:, None], 0).astype(float)
    crossing = np.where((place > 0) & (place < blocks), 2e6, 0.0)
    up = np.where(rng.random(peers) < 0.25, 2.5e6, np.inf)
    network = Network(up, up * 4, 10 ** rng.uniform(6, 9, (peers, peers)), rng.uniform(0.001, 0.1, (peers, peers)))
    ladder = (RAW, Rung("a", 1.0, 0, 0, 0.004), Rung("b", 0.25, 0, 0, 0.02)) if codecs else (RAW,)
    return Problem(
        tuple(f"p{i}" for i in range(peers)), 1e11 * place[None].astype(float), 0.3e11 * place[None].astype(float),
        np.zeros(peers, np.intp), 10 ** rng.uniform(11, 12.3, peers), rng.uniform(3e9, 9e9, peers), pieces * 8e8,
        pieces * 1e8, np.full_like(pieces, 2e6), crossing, crossing, network, int(rng.integers(1, 33)),
        forward_elements=crossing / 2, backward_elements=crossing / 2, forward_rest=0 * crossing,
        backward_rest=0 * crossing, forward=ladder, backward=ladder, max_extra_steps=0.05,
    )  # fmt: skip


def everything(problem: Problem) -> float:
    """The least objective over all subsets, orders, cuts and codecs."""
    pairs = [(int(f), int(g)) for f, g in problem.pairs]
    return min(
        price(problem, order, cuts, codecs).objective
        for count in range(1, problem.size + 1)
        for order in permutations(range(problem.size), count)
        for cuts in combinations(range(1, problem.borders - 1), count - 1)
        for codecs in product(pairs, repeat=count - 1)
    )


@pytest.mark.parametrize("seed", range(8))
def test_exact_is_the_best_of_all(seed: int) -> None:
    problem = random_problem(seed, 3, 4)
    best, made = everything(problem), exact(problem)
    assert np.isinf(best) if made is None else made.value == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_codecs_are_as_good_as_the_best_of_all(seed: int) -> None:
    problem = random_problem(seed, 3, 3, codecs=True)
    best, made = everything(problem), exact(problem)
    assert np.isinf(best) if made is None else best * (1 - 1e-9) <= made.value <= best * 1.02


@pytest.mark.parametrize("codecs", [False, True])
def test_giving_up_beginnings_misses_no_plan(codecs: bool) -> None:
    """The benchmark's reference finds the best of all, also from the worst plan that one peer can run."""
    for seed in range(4):
        problem = random_problem(seed, 3, 3 if codecs else 4, codecs)
        alone = [found(problem, [peer], [], []) for peer in range(problem.size)]
        known = max((plan for plan in alone if np.isfinite(plan.value)), key=lambda plan: plan.value, default=alone[0])
        assert exhaustive(problem, known).value == pytest.approx(everything(problem))


def test_a_pair_of_codecs_that_is_best_on_few_links_is_not_missed() -> None:
    problem = random_problem(0, 5, 6, codecs=True)
    made = exact(problem)
    assert made is not None and made.value <= 1.005 * exhaustive(problem, made).value


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000), st.integers(1, 6), st.booleans())
def test_the_bound_is_below_the_optimum(seed: int, peers: int, codecs: bool) -> None:
    problem = random_problem(seed, peers, codecs=codecs)
    made = exact(problem)
    if made is not None:
        step = made.price.step_seconds
        assert 0 < lower_bound(problem, 2 * step) <= step * (1 + 1e-9)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10_000), st.integers(0, 3), st.integers(0, 3))
def test_faster_is_never_slower(seed: int, a: int, b: int) -> None:
    problem = random_problem(seed)
    before = exact(problem)
    rate = problem.network.rate.copy()
    rate[a, b] *= 3
    speed = problem.speed * np.where(np.arange(4) == a, 2, 1)
    after = exact(replace(problem, network=replace(problem.network, rate=rate), speed=speed))
    if before is not None:
        assert after is not None and after.value <= before.value * (1 + 1e-5)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10_000), st.permutations(range(4)))
def test_names_change_nothing(seed: int, order: list[int]) -> None:
    problem = random_problem(seed)
    one, two = exact(problem), exact(problem.take(order))
    assert (one is None) == (two is None)
    if one is not None and two is not None:
        assert two.value == pytest.approx(one.value, rel=1e-5)


def test_local_search_is_repeatable_and_near_the_bound() -> None:
    problem = replace(random_problem(1, 24, 24), memory=np.full(24, 1e12))
    one, two = search(problem, 0.2, 0), search(problem, 0.2, 0)
    assert one is not None and two is not None and one.order == two.order and one.cuts == two.cuts
    assert one.value <= 1.2 * lower_bound(problem, one.value)


def test_one_loss_budget_for_many_alike_links_is_not_spent_on_too_many_of_them() -> None:
    """With all of the peers, the budget is too small to compress each link; with two fewer, it is not."""
    peers, blocks = 12, 24
    place = np.arange(blocks + 1.0)
    rate, half = np.full(peers, 5e6), Rung("a", 1.0, 0, 0, 0.003)
    problem = replace(
        random_problem(0, peers, blocks, codecs=True), speed=np.full(peers, 1e12), memory=np.full(peers, 4e9),
        network=Network(rate, rate, np.tile(rate, (peers, 1)), np.zeros((peers, peers))),
        work=1e11 * place[None], forward=(RAW, half), backward=(RAW, half), max_extra_steps=0.06, microbatches=32,
    )  # fmt: skip
    made = _best(problem, None, 1.0, 0, [])
    assert made is not None and made.price.loss <= 0.06
    some = [along(problem, range(count)) for count in range(1, peers + 1)]
    assert made.value <= min(plan.value for plan in some if plan is not None) * 1.01


@pytest.mark.parametrize("seed", range(3))
def test_codecs_never_lead_many_peers_astray(seed: int) -> None:
    codecs = Rung("a", 1.0, 0, 0, 0.004), Rung("b", 0.3, 0, 0, 0.01)
    raw = instance(seed)
    problem = replace(raw, forward=(*raw.forward, *codecs), backward=(*raw.backward, *codecs))
    plain, made = paths(raw, 0.05, 0), search(problem, 0.1, 0)
    assert plain is not None and made is not None and made.value <= plain.value * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_codecs_that_hardly_pay_are_not_used(seed: int) -> None:
    problem = random_problem(seed, 5, 6, codecs=True)
    best = exact(problem)
    assert best is not None
    made = lightened(problem, best)
    assert made.order == best.order and made.cuts == best.cuts
    assert made.price.loss <= best.price.loss and made.value <= best.value * (1 + ALIKE)
    for k, (f, g) in enumerate(made.codecs):
        for pair in [(a, g) for a in range(f)] + [(f, b) for b in range(g)]:
            codecs = [*made.codecs[:k], pair, *made.codecs[k + 1 :]]
            assert found(problem, [*made.order], [*made.cuts], codecs).value > best.value * (1 + ALIKE)
