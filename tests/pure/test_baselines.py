"""Simpler plans: orders and cuts as they are meant; and several pipelines."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.planner.baselines import baselines, best_cuts, equal, fence, proportional, shortest, tour
from geotrain.planner.exchange import Exchange, messages
from geotrain.planner.price import price
from geotrain.planner.problem import Network, Problem
from geotrain.planner.replicas import priced, replicas, sync_seconds


def world(speeds, rate, pieces=6, microbatches=8, nbytes=1e6, latency=0.01) -> Problem:
    """A piece is a second's work of a peer of speed 1."""
    count, border = len(speeds), np.arange(pieces + 1.0)
    nothing, free = np.zeros((pieces + 1, pieces + 1)), np.full(count, np.inf)
    crossing = np.where((border > 0) & (border < pieces), nbytes, 0.0)
    lags = np.full((count, count), latency)
    return Problem(
        tuple(f"p{i}" for i in range(count)), border[None], border[None] / 3, np.zeros(count, np.intp),
        np.array(speeds, float), np.full(count, 1e12), nothing, nothing, nothing, crossing, crossing,
        Network(free, free, np.broadcast_to(rate, (count, count)).astype(float), lags), microbatches,
    )  # fmt: skip


def houses(*sizes: int, inside: float = 1e8, between: float = 1e5) -> np.ndarray:
    """Rates where peers of one house have fast links; peers take turns between houses."""
    count = sum(sizes)
    home = np.arange(count) % len(sizes)
    return np.where(home[:, None] == home, inside, between)


def test_equal_and_proportional_cuts():
    problem = world([1, 2, 3], 1e9)
    assert equal(problem, [2, 0, 1]) == ([2, 0, 1], [2, 4])
    assert proportional(problem, [0, 1, 2]) == ([0, 1, 2], [1, 3])
    assert proportional(world([1, 1, 100], 1e9), [2, 0, 1])[1] == [4, 5]


def test_fast_links_make_groups_and_tours():
    rate = houses(3, 3)
    order = fence(world([1, 2, 3, 4, 5, 6], rate))
    assert [i % 2 for i in order] in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])
    assert order[0] in (4, 5)
    stops = [i % 2 for i in tour(world([1] * 6, rate))]
    assert sum(a != b for a, b in pairwise(stops)) == 1


def test_a_tour_is_the_shortest_of_a_line():
    place = np.random.default_rng(0).permutation(9).astype(float)
    path = shortest(np.abs(place[:, None] - place))
    assert [place[i] for i in path] in (list(range(9)), list(range(8, -1, -1)))


def test_the_best_cuts_of_an_order_are_those_of_a_full_search():
    rng = np.random.default_rng(3)
    for _ in range(5):
        problem = world(rng.uniform(1, 5, 3), np.exp(rng.uniform(13, 17, (3, 3))), pieces=5)
        steps = [
            price(problem, order, cuts).step_seconds
            for count in (1, 2, 3)
            for order in combinations(range(3), count)
            for cuts in combinations(range(1, 5), count - 1)
        ]
        way = best_cuts(problem, [0, 1, 2])
        assert way is not None
        assert price(problem, *way).step_seconds == pytest.approx(min(steps), rel=0.03)  # a period is one of a dozen


def test_simpler_plans_use_every_peer_and_exact_cuts_are_best():
    plans = baselines(world([1, 2, 3, 4], houses(2, 2)))
    for name, plan in plans.items():
        assert plan is not None
        assert sorted(plan.order) == [0, 1, 2, 3], name
        exact = plans[name.partition(",")[0] + ", exact cuts"]
        assert exact is not None and exact.value <= plan.value * (1 + 1e-3)


def test_an_exchange_is_what_the_formula_says():
    problem = world([1, 1, 1, 1], np.where(np.eye(4), np.inf, [[1e6], [2e6], [4e6], [8e6]]))
    sync_bytes = np.arange(7) * 1e6
    seconds = sync_seconds(Exchange(problem), sync_bytes, [([0, 1], [3]), ([2, 3], [3])])
    assert seconds == pytest.approx(2 * (0.01 + 3e6 / (2 * 1e6)))  # peer 0 is the slowest to send its half
    assert sync_seconds(Exchange(problem), sync_bytes, [([0], [])]) == 0
    apart = sync_seconds(Exchange(problem), sync_bytes, [([0, 1], [3]), ([2, 3], [1])])
    assert apart == pytest.approx(2 * (0.01 + 1e6 / 2e6) + 2 * (0.01 + 2e6 / 2e6))  # it shares pieces with both


def test_pipelines_share_the_microbatches_so_that_they_end_together():
    problem = world([3, 1, 1, 1], 1e12, microbatches=12)
    plan = priced(problem, np.zeros(7), 1, [([0], []), ([1], [])])
    assert [p.microbatches for p in plan.pipelines] == [9, 3]
    assert plan.step_seconds == pytest.approx(18.0, rel=0.01)  # 2 s a microbatch on the fast one, 6 s on the other


def test_replicas_are_near_each_other_where_they_talk_often():
    problem, sync_bytes = world([1] * 6, houses(3, 3), pieces=6, microbatches=12, nbytes=1e3), np.arange(7) * 1e7
    often = replicas(problem, sync_bytes, every=1)
    assert often is not None
    assert sum(p.microbatches for p in often.pipelines) == 12
    peers = [i for p in often.pipelines for i in p.order]
    assert len(peers) == len(set(peers))
    assert often.aligned
    for stage in zip(*(p.order for p in often.pipelines), strict=True):
        assert len({peer % 2 for peer in stage}) == 1
    seldom = replicas(problem, sync_bytes, every=10_000)
    assert seldom is not None and seldom.step_seconds < often.step_seconds


@given(labels=st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_in_an_exchange_every_part_meets_its_like(labels):
    """A member of a group of s sends each other one its s-th; of its own s-th, each other group gets a G-th."""
    within, between = messages(np.array(labels))
    sizes, groups = np.array([labels.count(label) for label in labels]), len(set(labels))
    assert within.sum(axis=1) == pytest.approx((sizes - 1) / sizes)
    for label in set(labels):
        others = np.array(labels) == label
        expected = np.where(others, 0.0, 1 / sizes / groups)
        assert between[:, others].sum(axis=1) == pytest.approx(expected)
    alone, all_to_all = messages(np.arange(len(labels)))
    assert not alone.any() and all_to_all == pytest.approx((1 - np.eye(len(labels))) / len(labels))


def test_only_sums_leave_a_house_where_that_is_faster():
    problem, nbytes = world([1] * 6, houses(3, 3), pieces=6), np.array([9e6])
    holders = np.arange(6)[None]
    flat, grouped = (Exchange(problem, grouped=grouped).total_seconds(nbytes, holders) for grouped in (False, True))
    near, far = (problem.network.rates(0, other) for other in (2, 1))
    assert flat == pytest.approx(2 * (5 * 0.01 + 2 * 1.5e6 / near + 3 * 1.5e6 / far))
    assert grouped == pytest.approx(2 * (2 * 0.01 + 2 * 3e6 / near) + 2 * (0.01 + 1.5e6 / far))
    assert grouped < flat


@given(seed=st.integers(0, 1000), count=st.integers(2, 4), stages=st.integers(1, 3))
def test_an_exchange_costs_the_same_one_by_one_and_by_the_batch(seed, count, stages):
    random = np.random.default_rng(seed)
    size = count * stages
    problem = world([1] * size, np.exp(random.uniform(10, 20, (size, size))))
    grid, nbytes = random.permutation(size).reshape(stages, count), random.uniform(1e5, 1e7, stages)
    exchange = Exchange(problem)
    one, batch = exchange.total_seconds(nbytes, grid), exchange.seconds(nbytes[None], grid[None])
    assert batch == pytest.approx([one])
    assert one <= Exchange(problem, grouped=False).total_seconds(nbytes, grid) * (1 + 1e-9)


def test_a_far_peer_that_costs_the_exchange_more_than_it_computes_is_left_out():
    home = np.array([0] * 7 + [1])
    problem = world([1] * 8, np.where(home[:, None] == home, 1e9, 1e6), microbatches=35, nbytes=1e9)
    plan = replicas(problem, np.arange(7) * 1e6)
    assert plan is not None
    assert sorted(one.order for one in plan.pipelines) == [(i,) for i in range(7)]
    assert plan.step_seconds == pytest.approx(5 * 6, rel=0.01)
