"""The planner against exhaustive search, within memory; the checker against every way to break a plan."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.base import Link, Peer, Plan, Stage
from geotrain.codecs.ladder import RAW, Rung
from geotrain.cost import CostTable, stage_cost
from geotrain.errors import PlanError
from geotrain.graph import OpGraph, boundary_bytes, candidate_cuts, capture
from geotrain.graph.ir import Buffer, Ref
from geotrain.planner import check, plan
from geotrain.planner.exact import EXACT_PEERS
from geotrain.planner.memory import GIB, RUNTIME_BYTES, USABLE, stage_memory
from geotrain.schedule import default_windows
from tests.pure.graphs import chain, floats
from tests.zoo import make


def memory_for(nbytes: float) -> int:
    """What a peer must allow so that a stage may use so much."""
    return int(nbytes / USABLE) + 1


ROOM = memory_for(RUNTIME_BYTES + GIB)


def peers_of(*speeds: float, memory: int = ROOM) -> list[Peer]:
    return [Peer(f"p{i}", speed, memory) for i, speed in enumerate(speeds)]


def names(made: Plan) -> list[str]:
    return [stage.peer for stage in made.stages]


def slowest(made: Plan) -> float:
    return max(stage.compute_seconds for stage in made.stages)


def test_equal_layers_are_shared_by_speed() -> None:
    made = plan(chain([64] * 9), peers_of(1e9, 3e9), microbatches=4)
    work = {stage.peer: stage.end_op - stage.first_op for stage in made.stages}
    assert work["p1"] > 2.5 * work["p0"]
    first, second = (stage.compute_seconds for stage in made.stages)
    assert first == pytest.approx(second, rel=0.4)
    assert made.benched == () and made.schedule == "1f1b" and made.microbatches == 4
    assert made.lower_bound_seconds <= made.step_seconds


def test_a_plan_is_the_same_every_time_and_survives_a_file() -> None:
    graph, peers = chain([32, 64, 16, 64, 32, 8]), peers_of(1e9, 2e9, 1.5e9)
    made = plan(graph, peers, microbatches=8, epoch=3)
    assert plan(graph, peers, microbatches=8, epoch=3) == made
    assert Plan.from_json(made.to_json()) == made and made.epoch == 3
    check(made, graph, peers)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["gpt2", "resnet", "t5"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_captured_models_on_any_number_of_peers(name: str, count: int, schedule: str) -> None:
    graph = capture(*make(name))
    peers = peers_of(*[1e9] * count)
    made = plan(graph, peers, microbatches=4, schedule=schedule, stages=count)
    check(made, graph, peers)
    assert sorted(names(made)) == [peer.name for peer in peers]
    if schedule == "gpipe":
        assert [stage.window for stage in made.stages] == default_windows(schedule, count, 4)
    points = [0, *(stage.end_op for stage in made.stages)]
    table = CostTable(graph, points)
    for s, stage in enumerate(made.stages):
        cost = table.stage(s, s + 1)
        # the planner adds work up border by border; what several stages make again is a little more
        assert stage.compute_seconds == pytest.approx(cost.flops / 1e9, rel=2e-3)
        assert stage.memory_bytes == int(stage_memory(table, 4).peak(stage.window, stage.recompute)[s, s + 1])


# -- against exhaustive search


def least_period(graph: OpGraph, peers: list[Peer], microbatches: int) -> float | None:
    """The least slowest-stage seconds over all orders of the peers and all cuts, by trying all."""
    count = len(peers)
    places = candidate_cuts(graph)
    if len(places) + 1 < 2 * count:  # too few to balance: then the planner cuts anywhere
        places = boundary_bytes(graph)
    windows = default_windows("1f1b", count, microbatches)
    cost_of = cache(lambda first, end: stage_cost(graph, first, end))
    best: float | None = None
    for points in combinations([cut.op_index for cut in places], count - 1):
        costs = [cost_of(first, end) for first, end in pairwise([0, *points, len(graph.ops)])]
        for order in permutations(peers):
            fits = all(
                memory_for(cost.memory_bytes(window) + RUNTIME_BYTES) <= peer.memory_bytes
                for cost, window, peer in zip(costs, windows, order, strict=True)
            )
            period = max(cost.flops / peer.flops_per_s for cost, peer in zip(costs, order, strict=True))
            if fits and (best is None or period < best):
                best = period
    return best


@settings(deadline=None, max_examples=40)
@given(
    widths=st.lists(st.sampled_from([8, 16, 64, 200]), min_size=8, max_size=9),
    speeds=st.lists(st.integers(1, 20), min_size=2, max_size=3),
    rooms=st.lists(st.integers(20_000, 400_000), min_size=3, max_size=3),
)
def test_the_slowest_stage_is_as_fast_as_can_be(widths: list[int], speeds: list[int], rooms: list[int]) -> None:
    graph = chain(widths)
    peers = [
        Peer(f"p{i}", speed * 1e6, memory_for(RUNTIME_BYTES + room + (1 << 30)))
        for i, (speed, room) in enumerate(zip(speeds, rooms, strict=False))
    ]
    count = len(peers)
    expected = least_period(graph, peers, 4)
    assert expected is not None
    made = plan(graph, peers, microbatches=4, stages=count)
    # stages asked for; the fill may be worth a little of the period
    assert expected * 0.999 <= slowest(made)
    assert made.period_seconds * 3 <= made.step_seconds <= expected * (4 + count - 1) * 1.001
    check(made, graph, peers)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=5), st.integers(1, 16), st.integers(0, 4))
def test_a_faster_peer_never_makes_the_step_slower(speeds: list[int], microbatches: int, which: int) -> None:
    graph = chain([32, 64, 32, 64, 32, 64, 32])
    before = plan(graph, peers_of(*(speed * 1e6 for speed in speeds)), microbatches=microbatches)
    speeds[which % len(speeds)] *= 2
    after = plan(graph, peers_of(*(speed * 1e6 for speed in speeds)), microbatches=microbatches)
    assert after.step_seconds <= before.step_seconds * (1 + 1e-6)


# -- peers left out


def test_a_peer_that_slows_the_run_is_left_out_and_the_plan_says_why() -> None:
    made = plan(chain([64] * 5), peers_of(1e9, 1e9, 1e6), microbatches=2)
    assert sorted(names(made)) == ["p0", "p1"]
    assert made.benched == ("p2",)
    assert any(note.startswith("p2 is left out: with it a step takes ") for note in made.notes)


def test_equal_peers_are_all_used() -> None:
    made = plan(chain([64] * 13), peers_of(*[1e9] * 6), microbatches=8)
    assert sorted(names(made)) == [f"p{i}" for i in range(6)] and made.benched == ()


def test_more_peers_than_pieces() -> None:
    graph = chain([8, 8])  # 3 ops
    made = plan(graph, peers_of(*[1e6] * 5), microbatches=64)
    assert len(made.stages) <= 3
    assert len(made.benched) == 5 - len(made.stages)
    with pytest.raises(PlanError, match="cut into 3 stages at most, not 4"):
        plan(graph, peers_of(*[1e6] * 5), microbatches=4, stages=4)


def test_asked_for_fewer_stages() -> None:
    made = plan(chain([64] * 9), peers_of(1e9, 2e9, 3e9), microbatches=4, stages=2)
    assert sorted(names(made)) == ["p1", "p2"]
    assert made.notes[-1] == "p0 is left out: 2 stages were asked for, and others are faster"


def test_many_peers() -> None:
    speeds = [1e9 * (1 + i % 7) for i in range(EXACT_PEERS + 12)]
    graph = chain([64] * 41)
    peers = peers_of(*speeds)
    made = plan(graph, peers, microbatches=32, deadline_s=0.2)
    check(made, graph, peers)
    assert len(made.stages) > 8 and len(made.benched) == len(speeds) - len(made.stages)
    assert plan(graph, peers, microbatches=32, deadline_s=0.2) == made
    assert 1 <= made.step_seconds / made.lower_bound_seconds < 1.2


# -- links


def both_ways(a: str, b: str, rate: float, latency: float = 0.0) -> list[Link]:
    return [Link(a, b, rate, latency), Link(b, a, rate, latency)]


def test_a_slow_link_is_avoided() -> None:
    """Equal peers: the order that uses the two fast links wins."""
    links = [
        *both_ways("p0", "p1", 1e3, 0.1), *both_ways("p1", "p2", 1e9), *both_ways("p0", "p2", 1e9),
    ]  # fmt: skip
    made = plan(chain([64] * 13), peers_of(*[1e8] * 3), microbatches=8, links=links)
    assert names(made) in (["p0", "p2", "p1"], ["p1", "p2", "p0"])
    free = plan(chain([64] * 13), peers_of(*[1e8] * 3), microbatches=8)
    assert made.step_seconds == pytest.approx(free.step_seconds, rel=0.05)


def test_links_slower_than_one_peer_alone_are_not_used() -> None:
    made = plan(chain([64] * 13), peers_of(1e9, 1e9), microbatches=8, links=both_ways("p0", "p1", 100.0))
    assert len(made.stages) == 1 and "p1 is left out: with it a step takes" in made.notes[-1]


def test_a_plan_near_one_whose_codec_costs_more_than_all_may() -> None:
    """A job's trials may show so; the plan that runs is then priced without it."""
    graph, peers = chain([256] * 9), peers_of(1e8, 1e8)
    rung = Rung("int8", 1.01, cost=0.004)
    wanted = {"microbatches": 4, "links": both_ways("p0", "p1", 1e5), "stages": 2}
    old = plan(graph, peers, forward=(RAW, rung), backward=(RAW, rung), **wanted)
    assert "int8" in {codec for stage in old.stages for codec in (stage.codec_forward, stage.codec_backward)}
    dear = replace(rung, cost=9.0)
    new = plan(graph, peers, forward=(RAW, dear), backward=(RAW, dear), near=old, **wanted)
    assert {codec for stage in new.stages for codec in (stage.codec_forward, stage.codec_backward)} == {"identity"}


def test_where_a_link_breaks_the_run_goes_on_where_most_of_the_state_is() -> None:
    """The faster half would take days to get it; between them, peers send too much."""
    graph, peers = chain([256] * 10), peers_of(1.3e7, 1.3e7, 1e7, 1e7)
    layers = [i for i, op in enumerate(graph.ops) if "linear" in op.target or "mm" in op.target]
    cuts = [0, layers[1], layers[2], layers[5], len(graph.ops)]
    old = Plan("", "1f1b", 64, tuple(Stage(f"p{k}", a, b, 1) for k, (a, b) in enumerate(pairwise(cuts))))
    links = [link for a in "01" for b in "23" for link in both_ways(f"p{a}", f"p{b}", 2e3)]
    assert names(plan(graph, peers, microbatches=64, links=links)) in (["p0", "p1"], ["p1", "p0"])
    assert names(plan(graph, peers, microbatches=64, links=links, near=old)) == ["p2", "p3"]


def test_step_seconds_by_hand() -> None:
    graph, peers = chain([64] * 5), peers_of(1e9, 1e9)
    made = plan(graph, peers, microbatches=6, links=both_ways("p0", "p1", 1e8, 0.002), stages=2)
    crossing = 4 * 64 * 4 / 1e8  # rows x features x float32, each way
    period = max(slowest(made), crossing)
    compute = sum(stage.compute_seconds for stage in made.stages)
    assert made.step_seconds == pytest.approx(5 * period + compute + 2 * crossing + 2 * 0.002)


# -- memory


def test_memory_decides_where_speed_would_not() -> None:
    graph = chain([256] * 9)
    whole = stage_cost(graph, 0, len(graph.ops)).memory_bytes(1)
    fast = Peer("fast", 9e9, memory_for(RUNTIME_BYTES + whole // 4))
    slow = Peer("slow", 1e9, memory_for(RUNTIME_BYTES + whole))
    made = plan(graph, [fast, slow], microbatches=2)
    check(made, graph, [fast, slow])
    held = {stage.peer: stage.memory_bytes for stage in made.stages}
    assert all(memory_for(held[peer.name]) <= peer.memory_bytes + 1 for peer in (fast, slow))
    work = {stage.peer: stage.end_op - stage.first_op for stage in made.stages}
    assert work["fast"] < work["slow"]


def test_momentum_and_optimizer_count() -> None:
    graph = chain([256] * 5)
    needed = {
        (optimizer, momentum): plan(
            graph, peers_of(1e9), microbatches=1, optimizer=optimizer, momentum=momentum
        ).stages[0].memory_bytes
        for optimizer, momentum in [("adamw", 0.0), ("sgd", 0.9), ("sgd", 0.0)]
    }  # fmt: skip
    parameters = 4 * graph.num_parameters
    assert needed["adamw", 0.0] - needed["sgd", 0.9] == parameters
    assert needed["sgd", 0.9] - needed["sgd", 0.0] == parameters


def test_what_does_not_fit_is_refused_with_three_ways_out() -> None:
    graph = chain([512] * 5)
    peers = peers_of(1e9, 1e9, memory=memory_for(RUNTIME_BYTES + 2**20))
    with pytest.raises(PlanError) as refused:
        plan(graph, peers, microbatches=8, schedule="gpipe")
    message = str(refused.value)
    assert "does not fit on 2 peers" in message and "\n" not in message
    assert "stage" in message and "(blocks." in message and "with 8 live microbatches" in message
    assert "needs 0.41 GiB" in message and "may use 0.40 GiB (80% of its memory)" in message
    for way_out in ("more peers", "microbatch smaller", "recompute"):
        assert way_out in message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"peers": []}, "no peer to plan for"),
        ({"peers": [Peer("a", 1e9, ROOM), Peer("a", 1e9, ROOM)]}, "two peers are called 'a'"),
        ({"peers": [Peer("a", 0.0, ROOM)]}, "must be above 0"),
        ({"peers": [Peer("a", float("nan"), ROOM)]}, "must be above 0"),
        ({"microbatches": 0}, "at least 1 stage and 1 microbatch"),
        ({"schedule": "zigzag"}, "unknown schedule 'zigzag'"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'"),
        ({"stages": 3}, "3 stages were asked for and there are 2 peers"),
        ({"stages": 0}, "0 stages were asked for"),
    ],
)
def test_plan_refuses(change: dict, reason: str) -> None:
    arguments = {"peers": peers_of(1e9, 1e9), "microbatches": 4} | change
    with pytest.raises(PlanError, match=reason):
        plan(chain([8] * 5), **arguments)


# -- check

GRAPH = chain([16] * 5)  # 9 ops
PEERS = peers_of(1e9, 1e9, 1e9)


def cut_at(*points: int) -> Plan:
    made = plan(GRAPH, PEERS, microbatches=4, stages=3)
    borders = [0, *points, len(GRAPH.ops)]
    stages = (Stage(f"p{i}", a, b, 3 - i) for i, (a, b) in enumerate(pairwise(borders)))
    return replace(made, stages=tuple(stages))


def with_stage(index: int, **change: object) -> Plan:
    made = cut_at(3, 6)
    stages = list(made.stages)
    stages[index] = replace(stages[index], **change)  # type: ignore[arg-type]
    return replace(made, stages=tuple(stages))


def swapped() -> Plan:
    made = cut_at(3, 6)
    return replace(made, stages=(made.stages[1], made.stages[0], made.stages[2]))


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda: replace(cut_at(3, 6), graph_hash="0" * 64), "for another model: its graph is 000000000000"),
        (lambda: replace(cut_at(3, 6), stages=()), "the plan has no stage"),
        (lambda: replace(cut_at(3, 6), microbatches=0), "at least 1 stage and 1 microbatch"),
        (lambda: replace(cut_at(3, 6), schedule="zigzag"), "unknown schedule 'zigzag'"),
        (
            lambda: with_stage(1, peer="mallory"),
            "stage 1 is for peer 'mallory', who is not here; there are p0",
        ),
        (lambda: with_stage(1, peer="p0"), "'p0' has stages 0 and 1"),
        (lambda: with_stage(0, end_op=2), "ops 2 to 2 are in no stage"),
        (lambda: with_stage(2, end_op=8), "ops 8 to 8 are in no stage"),
        (lambda: with_stage(0, first_op=1), "ops 0 to 0 are in no stage"),
        (lambda: with_stage(1, first_op=2), "ops 2 to 2 are in stages 0 and 1"),
        (lambda: with_stage(2, end_op=12), "ends at op 12, and the graph has 9 ops"),
        (lambda: with_stage(1, end_op=3), "stage 1 is empty: it goes from op 3 to op 3"),
        (lambda: with_stage(1, end_op=1), "stage 1 is empty"),
        (lambda: with_stage(0, first_op=-2), "ops -2 to -1 are in stages"),
        (swapped, "ops 0 to 2 are in no stage"),
        (lambda: with_stage(2, first_op=1), "stage 2 begins at op 1, before stage 1: values .* in a cycle"),
        (lambda: with_stage(1, window=0), "stage 1 has window 0"),
        (lambda: with_stage(1, codec_forward="zip"), "no codec is called 'zip'"),
    ],
)
def test_check_refuses(broken: Callable[[], Plan], reason: str) -> None:
    with pytest.raises(PlanError, match=reason) as refused:
        check(broken(), GRAPH, PEERS)
    assert "\n" not in str(refused.value)


def test_check_accepts_any_cut_and_larger_windows() -> None:
    check(cut_at(3, 6), GRAPH, PEERS)
    check(cut_at(1, 2), GRAPH, PEERS)
    check(with_stage(0, window=9), GRAPH, PEERS)


def test_check_refuses_what_does_not_fit() -> None:
    small = [Peer("p0", 1e9, memory_for(RUNTIME_BYTES + 100)), *PEERS[1:]]
    with pytest.raises(PlanError, match=r"stage 0 on p0 needs 0\.40 GiB with 3 live microbatches and may use"):
        check(cut_at(3, 6), GRAPH, small)


def test_ops_that_change_one_buffer_stay_together() -> None:
    graph = chain([16] * 9)
    touching = [5, 9]  # ReLUs that become in-place updates of a counter
    ops = [
        replace(op, target="aten.add_.Tensor", args=(Ref("seen"), *op.args)) if i in touching else op
        for i, op in enumerate(graph.ops)
    ]
    graph = replace(graph, ops=tuple(ops), buffers={"seen": Buffer(floats(4, 16), True, True)})
    peers = peers_of(1e9, 1e9)
    made = plan(graph, peers, microbatches=2)
    check(made, graph, peers)
    assert len(made.stages) == 2 and not 5 < made.stages[1].first_op <= 9
    split = (Stage("p0", 0, 7, 2), Stage("p1", 7, len(graph.ops), 1))
    with pytest.raises(PlanError, match="would both need buffer 'seen'"):
        check(replace(made, stages=split), graph, peers)
