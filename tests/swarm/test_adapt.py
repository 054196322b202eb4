"""The network, a peer or the swarm changes while a run goes on: one other plan each time, and the losses of a plain
loop."""

import asyncio

import pytest
import torch
from torch import nn

from geotrain import config, events, loops
from geotrain.coordinator import Coordinator
from geotrain.data import BatchSource
from geotrain.facts import Recorder
from geotrain.graph import capture
from geotrain.local import LocalPeer, LocalPeers, TopologyFile, train_with
from geotrain.weights import WeightStore, save_module

from . import swarm
from .test_run import audit, of

MICROBATCHES, ROWS, WIDTH = 4, 48, 256
NAMES = ("anna", "ben", "carl")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(self, x, y):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return ((x - y) ** 2).mean()


def net():
    torch.manual_seed(0)
    return Net()


def source():
    generator = torch.Generator().manual_seed(1)
    rows = MICROBATCHES * ROWS
    return BatchSource(
        [{n: torch.randn(rows, WIDTH, generator=generator) for n in ("x", "y")} for _ in range(3)], MICROBATCHES
    )


def network(slow=(), duty=None):
    """TOML: all links have 60 Mbit/s and 2 ms, those in `slow` a tenth of that."""
    lines = []
    for name in NAMES:
        lines.append(f'[[peer]]\nname = "{name}"\nduty = {(duty or {}).get(name, 0.9)}')
    for src in NAMES:
        for dst in NAMES:
            if src != dst:
                rate = 6 if {src, dst} in [set(pair) for pair in slow] else 60
                lines.append(f'[[link]]\nsrc = "{src}"\ndst = "{dst}"\nmbit_per_s = {rate}\nlatency_ms = 2')
    return "\n".join(lines)


def run(folder, steps, during, first=None, late=None):
    """Trains on two of three peers; `during(file, seen)` changes the network (at `first` another than the usual one)
    meanwhile; if it returns true, the run ends there. A peer may be `late`: it joins when 8 steps are done, and is of
    another kind. Returns (result, events)."""
    torch.set_num_threads(1)
    file = folder / "network.toml"
    file.write_text(first or network())
    job = config.JobConfig(
        train=config.TrainConfig(steps=steps, microbatches=MICROBATCHES, lr=1e-3),
        pipeline=config.PipelineConfig(peers=2 if late else 3, stages=2),
        compression=config.CompressionConfig(max_loss_increase=0),
    )
    module, seen, recorder = net(), [], Recorder()
    save_module(module, folder / "weights")

    def on_event(event):
        seen.append(event)
        recorder(event)

    async def whole(coordinator, processes, late_ones):
        ticket = await coordinator.start()

        async def beside():
            await after(seen, 8 if late else 0)
            late_ones.give(ticket)
            if await during(file, seen):
                coordinator.stop()

        changing = asyncio.create_task(beside())
        result = await train_with(coordinator, processes, recorder)(ticket)
        await changing
        return result

    duty = {name: peer.duty for name, peer in TopologyFile(file).topology.peers.items()}
    in_time, late_one = (
        LocalPeers([LocalPeer(n, duty[n], threads=t, device="cpu") for n in names], folder / "logs", file)
        for names, t in (([n for n in NAMES if n != late], 1), ([late] if late else [], 2))
    )
    with in_time as processes, late_one as late_ones:
        coordinator = Coordinator(
            job, graph=capture(module, source().train(0, 0)), source=source(), run_dir=folder / "run",
            weights=WeightStore(folder / "weights"), on_event=on_event, wait_s=120.0,
        )  # fmt: skip
        result = loops.run(asyncio.wait_for(whole(coordinator, processes, late_ones), 200))
    assert result.losses == swarm.plain_loop(job, net(), source())[0][: len(result.losses)]  # whatever happened
    return result, seen


async def until(true, what):
    for _ in range(10_000):
        if true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(what)


async def after(seen, steps):
    await until(lambda: len(of(events.StepCommitted, seen)) >= steps, f"{steps} steps were not made")


def plans(seen):
    return of(events.Planned, seen)


def pair(planned):
    return {stage.peer for stage in planned.plan.stages}


def test_a_link_that_drops_to_a_tenth_is_left_once(tmp_path):
    async def drop(file, seen):
        await after(seen, 12)
        file.write_text(network(slow=[pair(plans(seen)[0])]))

    _, seen = run(tmp_path, 60, drop)
    first, *others = plans(seen)
    assert len(others) == 1 and pair(others[0]) != pair(first)
    assert "slower than planned" in others[0].reason
    seconds = [event.seconds for event in of(events.StepCommitted, seen)]
    before, after_it = sorted(seconds[4:12])[4], sorted(seconds[-12:])[6]
    assert after_it == pytest.approx(before, rel=0.5)  # the other links are as good


def test_links_that_dropped_unseen_are_not_gone_over_to(tmp_path):
    """All links of the peer with most of the state: it can be left for much, or stay; the spare is no better to it."""

    async def drop(file, seen):
        await after(seen, 12)
        slow = max(plans(seen)[0].plan.stages, key=lambda stage: stage.memory_bytes).peer
        file.write_text(network(slow=[(slow, name) for name in NAMES if name != slow]))

    _, seen = run(tmp_path, 40, drop)
    first, *others = plans(seen)
    slow = max(first.plan.stages, key=lambda stage: stage.memory_bytes).peer
    assert len(others) <= 1 and all(slow not in pair(other) for other in others)


def test_a_peer_that_was_too_slow_gets_a_stage_when_it_has_recovered(tmp_path):
    others = {"anna": 0.05, "ben": 0.05}

    async def recover(file, seen):
        await after(seen, 8)
        assert pair(plans(seen)[-1]) == {"anna", "ben"}
        file.write_text(network(duty={**others, "carl": 0.9}))
        await until(lambda: "carl" in pair(plans(seen)[-1]), "carl was left out")
        return True

    run(tmp_path, 400, recover, network(duty={**others, "carl": 0.005}))


def test_a_peer_that_joins_meanwhile_gets_a_stage_when_that_pays(tmp_path):
    async def joins(file, seen):
        await until(lambda: "carl" in pair(plans(seen)[-1]), "carl was left out")
        moved_at = len(of(events.StepCommitted, seen))
        await after(seen, moved_at + 5)
        return True

    _, seen = run(tmp_path, 400, joins, network(duty={"anna": 0.05, "ben": 0.05}), late="carl")
    first, *others = plans(seen)
    assert pair(first) == {"anna", "ben"}
    gets_one = next(planned for planned in others if "carl" in pair(planned))  # so capped, the others' speeds vary
    assert gets_one.reason.startswith("carl joined; ")
    joined, moved = (seen.index(event) for event in (of(events.PeerJoined, seen)[2], gets_one))
    assert of(events.StepCommitted, seen[joined:moved]), "training went on while it was measured"
    steps = [event.step for event in of(events.StepCommitted, seen)]
    assert steps == list(range(1, len(steps) + 1)) and audit(tmp_path)[1] == [], "no step was done twice"


def test_noise_changes_nothing(tmp_path):
    async def jitter(file, seen):
        for i in range(6):
            await after(seen, 6 * i + 6)
            file.write_text(network(duty=dict.fromkeys(NAMES, 0.9 - 0.08 * (i % 2))))

    _, seen = run(tmp_path, 44, jitter)
    assert len(plans(seen)) == 1
