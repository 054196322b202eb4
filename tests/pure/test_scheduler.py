"""What is learned from steps, and when a better plan is believed."""

import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch import nn

from geotrain import config, events, replan
from geotrain.base import CodecUse, LinkUse, Peer, StageReport, Trial
from geotrain.blocks import BlockTime, CostModel
from geotrain.codecs.ladder import extra_steps
from geotrain.graph import capture
from geotrain.scheduler import SENSITIVITY, Scheduler, plan_cost

NAMES = ("anna", "ben", "carl")
FAST, SLOW = 8e6, 0.5e6
ELEMENTS, MICROBATCHES = 256 * 64, 4
NBYTES = 4 * ELEMENTS * MICROBATCHES
"""On each link in a step."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Run:
    """A scheduler whose peers have surveyed their links, a minute ago, and the plan that followed."""

    def __init__(self, frozen=False, flops_per_s=1e10, max_loss_increase=0.0):
        net = Net()
        for layer in net.layers:
            layer.weight.requires_grad_(not frozen)
        job = config.JobConfig(
            train=config.TrainConfig(microbatches=MICROBATCHES),
            pipeline=config.PipelineConfig(stages=2),
            compression=config.CompressionConfig(max_loss_increase=max_loss_increase),
        )
        self.graph = capture(net, {"x": torch.randn(256, 64)})
        self.scheduler = Scheduler(job, self.graph)
        self.known = [(Peer(name, flops_per_s, 1 << 30), "cpu") for name in NAMES]
        for pair in permutations(NAMES, 2):
            self.saw(pair, FAST, at_s=0.0)
        question = self.scheduler.ask(self.known, 60.0)
        self.layout = self.scheduler.lay_out(question, 1)
        self.timeline = self.scheduler.began(self.layout, question, 60.0)
        self.scheduler.prepared(60.5)
        self.pair = self.layout.names
        (self.spare,) = {*NAMES} - {*self.pair}

    def use(self, pair, rate):
        return LinkUse(*pair, NBYTES, NBYTES, NBYTES / rate, None)

    def saw(self, pair, rate, at_s):
        self.scheduler.saw([self.use(pair, rate)], at_s - 1.0, at_s)

    def step(self, at_s, rate, codecs=()):
        """A step in which both peers compute as planned. Returns what deviates."""
        reports = tuple(
            StageReport(
                0,
                i,
                name,
                True,
                {},
                [],
                1.0,
                self.timeline.spans[i],
                (self.use((self.pair[1 - i], name), rate),),
                0,
                codecs,
            )
            for i, name in enumerate(self.pair)
        )
        return self.scheduler.committed(events.StepCommitted(1, 1000, 0.0, (), 1.0, 0, 0.0, 0.1, False, reports), at_s)

    def rested(self, flops_per_s, at_s, rate=None):
        """The spare tells its speed, and what came over a link to it."""
        uses = [] if rate is None else [self.use((self.pair[0], self.spare), rate)]
        self.scheduler.rested(self.spare, flops_per_s, uses, at_s - 1.0, at_s)

    def drop(self):
        """Both ways between the two, from second 61 on; it is noticed in second 64."""
        assert not self.step(61.0, FAST)
        assert [len(self.step(at_s, SLOW)) for at_s in (62.0, 63.0, 64.0)] == [0, 0, 2]

    def better(self, now_s, given=None, has=None, **options):
        question = self.scheduler.ask(self.known, now_s)
        return self.scheduler.better(question, self.layout, 1000, (), given or {}, has or {}, **options)


def test_links_that_nobody_measured_lately_are_tried_before_a_plan_goes_over_them():
    run = Run()
    run.drop()
    run.saw((run.spare, run.pair[0]), FAST, at_s=60.9)  # before anything was wrong
    found = run.better(64.0)
    assert run.spare in found.layout.names
    assert found.doubtful and all(run.spare in pair for pair in found.doubtful)
    for pair in found.doubtful:
        run.saw(pair, FAST, at_s=65.0)
    sure = run.better(65.0)
    assert sure.layout.names == found.layout.names and not sure.doubtful


def test_a_newcomers_links_are_tried_before_a_plan_goes_over_them():
    run = Run(flops_per_s=1e7)
    run.known.append((Peer("dora", 1e8, 1 << 30), "cpu"))
    found = run.better(61.0)
    assert "dora" in found.layout.names and found.doubtful
    assert all("dora" in pair for pair in found.doubtful)
    tests = run.scheduler.tests(found.doubtful)
    assert {test.nbytes for test in tests} == {64 << 10}
    for test in tests:
        use = LinkUse(test.src, test.dst, test.nbytes, test.nbytes, test.nbytes / FAST, None)
        run.scheduler.saw([use], 61.0, 62.0, probe=True)
    sure = run.better(62.0)
    assert "dora" in sure.layout.names and not sure.doubtful


def test_a_newcomer_that_is_not_of_use_yet_is_watched_from_then_on():
    run, asked = Run(flops_per_s=1e7), []
    run.known.append((Peer("dora", 1e6, 1 << 30), "cpu"))
    question = run.scheduler.ask(run.known, 60.5)
    assert "dora" not in run.layout.names
    assert run.scheduler.better(question, run.layout, 1000, ["dora joined"], {}, {}).layout is None
    run.scheduler.stays(question)
    assert not run.step(61.0, FAST)
    for at_s in (62.0, 63.0, 64.0, 65.0):
        run.scheduler.rested("dora", 3e7, (), at_s - 1.0, at_s)
        asked += run.step(at_s, FAST)
    assert [(d.part, d.ratio) for d in asked] == [(("stage", "dora"), pytest.approx(1 / 30))]
    assert "dora" in run.better(65.0).layout.names


def test_a_spare_that_gets_faster_makes_us_ask_and_takes_a_stage():
    run, asked = Run(flops_per_s=1e7), []
    assert not run.step(61.0, FAST)
    for at_s in (62.0, 63.0, 64.0, 65.0):
        run.rested(3e7, at_s)
        asked += run.step(at_s, FAST)
    assert [(d.part, d.ratio) for d in asked] == [(("stage", run.spare), pytest.approx(1 / 3))]
    assert run.spare in run.better(65.0).layout.names


def test_an_idle_link_that_gets_faster_is_tried_again_and_makes_us_ask():
    run, pairs, asked = Run(), [], []
    run.scheduler.saw([LinkUse(*run.pair, 1 << 30, 0, 0.0, None)], 60.0, 61.0)  # a hundredth of it for test frames
    assert not run.step(61.0, FAST)
    for at_s in (70.0, 80.0, 90.0):
        run.rested(0.0, at_s, rate=8 * FAST)
        asked += run.step(at_s, FAST)
        pairs.append([(probe.src, probe.dst) for probe in run.scheduler.probes(NAMES, at_s)][:1])
    assert pairs[:2] == [[(run.pair[0], run.spare)]] * 2 and pairs[2] != pairs[0]
    assert [d.part for d in asked] == [("link", run.pair[0], run.spare)]


def test_an_idle_peer_is_as_fast_as_its_work_was_until_its_tests_change():
    """A test of 2e10 stands for the 1e10 of its work; they are believed in proportion."""
    run = Run()
    run.drop()
    worked, idle = run.pair[0], lambda: {p.name: p.flops_per_s for p in run.scheduler.ask(run.known, 70.0).peers}
    before = idle()[worked]
    for flops_per_s, factor in ((2e10, 1.0), (2e10, 1.0), (1e10, 0.5)):
        run.scheduler.rested(worked, flops_per_s, (), 69.0, 70.0)
        assert idle()[worked] == pytest.approx(factor * before)


def test_what_a_change_costs_is_learnt_from_changes_and_not_from_the_start(monkeypatch):
    run, stalls, decide = Run(), [], replan.decide

    def noted(*plans, stall_s, **rest):
        stalls.append(stall_s)
        return decide(*plans, stall_s=stall_s, **rest)

    monkeypatch.setattr(replan, "decide", noted)
    run.drop()
    found = run.better(64.0)
    question = run.scheduler.ask(run.known, 64.0)
    run.scheduler.began(found.layout, question, 64.0, ())
    run.scheduler.prepared(64.0 + stalls[0] + 2.0)  # two seconds more than thought
    run.scheduler.began(run.layout, question, 70.0)
    run.scheduler.prepared(170.0)  # from the start again: that loads weights
    run.better(170.0)
    assert stalls[1] == pytest.approx(stalls[0] + 2.0)


def test_links_that_turn_out_slow_are_left_out():
    run = Run()
    run.drop()
    first = run.better(64.0)
    for at_s in (65.0, 66.0, 67.0):
        for pair in first.doubtful:
            run.saw(pair, SLOW / 4, at_s)
    second = run.better(67.0)
    assert second.layout is None or {*second.layout.names} != {*first.layout.names}


@pytest.mark.parametrize("arrives", [True, False])
def test_a_test_frame_arrives_or_its_link_is_believed_to_be_slow(arrives):
    run = Run()
    (test,) = run.scheduler.tests([("anna", "ben")])
    assert not run.scheduler.answered([test], 200.0, 201.0)
    if arrives:
        run.saw(("anna", "ben"), FAST, at_s=201.0)
        assert run.scheduler.answered([test], 200.0, 201.0)
    assert run.scheduler.answered([test], 200.0, 208.0)
    rates = {(link.src, link.dst): link.rate_bytes_per_s for link in run.scheduler.ask(run.known, 208.0).links}
    assert rates["anna", "ben"] == pytest.approx(FAST if arrives else test.nbytes / 8.0)


def test_frozen_weights_are_fetched_before_and_only_trained_state_holds_the_run_up(monkeypatch):
    run, prices, decide = Run(frozen=True), [], replan.decide

    def noted(*plans, copy_s, stall_s, **rest):
        prices.append((copy_s, stall_s))
        return decide(*plans, copy_s=copy_s, stall_s=stall_s, **rest)

    monkeypatch.setattr(replan, "decide", noted)
    run.drop()
    given = {name: f"digest of {name}" for name in run.graph.parameters if name.endswith("weight")}
    has = {name: given.values() for name in run.pair}
    found = run.better(64.0, given, has)
    assert found.lacking.keys() == {run.spare} and {*found.lacking[run.spare]} <= given.keys()
    run.better(64.0, given, has, patient=False)
    there = run.better(64.0, given, dict.fromkeys(NAMES, given.values()))
    assert there.layout.names == found.layout.names and not there.lacking
    (copy_s, stall_s), hasty, nothing = prices
    assert copy_s > 0 and nothing == (0.0, stall_s)
    assert hasty[0] == 0 and hasty[1] > stall_s


def test_bytes_of_codecs_are_learned_from_what_they_sent_and_those_of_their_like_follow():
    run = Run(max_loss_increase=0.01)
    before = {rung.codec: rung for rung in run.scheduler.ask(run.known, 60.0).forward}
    run.step(61.0, FAST, (CodecUse("F", "tcu-0025", 2000, 8000, 1080, 1e-6, 3e-6, 2000),))
    question = run.scheduler.ask(run.known, 62.0)
    after = {rung.codec: rung for rung in question.forward}
    assert after["int8"] == before["int8"]
    own, like = after["tcu-0025"], after["tcu-01"]
    assert own.bytes_per_element == pytest.approx(0.54) and own.seen
    assert own.encode_seconds_per_element == pytest.approx(0.5e-9)
    assert own.decode_seconds_per_element == pytest.approx(6e-9)
    assert like.bytes_per_element / before["tcu-01"].bytes_per_element == pytest.approx(0.54 / 0.27) and like.seen
    first, second = run.layout.plan.stages
    plan = replace(run.layout.plan, stages=(replace(first, codec_forward="tcu-01"), second))
    loads = run.scheduler.began(run.scheduler.lay_out(question, 1, plan), question, 62.0).loads
    sent = next(load.nbytes for load in loads if load.src == first.peer)
    assert sent == pytest.approx(like.bytes_per_element * ELEMENTS * MICROBATCHES)


def tried(run, differences, raw=0.5):
    """What comes of a trial of which the stages say this."""
    said = [run.scheduler.tried(Trial(7, i, raw, raw, d, (2.0, 2.1))) for i, d in enumerate(differences)]
    assert said[:-1] == [None] * (len(said) - 1)
    return said[-1]


def lossy_run():
    """Over a link so slow that codecs with loss are used both ways."""
    run = Run(max_loss_increase=0.01, flops_per_s=1e8)
    for pair in permutations(NAMES, 2):
        run.saw(pair, 1e5, at_s=60.0)
    question = run.scheduler.ask(run.known, 61.0)
    run.layout = run.scheduler.lay_out(question, 1)
    run.scheduler.began(run.layout, question, 61.0)
    stages = run.layout.plan.stages
    assert {stages[0].codec_forward, stages[1].codec_backward}.isdisjoint({"identity", "bf16"})
    return run, plan_cost(run.layout.plan, question.forward, question.backward)


def test_a_trial_that_goes_as_expected_changes_nothing():
    run, cost = lossy_run()
    said = tried(run, [cost / SENSITIVITY / 8, cost / SENSITIVITY / 8])
    assert said.cost == pytest.approx(cost / 4) and said.cost < said.budget
    assert run.better(62.0).layout is None


@pytest.mark.parametrize("damage", [1.5, 1e3, math.inf, math.nan])
def test_codecs_that_cost_more_than_the_budget_are_given_up(damage):
    """The guard: damage that cannot be told, as of gradients that are no numbers, is the worst."""
    run, _ = lossy_run()
    said = tried(run, [0.0, damage * extra_steps(0.01) / SENSITIVITY])
    assert said.cost > said.budget and math.isfinite(said.cost)
    found = run.better(62.0)
    assert found.layout is not None and found.reason.startswith("the codecs cost")
    question = run.scheduler.ask(run.known, 62.0)
    after, budget = plan_cost(found.layout.plan, question.forward, question.backward), said.budget
    assert after <= budget < plan_cost(run.layout.plan, question.forward, question.backward)
    if damage != 1.5:
        stages = found.layout.plan.stages
        assert {stages[0].codec_forward, stages[1].codec_backward} <= {"identity", "bf16"}


@pytest.mark.parametrize("raw", [math.inf, math.nan])
def test_gradients_that_are_broken_without_codecs_say_nothing_of_them(raw):
    run, _ = lossy_run()
    assert tried(run, [0.0, math.nan], raw) is None
    assert run.better(62.0).layout is None


def test_shares_of_the_budget_are_told_by_stage_and_direction():
    run, cost = lossy_run()
    question = run.scheduler.ask(run.known, 61.0)
    (forward, none), (nothing, backward) = run.scheduler.budget_shares(question, run.layout.plan)
    assert (none, nothing) == (0.0, 0.0) and forward > 0 and backward > 0
    assert forward + backward == pytest.approx(cost / extra_steps(0.01), rel=0.05) and forward + backward <= 1


def test_peers_are_told_as_fast_as_their_blocks_were():
    """Who plans with the record of a run has no block times, only FLOPs."""
    run = Run()
    peer, kind = run.known[0]
    blocks = run.scheduler.to_measure(peer, kind)
    times = [BlockTime(0.03, 0.03, 0.02, 0) for _ in blocks]
    run.scheduler.measured(peer, kind, peer.flops_per_s, times)
    question, ops = run.scheduler.ask(run.known, 61.0), len(run.graph.ops)
    for one, told in zip(question.peers, question.peers_by_flops(), strict=True):
        measured_s = sum(question.costs.seconds(one, 0, ops))
        assert measured_s > 10 * sum(CostModel(run.graph).seconds(one, 0, ops))
        assert sum(CostModel(run.graph).seconds(told, 0, ops)) == pytest.approx(measured_s)


@pytest.mark.parametrize("seconds", [(0.0, 0.0, 0.0), (1.0, -1.0, 1.0), (float("nan"), 1.0, 1.0)])
def test_times_that_cannot_be_are_not_believed(seconds):
    run = Run()
    peer, kind = run.known[0]
    run.scheduler.measured(
        peer, kind, peer.flops_per_s, [BlockTime(*seconds, 0) for _ in run.scheduler.to_measure(peer, kind)]
    )
    question = run.scheduler.ask(run.known, 61.0)
    assert not question.costs.profiles and question.peers_by_flops() == question.peers
