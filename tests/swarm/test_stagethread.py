"""A stage takes over from another machine: its weights come first, and what the optimizer has kept of them follows
while the first step is computed."""

import concurrent.futures
import queue

import pytest
import torch

from geotrain import layout, protocol
from geotrain.base import COORDINATOR, ONCE, FrameKey, Peer
from geotrain.errors import RemoteProtocolError
from geotrain.graph import capture, from_bytes
from geotrain.optim import PREFIX
from geotrain.stagethread import Machine, StageThread

from . import swarm

MACHINE = Machine(torch.device("cpu"), 1.0, 1)


class Loop:
    """What the thread says; there is nothing to fetch."""

    def __init__(self):
        self.said = queue.Queue()

    def post(self, message):
        if isinstance(message, protocol.Failed):
            raise AssertionError(message.reason)
        self.said.put(message)

    def fetch(self, epoch, into, digests, holders):
        assert not into
        future = concurrent.futures.Future()
        future.set_result(0)
        return future

    def expect(self, kind):
        message = self.said.get(timeout=20)
        assert isinstance(message, kind), message
        return message


def made(job, epoch, source):
    """A stage of the whole model, whose state moves here from `source` (or is here already, which is on anna): its
    names, its thread, and its loop."""
    module = swarm.net()
    graph = capture(module, swarm.source().train(0, 0))
    what = layout.lay_out(job, graph, [Peer("anna", 1e9, 1 << 30)], epoch, None, ())
    state = {name: tensor.detach().clone() for name, tensor in module.state_dict(keep_vars=True).items()}
    stage = from_bytes(what.graphs[0])
    names = [*stage.parameters, *stage.buffers]
    prepare = protocol.Prepare(
        epoch, 0, 0, what.graphs[0], what.actions[0], job.train.model_dump_json(), 7, what.names, {}, (), (),
        tuple(protocol.Move(name, source) for name in names), (), "identity", "identity", (), False,
    )  # fmt: skip
    kept = {name: {name: state[name]} for name in names} if source == "anna" else {}
    loop = Loop()
    thread = StageThread(prepare, stage, job.train, MACHINE, lambda *_: None, loop, kept)
    thread.start()
    return names, thread, loop


def step(thread, loop, number):
    batches = swarm.source()
    for i in range(swarm.MICROBATCHES):
        for name, tensor in batches.train(number, i).items():
            thread.put(FrameKey(thread.epoch, number, i, name, "F"), tensor)
    thread.instruct([protocol.Train(number)])
    loop.expect(protocol.Ready)
    thread.instruct([protocol.Commit(number, 1.0, 0.01, False)])


def give(thread, parts):
    for part, tensor in parts.items():
        thread.put(FrameKey(thread.epoch, 0, ONCE, part, "M"), None if tensor is None else tensor.clone())


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_optimizers_state_follows_and_the_step_is_applied_when_it_is_there(optimizer):
    job = swarm.job(peers=1)
    train = job.train.model_copy(update={"optimizer": optimizer, "momentum": 0.9})
    job = job.model_copy(update={"train": train})
    _, alone, loop = made(job, 1, "anna")
    loop.expect(protocol.Loaded)
    step(alone, loop, 0)
    between = alone.finish()
    weights = {name: held[name].clone() for name, held in between.items()}
    kept = {p: t for held in between.values() for p, t in held.items() if p.startswith(PREFIX)}
    assert any(tensor is not None for tensor in kept.values())

    _, whole, whole_loop = made(job, 2, "ben")
    give(whole, weights)
    whole_loop.expect(protocol.Loaded)
    assert whole.awaits("ben") and not whole.awaits(COORDINATOR)
    step(whole, whole_loop, 1)  # the gradients are there, and are not applied yet
    whole.instruct([protocol.Evaluate(2, 0)])
    for part, tensor in kept.items():
        assert whole.awaits("ben"), f"{part} was not there"
        give(whole, {part: tensor})
    moved = whole.finish()
    assert not whole.awaits("ben")

    _, other, other_loop = made(job, 3, "ben")
    give(other, {**weights, **kept})  # all at once
    other_loop.expect(protocol.Loaded)
    step(other, other_loop, 1)
    at_once = other.finish()
    for name, parts in at_once.items():
        for part, tensor in parts.items():
            assert (tensor is None) == (moved[name][part] is None)
            assert tensor is None or torch.equal(tensor, moved[name][part]), part
    assert any(not torch.equal(at_once[name][name], weights[name]) for name in weights)


def test_a_stage_whose_state_has_not_all_come_does_not_hand_it_on():
    names, thread, loop = made(swarm.job(peers=1), 2, "ben")
    state = swarm.net().state_dict()
    give(thread, {name: state[name] for name in names})
    loop.expect(protocol.Loaded)
    with pytest.raises(RemoteProtocolError, match="asked to move while it works"):
        thread.finish()
