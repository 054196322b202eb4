"""What splitting costs: a step on K peers over loopback against a plain loop in one process.

    python -m tests.benchmarks.overhead [--peers 2] [--microbatches 32] [--steps 6] [--rounds 3] [--json FILE]

The plain loop (one torch thread) is timed before and after each run of the peers (one thread each), and its compute
divided by the number of cores that the peers share is what a perfect split would take. Prints the median step, the
ratio, and where the peers' seconds went.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from geotrain import config, events, optim
from geotrain.coordinator import Coordinator
from geotrain.data import BatchSource
from geotrain.graph import capture
from geotrain.local import LocalPeer, LocalPeers
from geotrain.models import build
from geotrain.weights import WeightStore, save_module


def model(layers: int, hidden: int) -> tuple[torch.nn.Module, config.GptModel]:
    settings = config.GptModel(layers=layers, hidden=hidden, heads=4, context=128)
    torch.manual_seed(0)
    return build(settings, 512).train(), settings


def batches(microbatches: int, size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 512, (microbatches * size, 128), generator=generator)
    return [{"tokens": tokens, "labels": tokens.roll(-1, 1)}]


def plain_step_seconds(net: torch.nn.Module, data: BatchSource, train: config.TrainConfig, steps: int) -> float:
    """Median seconds of a step of the plain loop."""
    parameters = dict(net.named_parameters())
    optimizer = optim.build(parameters, train)
    seconds = []
    for step in range(steps):
        start = time.perf_counter()
        for i in range(train.microbatches):
            loss, _ = net(**data.train(step, i))
            (loss / train.microbatches).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def split_step_seconds(net, data, job, names, folder: Path) -> tuple[float, list[events.StepCommitted]]:
    """Median seconds of a step on peers, and the steps."""
    save_module(net, folder / "weights")
    graph = capture(net, data.train(0, 0))
    seen: list[events.RunEvent] = []

    async def whole() -> None:
        runner = Coordinator(
            job, graph=graph, source=data, run_dir=folder / "run", weights=WeightStore(folder / "weights"),
            on_event=seen.append,
        )  # fmt: skip
        ticket = await runner.start()
        with LocalPeers([LocalPeer(name) for name in names], folder / "logs") as peers:
            peers.give(ticket)
            await runner.run()

    asyncio.run(asyncio.wait_for(whole(), 600))
    steps = [e for e in seen if isinstance(e, events.StepCommitted)]
    return statistics.median(s.seconds for s in steps[1:]), steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("peers", 2), ("microbatches", 32), ("size", 2), ("steps", 6), ("rounds", 3), ("layers", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    torch.set_num_threads(1)
    net, _ = model(a.layers, a.hidden)
    train = config.TrainConfig(steps=a.steps, microbatches=a.microbatches, microbatch_size=a.size)
    job = config.JobConfig(
        train=train,
        pipeline=config.PipelineConfig(peers=a.peers, stages=a.peers),
        checkpoint=config.CheckpointConfig(every=0),
        evaluate=config.EvaluateConfig(every=0),
    )
    data = BatchSource(batches(a.microbatches, a.size), a.microbatches)
    cores = min(a.peers, os.cpu_count() or 1)
    plain, split, ratios = [], [], []
    steps: list[events.StepCommitted] = []
    for _ in range(a.rounds):
        before = plain_step_seconds(net, data, train, 3)
        with tempfile.TemporaryDirectory() as folder:
            seconds, steps = split_step_seconds(net, data, job, [f"peer{i}" for i in range(a.peers)], Path(folder))
        after = plain_step_seconds(net, data, train, 3)
        plain.append((before + after) / 2)
        split.append(seconds)
        ratios.append(seconds / ((before + after) / 2 / cores))
    facts = {
        "plain_step_seconds": statistics.median(plain),
        "split_step_seconds": statistics.median(split),
        "ratio_to_perfect_split": statistics.median(ratios),
        "ratios": ratios,
        "perfect_pipeline_ratio": (a.microbatches + a.peers - 1) / a.microbatches,
    }
    print(json.dumps(facts, indent=2))
    for report in steps[-1].stages:
        spent: dict[str, float] = {}
        for span in report.spans:
            spent[span.activity] = spent.get(span.activity, 0.0) + span.end_s - span.start_s
        print(report.stage, report.peer, {k: round(v, 3) for k, v in spent.items()}, round(report.seconds, 3))
    if a.json:
        a.json.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
