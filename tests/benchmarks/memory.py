"""Memory of a stage: what the planner expects against the peak of a real peer process. I/O.

Four models train a few steps on peer processes as the planner spreads them, and the first one in a fixed plan with and
without recompute. A row is a stage; the last column is estimate over peak.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geotrain import config, events, planner
from geotrain.base import Peer, Plan
from geotrain.coordinator import Coordinator
from geotrain.data import BatchSource
from geotrain.graph import OpGraph, capture
from geotrain.graph.deferred import programs, record
from geotrain.local import LocalPeer, LocalPeers
from geotrain.models import build

from .tables import Cell, Table

MIB = 2**20
MICROBATCHES = 6
VOCAB = 4000


@dataclass(frozen=True)
class Workload:
    """`make` is called where no memory is used; `batch` is one microbatch."""

    make: Callable[[], nn.Module]
    batch: Mapping[str, Tensor]
    peers: int
    recompute: bool | None = None
    """None: as the planner has it. Else all microbatches are live at once, with or without recompute."""


class Classifier(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(images).logits, labels)


def _tokens(samples: int, length: int) -> Tensor:
    return torch.randint(0, VOCAB, (samples, length), generator=torch.Generator().manual_seed(1))


def _gpt(scale: int, dtype: str, batch: int) -> Workload:
    model = config.GptModel(
        layers=4 * scale, hidden=192 * scale, heads=3 * scale, context=128, dropout=0.1, dtype=dtype
    )  # fmt: skip
    tokens = _tokens(batch, 128)
    return Workload(lambda: build(model, VOCAB), {"tokens": tokens, "labels": tokens}, 3)


def _llama(scale: int) -> Workload:
    """A frozen base with adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        num_hidden_layers=4 * scale, hidden_size=256 * scale, num_attention_heads=4 * scale,
        num_key_value_heads=2 * scale, intermediate_size=704 * scale, vocab_size=VOCAB, use_cache=False,
    )  # fmt: skip
    tokens = _tokens(2, 128)
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.05)
    return Workload(
        lambda: get_peft_model(LlamaForCausalLM(shape), adapters), {"input_ids": tokens, "labels": tokens}, 2
    )


def _resnet(scale: int) -> Workload:
    from transformers import ResNetConfig, ResNetForImageClassification

    shape = ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 128 * scale, 256 * scale], depths=[2, 2, 2, 2], layer_type="basic",
        num_labels=10,
    )  # fmt: skip
    images = torch.randn(8 * scale, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    labels = torch.zeros(len(images), dtype=torch.int64)
    return Workload(lambda: Classifier(ResNetForImageClassification(shape)), {"images": images, "labels": labels}, 2)


def workloads(short: bool) -> dict[str, Workload]:
    scale = 1 if short else 2
    gpt = _gpt(scale, "float32", 8)
    return {
        "GPT": gpt,
        "Llama with adapters": _llama(scale),
        "ResNet": _resnet(scale),
        "GPT in bfloat16": _gpt(2 * scale, "bfloat16", 2),
        "GPT, all live": replace(gpt, peers=2, recompute=False),
        "GPT, all live, recomputing": replace(gpt, peers=2, recompute=True),
    }


def _fixed_plan(work: Workload, graph: OpGraph) -> Plan | None:
    if work.recompute is None:
        return None
    made = planner.plan(
        graph,
        [Peer(f"peer{i}", 1e10, 4 << 30) for i in range(work.peers)],
        microbatches=MICROBATCHES,
        stages=work.peers,
    )
    stages = (replace(stage, window=MICROBATCHES, recompute=work.recompute) for stage in made.stages)
    return replace(made, stages=tuple(stages))


@dataclass(frozen=True)
class Measured:
    """`window`: live microbatches. Bytes."""

    peer: str
    window: int
    estimate: int
    peak: int


def run(work: Workload, steps: int = 3) -> list[Measured]:
    """Trains a few steps on peer processes. One row a stage."""
    job = config.JobConfig(
        train=config.TrainConfig(steps=steps, microbatches=MICROBATCHES),
        pipeline=config.PipelineConfig(peers=work.peers, stages=work.peers),
        compression=config.CompressionConfig(max_loss_increase=0),
        checkpoint=config.CheckpointConfig(every=0),
        evaluate=config.EvaluateConfig(every=0, microbatches=0),
    )
    module = record(work.make).train()
    graph = capture(module, work.batch, init=programs(module))
    whole = {name: torch.cat([tensor] * MICROBATCHES) for name, tensor in work.batch.items()}
    source = BatchSource([whole], MICROBATCHES)
    seen: list[events.RunEvent] = []

    async def train(folder: Path) -> None:
        runner = Coordinator(
            job, graph=graph, source=source, run_dir=folder / "run", on_event=seen.append,
            plan=_fixed_plan(work, graph),
        )  # fmt: skip
        ticket = await runner.start()
        peers = [LocalPeer(f"peer{i}", memory_gib=4.0, device="cpu") for i in range(work.peers)]
        with LocalPeers(peers, folder / "logs") as processes:
            processes.give(ticket)
            await runner.run()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(asyncio.wait_for(train(Path(folder)), 600))
    plan = [event.plan for event in seen if isinstance(event, events.Planned)][-1]
    reports = [event for event in seen if isinstance(event, events.StepCommitted)][-1].stages
    return [
        Measured(report.peer, stage.window, stage.memory_bytes, report.memory_bytes)
        for stage, report in zip(plan.stages, reports, strict=True)
    ]


def benchmark(short: bool) -> list[Table]:
    rows: list[tuple[Cell, ...]] = []
    for name, work in workloads(short).items():
        rows += [
            (name, m.peer, m.window, round(m.estimate / MIB), round(m.peak / MIB), m.estimate / m.peak)
            for m in run(work)
        ]
    ratios = [row[-1] for row in rows]
    return [
        Table(
            "memory of stages, MiB",
            ("model", "peer", "live microbatches", "estimate", "peak", "estimate / peak"),
            rows,
            notes=[f"estimate / peak: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"],
        )
    ]
