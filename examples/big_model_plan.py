"""Plan and price LoRA fine-tunes of 7 and 70 billion parameters over home GPUs, without owning a GPU or the weights.

    pip install "geotrain[hf]"
    python examples/big_model_plan.py [--short]

Shows: a model captured without memory for its weights; a plan over given machines and lines (which peer runs what,
which link is compressed how hard); seconds a step, bytes over links, days for a data set, and what each peer adds. The
speeds are rough guesses; change `HOMES` to yours.

Most of its time goes into tracing the model. `--short` plans a model of 1 billion, in 3 minutes on 2 busy cores.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from geotrain import planner
from geotrain.base import Link, Peer
from geotrain.blocks import CostModel
from geotrain.codecs.ladder import PRETRAINED_BACKWARD, PRETRAINED_FORWARD
from geotrain.config import parse_job
from geotrain.errors import PlanError
from geotrain.graph import OpGraph, capture, cut
from geotrain.graph.deferred import programs, record
from geotrain.models import build
from geotrain.simulator import simulate
from geotrain.words import duration, size
from geotrain.workload import workload

TERA, MBIT, GIB = 1e12, 125e3, 2**30
CONTEXT, MICROBATCHES, DATA_TOKENS = 512, 32, 10_000_000

LLAMAS = {
    "1B": {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32},
    "7B": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
    "70B": {
        "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}  # fmt: skip

HOMES = {
    "RTX 4090": (55 * TERA, 24, 40, 250),  # FLOP/s, GiB, Mbit/s up, Mbit/s down
    "RTX 3090": (24 * TERA, 24, 40, 250),
    "RTX 4070": (10 * TERA, 12, 20, 100),
    "RTX 3060": (8 * TERA, 12, 20, 100),
}
LATENCY_S = 0.02


def peers(*counts: tuple[str, int]) -> list[Peer]:
    found = []
    for card, count in counts:
        flops, memory, up, down = HOMES[card]
        name = card.lower().replace(" ", "-")
        found += [
            Peer(f"{name}-{i}", flops, int(0.9 * memory * GIB), up * MBIT, down * MBIT) for i in range(1, count + 1)
        ]
    return found


def llama(name: str) -> OpGraph:
    """A Llama of that size with LoRA on a frozen bfloat16 base, one sample a microbatch."""
    import torch

    shape = {**LLAMAS[name], "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        model = {
            "kind": "hf",
            "path": folder,
            "dtype": "bfloat16",
            "context": CONTEXT,
            "fresh": True,
            "lora": {"r": 16},
        }
        job = parse_job(json.dumps({"model": model}), "job")
        module = record(lambda: build(job.model, None))
    tokens = torch.zeros(1, CONTEXT, dtype=torch.int64)
    return capture(module, {"input_ids": tokens, "labels": tokens}, init=programs(module))


def report(name: str, machines: list[Peer]) -> None:
    start = time.monotonic()
    graph = llama(name)
    trained = sum(p.spec.numel for p in graph.parameters.values() if p.requires_grad)
    print(f"\n{name}: {graph.num_parameters / 1e9:.1f} billion parameters, {trained / 1e6:.1f} million of them trained")
    print(f"captured without memory for them in {time.monotonic() - start:.0f} s")
    tokens = CONTEXT * MICROBATCHES
    links = [
        Link(a.name, b.name, min(a.up_bytes_per_s, b.down_bytes_per_s), LATENCY_S)
        for a in machines for b in machines if a != b
    ]  # fmt: skip
    for how, codecs in (
        ("raw", {}),
        ("compressed by the plan", {"forward": PRETRAINED_FORWARD, "backward": PRETRAINED_BACKWARD}),
    ):
        try:
            plan = planner.plan(graph, machines, microbatches=MICROBATCHES, links=links, **codecs)
        except PlanError as error:
            print(f"on {len(machines)} peers: {error}")
            return
        stages = cut(graph, [stage.first_op for stage in plan.stages[1:]])
        step = simulate(workload(plan, stages, CostModel(graph), machines, links))
        crossed, days = sum(load.nbytes for load in step.loads), DATA_TOKENS / tokens * step.step_seconds / 86400
        print(f"{how}: {duration(step.step_seconds)} a step of {tokens:,} tokens over {len(plan.stages)} stages, "
              f"{size(crossed)} over links, {days:.1f} days for {DATA_TOKENS:,} tokens")  # fmt: skip
    for stage in plan.stages:
        ops = stage.end_op - stage.first_op
        print(f"  {stage.peer:<12} {ops:5} ops, sends {stage.codec_forward} on and {stage.codec_backward} back")
    for note in plan.notes:
        print(f"  {note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a model of 1 billion parameters on 3 peers")
    options = parser.parse_args()
    if options.short:
        report("1B", peers(("RTX 4090", 1), ("RTX 3060", 2)))
        return
    report("7B", peers(("RTX 4090", 1), ("RTX 3090", 1), ("RTX 4070", 1), ("RTX 3060", 3)))
    report("70B", peers(("RTX 4090", 4), ("RTX 3090", 8)))


if __name__ == "__main__":
    main()
