"""What splitting costs: steps of 1, 2 and 4 peers over loopback against a plain loop in one process. I/O.

All have one torch thread a process. On N cores a perfect split over K peers takes the plain loop's seconds divided by
the smaller of the two; what is above that is the pipeline's own fill and drain, waiting, and the CPU time that frames,
checks and reports cost. CPU seconds are those of all peers and the coordinator, from one committed step to a later one.
Cores share caches and memory: what that alone costs is seen where each core runs a plain loop.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from geotrain import config, events, loops, optim
from geotrain.coordinator import Coordinator
from geotrain.data import BatchSource
from geotrain.graph import OpGraph, capture
from geotrain.local import LocalPeer, LocalPeers
from geotrain.models import build
from geotrain.weights import WeightStore, save_module

from .tables import Table, alternate, ratio

VOCAB = 512
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """Of one step."""

    seconds: float
    cpu_s: float


def batches(microbatches: int, size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (microbatches * size, 128), generator=generator)
    return [{"tokens": tokens, "labels": tokens.roll(-1, 1)}]


def plain(net: torch.nn.Module, data: BatchSource, train: config.TrainConfig) -> Cost:
    """A step of the plain loop: the medians of all but the first."""
    parameters = dict(net.named_parameters())
    optimizer = optim.build(parameters, train)
    costs: list[Cost] = []
    for step in range(train.steps):
        start, cpu_s = time.perf_counter(), time.process_time()
        for i in range(train.microbatches):
            loss, _ = net(**data.train(step, i))
            (loss / train.microbatches).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        costs.append(Cost(time.perf_counter() - start, time.process_time() - cpu_s))
    return Cost(*(statistics.median(values) for values in zip(*costs[1:], strict=True)))


def plain_on_each_core(net: torch.nn.Module, data: BatchSource, train: config.TrainConfig) -> Cost:
    """A step of one of as many plain loops as there are cores, at the same time."""
    cores = os.cpu_count() or 1
    with ProcessPoolExecutor(cores, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        running = [pool.submit(plain, net, data, train) for _ in range(cores)]
        costs = [one.result() for one in running]
    return Cost(*(statistics.fmean(values) for values in zip(*costs, strict=True)))


def split(graph: OpGraph, data: BatchSource, train: config.TrainConfig, peers: int, weights: Path) -> Cost:
    """A step on peers: the median seconds, and the mean CPU seconds of all processes, of all but the first."""
    job = config.JobConfig(
        train=train,
        pipeline=config.PipelineConfig(peers=peers, stages=peers),
        compression=config.CompressionConfig(max_loss_increase=0),
        checkpoint=config.CheckpointConfig(every=0),
        evaluate=config.EvaluateConfig(every=0, microbatches=0),
    )
    seconds: list[float] = []
    cpu_s: list[float] = []

    async def whole(folder: Path) -> None:
        with LocalPeers([LocalPeer(f"peer{i}", device="cpu") for i in range(peers)], folder / "logs") as processes:

            def committed(event: events.RunEvent) -> None:
                if isinstance(event, events.StepCommitted):
                    seconds.append(event.seconds)
                    used = (process_cpu_s(process.pid) for process in processes.processes.values())
                    cpu_s.append(time.process_time() + sum(used))

            runner = Coordinator(
                job, graph=graph, source=data, run_dir=folder / "run", weights=WeightStore(weights),
                on_event=committed,
            )  # fmt: skip
            processes.give(await runner.start())
            await runner.run()

    with tempfile.TemporaryDirectory() as folder:
        loops.run(asyncio.wait_for(whole(Path(folder)), 600))
    return Cost(statistics.median(seconds[1:]), (cpu_s[-1] - cpu_s[0]) / (len(cpu_s) - 1))


def process_cpu_s(pid: int) -> float:
    """What a process has used until now (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def benchmark(short: bool) -> list[Table]:
    layers, microbatches, steps, rounds = (2, 8, 4, 1) if short else (8, 8, 8, 5)
    torch.manual_seed(0)
    net = build(config.GptModel(layers=layers, hidden=256, heads=4, context=128), VOCAB).train()
    train = config.TrainConfig(steps=steps, microbatches=microbatches, microbatch_size=4)
    data = BatchSource(batches(microbatches, 4), microbatches)
    graph = capture(net, data.train(0, 0))
    with tempfile.TemporaryDirectory() as folder:
        save_module(net, Path(folder) / "weights")

        def on(peers: int):
            return lambda: split(graph, data, train, peers, Path(folder) / "weights")

        runs = {
            "plain loop": lambda: plain(net, data, train),
            "plain loop on each core": lambda: plain_on_each_core(net, data, train),
        }
        runs |= {f"{peers} peer{'s' * (peers > 1)}": on(peers) for peers in (1, 2, 4)}
        costs = alternate(rounds, runs)
    return [_table(costs, microbatches, layers)]


def _table(costs: Mapping[str, list[Cost]], microbatches: int, layers: int) -> Table:
    cores = os.cpu_count() or 1
    alone = costs["plain loop"]
    rows, ratios = [], {}
    for (name, given), peers in zip(costs.items(), (1, 1, 1, 2, 4), strict=True):
        perfect = [cost.seconds / min(peers, cores) for cost in alone]
        cpu = ratio([c.cpu_s for c in given], [c.cpu_s for c in alone])
        rows.append((
            name, statistics.median(c.seconds for c in given), ratio([c.seconds for c in given], perfect),
            (microbatches + peers - 1) / microbatches, statistics.median(c.cpu_s for c in given), cpu,
        ))  # fmt: skip
        if name.endswith(("peer", "peers")):
            ratios[f"CPU seconds of {name} over the plain loop's"] = cpu
    beside = costs["plain loop on each core"]
    note = (
        f"4 peers take {ratio([c.cpu_s for c in costs['4 peers']], [c.cpu_s for c in beside]):.3f} times the CPU "
        "seconds of a plain loop on each core"
    )
    columns = ("run", "step s", "over a perfect split", "of which fill and drain", "CPU s", "CPU over plain")
    title = f"a step of {microbatches} microbatches of 4, GPT of {layers} blocks, loopback, {cores} cores"
    return Table(title, columns, rows, [note], ratios)
