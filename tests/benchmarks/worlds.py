"""The networks and jobs that geotrain is compared on with what people use today, and the plain loop. I/O (disk).

Model, first weights, data, optimizer and threads are the same for all who are compared: the job says them.
"""

import statistics
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from geotrain import optim
from geotrain.config import JobConfig, parse_job
from geotrain.data import Source, open_source
from geotrain.graph.deferred import materialize, programs, record
from geotrain.graph.serial import tensor_spec
from geotrain.jobs import save_tensors
from geotrain.models import Gpt, build
from geotrain.weights import WeightStore
from tests.wan import Home

PEERS = ("anna", "ben", "cleo", "dora")
LR_WARMUP_STEPS = 10


@dataclass(frozen=True)
class World:
    """A network of four homes, and the size of the model."""

    title: str
    homes: tuple[Home, ...]
    delay_ms: float = 0.0
    layers: int = 8
    hidden: int = 256

    def job(self, steps: int, evaluate_every: int = 0, *, stages: bool = True) -> str:
        """TOML without the run's section. `stages`: as many as there are peers, as for a model that no peer could hold
        alone; else geotrain chooses their number too."""
        return f"""
[model]
layers = {self.layers}
hidden = {self.hidden}
context = 128

[train]
steps = {steps}
microbatches = 8
microbatch_size = 4
lr = 1e-3
lr_schedule = "constant"
warmup_steps = {LR_WARMUP_STEPS}
clip_norm = 0

[pipeline]
peers = {len(self.homes)}
{f"stages = {len(self.homes)}" if stages else ""}

[evaluate]
every = {evaluate_every}
microbatches = {8 if evaluate_every else 0}
"""

    def config(self, steps: int) -> JobConfig:
        return parse_job(self.job(steps), self.title)


WORLDS = {
    "a": World("unshaped", (Home(),) * 4),
    "b": World("all 100 Mbit/s", (Home(100),) * 4),
    "c": World("10, 50, 100 and 1000 Mbit/s", (Home(10), Home(50), Home(100), Home(1000))),
    "d": World(
        "homes: 10/50, 20/100, 40/100 and 100/100 Mbit/s up/down, 20 ms one way",
        (Home(10, 50), Home(20, 100), Home(40, 100), Home(100)),
        delay_ms=20,
    ),
    "e": World("all 10 Mbit/s, smaller GPT", (Home(10),) * 4, layers=4, hidden=128),
}


def first_weights(job: JobConfig, folder: Path) -> None:
    """Writes the weights that peers make for this job."""
    module = record(lambda: build(job.model, open_source(job).vocab_size))
    made = programs(module)
    named = dict(module.named_parameters())
    save_tensors({n: materialize(made[n], tensor_spec(p), n, job.run.seed) for n, p in named.items()}, folder)


def load_model(job: JobConfig, weights: Path) -> Gpt:
    """The whole model with these weights."""
    model = build(job.model, open_source(job).vocab_size)
    assert isinstance(model, Gpt)
    with WeightStore(weights) as store, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(store.load(name))
    return model


def held_out_loss(model: torch.nn.Module, source: Source, microbatches: int = 8) -> float:
    with torch.no_grad():
        return statistics.fmean(float(model(**source.held_out(i))[0]) for i in range(microbatches))


def plain_loop(
    job: JobConfig, weights: Path, steps: int, evaluate_after: Collection[int]
) -> tuple[list[float], dict[int, float], list[float]]:
    """(training losses, held-out losses by steps done, seconds of the steps) of one process."""
    model, source = load_model(job, weights), open_source(job)
    optimizer = optim.build(dict(model.named_parameters()), job.train)
    losses: list[float] = []
    seconds: list[float] = []
    held_out: dict[int, float] = {}
    for step in range(steps):
        start = time.perf_counter()
        total = 0.0
        for i in range(job.train.microbatches):
            loss, _ = model(**source.train(step, i))
            (loss / job.train.microbatches).backward()
            total += float(loss.detach())
        optim.set_lr(optimizer, optim.lr_at(step, job.train))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / job.train.microbatches)
        seconds.append(time.perf_counter() - start)
        if step + 1 in evaluate_after:
            held_out[step + 1] = held_out_loss(model, source)
    return losses, held_out, seconds
