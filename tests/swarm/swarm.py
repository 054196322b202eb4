"""Runs of a tiny model over real processes, and the plain loop that they must equal to the last bit."""

import asyncio
import contextlib
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from geotrain import config, loops, optim, protocol
from geotrain.base import PROTOCOL_VERSION
from geotrain.coordinator import Coordinator
from geotrain.data import BatchSource
from geotrain.graph import capture, seeded
from geotrain.weights import WeightStore, save_module

MICROBATCHES = 4
PEER = """
import sys
from geotrain.config import PeerConfig
from geotrain.errors import GeotrainError
from geotrain.peer import main
name, parent = sys.argv[1], sys.argv[2] == "parent"
try:
    config = PeerConfig(name=name, device="cpu", threads=1, memory_gib=1.0, host="127.0.0.1", cache=f"~/.cache/{name}")
    sys.exit(main(config, sys.argv[3], parent_pipe=parent))
except GeotrainError as error:
    sys.exit(str(error))
"""


class Net(nn.Module):
    """Dropout, a buffer that changes, a skip past the middle, a tied parameter and a frozen one."""

    def __init__(self, width=12):
        super().__init__()
        self.table = nn.Embedding(10, width)
        self.inp = nn.Linear(width, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(width, width)
        self.out.weight = self.inp.weight
        self.layers[2].bias.requires_grad_(False)

    def forward(self, x, y):
        h = first = self.drop(torch.tanh(self.inp(self.table(x))))
        for layer in self.layers:
            h = h + self.drop(torch.tanh(layer(h)))
        return ((self.out(self.norm(h) + first) - y) ** 2).mean()


def batches(count, seed, width=12, rows=2):
    """`rows` of a microbatch."""
    generator = torch.Generator().manual_seed(seed)
    size = rows * MICROBATCHES
    return [
        {
            "x": torch.randint(0, 10, (size,), generator=generator),
            "y": torch.randn(size, width, generator=generator),
        }
        for _ in range(count)
    ]


def net(width=12):
    torch.manual_seed(1)
    return Net(width)


def job(steps=6, peers=2, **sections):
    train = config.TrainConfig(steps=steps, microbatches=MICROBATCHES, lr=0.01, warmup_steps=2)
    return config.JobConfig(
        train=train,
        pipeline=config.PipelineConfig(peers=peers, stages=peers, **sections.pop("pipeline", {})),
        compression=sections.pop("compression", config.CompressionConfig(max_loss_increase=0)),
        **sections,
    )


class Slow(BatchSource):
    """Data that takes its time, so that a run lasts as long as a test wants."""

    seconds = 0.0

    def train(self, step, microbatch):
        time.sleep(self.seconds)
        return super().train(step, microbatch)


def source(seconds=0.0, **size):
    made = Slow(batches(3, seed=2, **size), MICROBATCHES, held_out=batches(1, seed=3, **size))
    made.seconds = seconds
    return made


def coordinator(folder: Path, job, *, seconds=0.0, width=12, rows=2, **options):
    module, data = net(width), source(seconds, width=width, rows=rows)
    if not (folder / "weights").is_dir():
        save_module(module, folder / "weights")
    graph = capture(module, source(width=width, rows=rows).train(0, 0))
    return Coordinator(
        job, graph=graph, source=data, run_dir=folder / "run",
        weights=WeightStore(folder / "weights"), **options,
    )  # fmt: skip


def plain_loop(job, module=None, data=None):
    """(losses, state dict, gradients of the last step) of one process without geotrain."""
    module, data, losses, gradients = module or net(), data or source(), [], {}
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer = optim.build(parameters, job.train)
    for step in range(job.train.steps):
        total = 0.0
        for i in range(MICROBATCHES):
            with seeded(job.run.seed, step, i):
                loss = module(**data.train(step, i))
            (loss / MICROBATCHES).backward()
            total += loss.item()
        losses.append(total / MICROBATCHES)
        nn.utils.clip_grad_norm_(parameters.values(), job.train.clip_norm)
        optim.set_lr(optimizer, optim.lr_at(step, job.train))
        optimizer.step()
        gradients = {name: p.grad.clone() for name, p in parameters.items()}
        optimizer.zero_grad()
    return losses, module.state_dict(), gradients


def assert_equal(result, job):
    losses, state, gradients = plain_loop(job)
    assert result.losses == losses
    ours = result.state_dict()
    assert sorted(ours) == sorted(state)
    assert [name for name in state if not torch.equal(state[name], ours[name])] == []
    return gradients


def start_peer(name, ticket, parent=True):
    """A peer process; its standard output are lines of text."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", PEER, name, "parent" if parent else "alone", str(ticket)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@contextlib.contextmanager
def peers(ticket, names, parent=True):
    started = [start_peer(name, ticket, parent) for name in names]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def train(folder, job, names=("anna", "ben"), during=None, timeout_s=180, parent=True, **options):
    """A whole run; `during(coordinator, peer processes)` is awaited beside it. Returns (result, events, outputs)."""
    seen = []

    async def whole():
        runner = coordinator(folder, job, on_event=seen.append, **options)
        ticket = await runner.start()
        with peers(ticket, names, parent) as processes:
            beside = asyncio.create_task(during(runner, processes, seen)) if during else None
            result = await runner.run()
            if beside is not None:
                await beside
            codes = [await asyncio.to_thread(process.wait, 30) for process in processes]
            outputs = [(code, process.stdout.read()) for code, process in zip(codes, processes, strict=True)]
        return result, outputs

    result, outputs = loops.run(asyncio.wait_for(whole(), timeout_s))
    return result, seen, outputs


async def until(condition, timeout_s=60.0):
    for _ in range(int(timeout_s / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"it did not happen within {timeout_s} s")


def hello(token):
    return protocol.Hello(PROTOCOL_VERSION, "geotrain", token, "anna", 1e9, 1 << 30, 1.0, ":1", "cpu")
