"""Whole runs over real processes: equal to a plain loop to the last bit, whoever comes and goes."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from geotrain import channel, config, events, loops
from geotrain.data import BatchSource
from geotrain.errors import UserError
from geotrain.ledger import Ledger

from . import swarm


def of(kind, seen):
    return [event for event in seen if isinstance(event, kind)]


def audit(folder):
    ledger = Ledger(folder / "run" / "ledger.sqlite", "geotrain")
    try:
        return ledger.audit(swarm.MICROBATCHES), ledger.rollbacks()
    finally:
        ledger.close()


@pytest.mark.parametrize(("count", "schedule"), [(2, "1f1b"), (3, "gpipe")])
def test_a_run_equals_a_plain_loop(tmp_path, count, schedule):
    job = swarm.job(peers=count, pipeline={"schedule": schedule}, evaluate=config.EvaluateConfig(every=2))
    names = ["anna", "ben", "carl"][:count]
    result, seen, outputs = swarm.train(tmp_path, job, names, keep_gradients=True)
    gradients = swarm.assert_equal(result, job)
    ours = result.gradients()
    assert sorted(ours) == sorted(gradients)
    assert [name for name in ours if not torch.equal(ours[name], gradients[name])] == []

    assert sorted(result.held_out) == [0, 2, 4, 6]
    assert isinstance(seen[0], events.Waiting) and seen[0].reason.startswith("0 of ")
    (planned,) = of(events.Planned, seen)
    assert len(planned.plan.stages) == count
    committed = of(events.StepCommitted, seen)
    assert [event.step for event in committed] == [1, 2, 3, 4, 5, 6]
    assert all(len(event.stages) == count and event.tokens == 8 for event in committed)
    assert of(events.Ended, seen)[0].reason == "done"
    assert audit(tmp_path)[0].ok
    for (code, out), name in zip(outputs, names, strict=True):
        assert code == 0 and f"{name} has joined geotrain" in out and "the run is over: done" in out
    for file in ("job.json", "graph.msgpack", "plan.json", "events.jsonl"):
        assert (tmp_path / "run" / file).stat().st_size > 0


def test_stopped_and_resumed_on_more_peers(tmp_path):
    job = swarm.job(steps=8, peers=1)

    async def stop(runner, processes, seen):
        await swarm.until(lambda: of(events.StepCommitted, seen))
        runner.stop()

    first, seen, _ = swarm.train(tmp_path, job, ["anna"], during=stop, seconds=0.02)
    assert of(events.Ended, seen)[0].reason == "interrupted" and 1 <= len(first.losses) < 8
    more = job.model_copy(update={"pipeline": config.PipelineConfig(peers=2)})
    result, _, _ = swarm.train(tmp_path, more, ["ben", "carl"], resume=True)
    swarm.assert_equal(result, job)
    assert audit(tmp_path) == (audit(tmp_path)[0], []) and audit(tmp_path)[0].ok


def test_a_killed_peer_costs_time_and_nothing_else(tmp_path):
    job = swarm.job(steps=10, checkpoint=config.CheckpointConfig(every=2))

    async def kill(runner, processes, seen):
        await swarm.until(lambda: len(of(events.StepCommitted, seen)) >= 5)
        processes[1].kill()

    result, seen, _ = swarm.train(tmp_path, job, during=kill, seconds=0.02)
    assert [(gone.name, gone.reason) for gone in of(events.PeerGone, seen)] == [("ben", "its connection ended")]
    swarm.assert_equal(result, job)
    assert len(of(events.Planned, seen)) == 2
    counted, rollbacks = audit(tmp_path)
    assert counted.ok and len(rollbacks) <= 1


def test_a_peer_that_wants_to_leave_hands_over(tmp_path):
    job = swarm.job(steps=10)

    async def interrupt(runner, processes, seen):
        await swarm.until(lambda: len(of(events.StepCommitted, seen)) >= 2)
        swarm_peer = processes[0]
        swarm_peer.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(swarm_peer.wait, 60) == 0

    result, seen, outputs = swarm.train(tmp_path, job, during=interrupt, seconds=0.02, parent=False)
    swarm.assert_equal(result, job)
    assert [(gone.name, gone.reason) for gone in of(events.PeerGone, seen)] == [("anna", "left")]
    assert "leaving when this step is finished" in outputs[0][1] and "handed over" in outputs[0][1]
    assert audit(tmp_path)[1] == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda t: t + 100, "stage 0 on anna failed: IndexError: index out of range in self"),
        (lambda t: t[:1], r"the data cannot be read: input 'x' is int64\[1\], the model was captured with int64\[2\]"),
    ],
)
def test_what_goes_wrong_is_one_line(tmp_path, monkeypatch, change, line):
    def train(self, step, microbatch):
        batch = BatchSource.train(self, step, microbatch)
        return batch if step < 2 else {**batch, "x": change(batch["x"])}

    monkeypatch.setattr(swarm.Slow, "train", train)
    with pytest.raises(UserError, match=line) as error:
        swarm.train(tmp_path, swarm.job(peers=1), ["anna"])
    assert "\n" not in str(error.value)


COORDINATOR = """
import asyncio, sys
from pathlib import Path
from tests.swarm import swarm
async def main():
    runner = swarm.coordinator(Path(sys.argv[1]), swarm.job(steps=10_000), seconds=0.01)
    print(await runner.start(), flush=True)
    await runner.run()
asyncio.run(main())
"""


def test_no_peer_outlives_a_killed_coordinator(tmp_path):
    """Neither one that was started by it, nor a volunteer."""
    process = subprocess.Popen(
        [sys.executable, "-c", COORDINATOR, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=_root()
    )
    try:
        ticket = process.stdout.readline().strip()
        with swarm.peers(ticket, ["anna", "ben"], parent=False) as volunteers:
            ledger = tmp_path / "run" / "ledger.sqlite"
            deadline = time.monotonic() + 60
            while not ledger.is_file() or Ledger(ledger, "geotrain").steps < 2:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.kill()
            for volunteer in volunteers:
                assert volunteer.wait(10) == 1
                last = volunteer.stdout.read().strip().splitlines()[-1]
                assert "stops: the connection to the coordinator was lost" in last
    finally:
        process.kill()
        process.communicate()


def test_a_peer_dies_with_its_parent(tmp_path):
    async def test():
        runner = swarm.coordinator(tmp_path, swarm.job(peers=2))
        ticket = await runner.start()
        running = asyncio.create_task(runner.run())
        with swarm.peers(ticket, ["anna"]) as (peer,):
            await swarm.until(lambda: runner._state.members)
            peer.stdin.close()  # what the kernel does when the parent dies
            assert await asyncio.to_thread(peer.wait, 10) == 1
            await swarm.until(lambda: not runner._state.members)
        runner.stop()
        await running

    loops.run(asyncio.wait_for(test(), 120))


def test_bad_starts_are_one_line(tmp_path):
    async def test():
        runner = swarm.coordinator(tmp_path, swarm.job(peers=2), wait_s=1.0)
        ticket = await runner.start()
        _, port = ticket.addresses[0].split(":")
        second = swarm.coordinator(tmp_path / "other", swarm.job(), port=int(port))
        with pytest.raises(UserError, match="it is in use"):
            await second.start()
        dialled = channel.Dialled(type(ticket)(ticket.addresses, ticket.run, b"x" * 16))
        with pytest.raises(UserError, match="the ticket is not of this run"):
            await dialled.open(swarm.hello(b"x" * 16))
        await dialled.close()
        with pytest.raises(UserError, match="after 1 s 0 of 2 peers have joined; give them the ticket"):
            await runner.run()

    loops.run(asyncio.wait_for(test(), 120))


def test_a_finished_run_is_not_run_again(tmp_path):
    job = swarm.job(steps=2, peers=1)
    result, _, _ = swarm.train(tmp_path, job, ["anna"])
    swarm.assert_equal(result, job)
    with pytest.raises(UserError, match="resume it, or choose another run name"):
        swarm.coordinator(tmp_path, swarm.job(steps=2))
    with pytest.raises(UserError, match="has done all its 2 steps"):
        swarm.coordinator(tmp_path, swarm.job(steps=2), resume=True)


def _root():
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
