"""What splitting costs: steps of 1, 2 and 4 peers over loopback against a plain loop in one process. I/O.

All have one torch thread a process. On N cores a perfect split over K peers takes the plain loop's seconds divided by
the smaller of the two; what is above that is the pipeline's own fill and drain, waiting, and the CPU time that frames,
checks and reports cost. CPU seconds are those of all peers and the coordinator, from one committed step to a later one.
Work on several cores takes more CPU seconds than on one, whoever does it. That is seen in one process with as many
torch threads as there are cores, as torch begins one; and where plain loops, each of as much as a peer has, run at the
same time.
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
from geotrain.words import number_of

from .tables import Table, alternate, ratio

VOCAB = 512
PEERS = (1, 2, 4)
CORES = os.cpu_count() or 1
THREADED = "plain loop, a thread a core"
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


def plain_beside(
    net: torch.nn.Module, data: BatchSource, train: config.TrainConfig, loops: int, threads: int = 1
) -> Cost:
    """A step of one of so many plain loops at the same time, a process of so many torch threads each."""
    with ProcessPoolExecutor(loops, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        costs = [one.result() for one in [pool.submit(plain, net, data, train) for _ in range(loops)]]
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
    layers, microbatches, steps, rounds = (4, 8, 4, 1) if short else (8, 8, 16, 5)
    train = config.TrainConfig(steps=steps, microbatches=microbatches, microbatch_size=4)
    data = BatchSource(batches(microbatches, 4), microbatches)
    net, quarter = (_gpt(blocks) for blocks in (layers, layers // 4))
    graph = capture(net, data.train(0, 0))
    with tempfile.TemporaryDirectory() as folder:
        save_module(net, Path(folder) / "weights")

        def on(peers: int):
            return lambda: split(graph, data, train, peers, Path(folder) / "weights")

        runs = {"plain loop": lambda: plain(net, data, train)}
        runs |= {THREADED: lambda: plain_beside(net, data, train, 1, CORES)}
        runs |= {number_of("peer", peers): on(peers) for peers in PEERS}
        runs |= {f"{n} beside": lambda n=n: plain_beside(quarter, data, train, n) for n in (1, 4)}
        costs = alternate(rounds, runs)
    return [_table(costs, microbatches, layers)]


def _gpt(layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return build(config.GptModel(layers=layers, hidden=256, heads=4, context=128), VOCAB).train()


def _table(costs: Mapping[str, list[Cost]], microbatches: int, layers: int) -> Table:
    def cpu(name: str, base: str) -> float:
        return ratio([c.cpu_s for c in costs[name]], [c.cpu_s for c in costs[base]])

    rows, ratios = [], {}
    for name, workers in zip(list(costs)[: 2 + len(PEERS)], (1, CORES, *PEERS), strict=True):
        perfect = [cost.seconds / min(workers, CORES) for cost in costs["plain loop"]]
        given, stages = costs[name], 1 if name.startswith("plain") else workers
        rows.append((
            name, statistics.median(c.seconds for c in given), ratio([c.seconds for c in given], perfect),
            (microbatches + stages - 1) / microbatches, statistics.median(c.cpu_s for c in given),
            cpu(name, "plain loop"), cpu(name, THREADED),
        ))  # fmt: skip
        if not name.startswith("plain"):
            ratios[f"CPU seconds of {name} over the plain loop's"] = cpu(name, "plain loop")
    note = (
        f"4 plain loops of {layers // 4} blocks each, at the same time and without geotrain, take "
        f"{cpu('4 beside', '1 beside'):.3f} times the CPU seconds that each takes alone"
    )
    columns = ("run", "step s", "over a perfect split", "fill and drain", "CPU s", "CPU over plain", "over threaded")
    title = f"a step of {microbatches} microbatches of 4, GPT of {layers} blocks, loopback, {CORES} cores"
    return Table(title, columns, rows, [note], ratios)
