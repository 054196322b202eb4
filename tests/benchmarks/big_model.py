"""Memory of each process while a Llama-shaped model of 1 billion parameters trains on 4 peers.

    python -m tests.benchmarks.big_model [--layers 16] [--hidden 2048] [--dtype bfloat16] [--peers 4] [--json FILE]

The model is captured on the meta device: the coordinator (this process) never holds its weights, and each peer makes
its own. A peer's share is its parameters, gradients and AdamW's two states; the table shows each peer's peak resident
memory beside it, after two steps. Needs about 12 GiB of free memory.
"""

import argparse
import asyncio
import json
import resource
import tempfile
import time
from pathlib import Path

import torch

from geotrain import config, events
from geotrain.coordinator import Coordinator
from geotrain.data import open_source
from geotrain.graph import capture
from geotrain.graph.deferred import programs, record
from geotrain.local import LocalPeer, LocalPeers
from geotrain.models import build

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 18), ("hidden", 2048), ("heads", 16), ("peers", 4), ("context", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    torch.set_num_threads(1)
    model = config.GptModel(
        layers=a.layers, hidden=a.hidden, heads=a.heads, context=a.context, norm="rms", mlp="swiglu",
        positions="rotary", bias=False, tied=False, dtype=a.dtype,
    )  # fmt: skip
    job = config.JobConfig(
        model=model,
        train=config.TrainConfig(steps=2, microbatches=2, microbatch_size=1),
        pipeline=config.PipelineConfig(peers=a.peers, stages=a.peers),
        checkpoint=config.CheckpointConfig(every=0),
        evaluate=config.EvaluateConfig(every=0, microbatches=0),
    )
    source = open_source(job)
    start = time.perf_counter()
    module = record(lambda: build(model, source.vocab_size))
    graph = capture(module, source.train(0, 0), init=programs(module))
    captured_s = time.perf_counter() - start
    seen: list[events.RunEvent] = []

    async def whole(folder: Path) -> None:
        runner = Coordinator(job, graph=graph, source=source, run_dir=folder, on_event=seen.append)
        ticket = await runner.start()
        with LocalPeers([LocalPeer(f"peer{i}", memory_gib=8.0) for i in range(a.peers)], folder / "logs") as peers:
            peers.give(ticket)
            await runner.run()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(asyncio.wait_for(whole(Path(folder) / "run"), 1200))
    plan = next(e.plan for e in seen if isinstance(e, events.Planned))
    steps = [e for e in seen if isinstance(e, events.StepCommitted)]
    item = 2 if a.dtype == "bfloat16" else 4
    rows = []
    for stage, report in zip(plan.stages, steps[-1].stages, strict=True):
        names = {n for op in graph.ops[stage.first_op : stage.end_op] for n in _parameters(op, graph)}
        share = sum(graph.parameters[n].spec.numel for n in names) * item * 4
        rows.append({
            "peer": report.peer, "share_gib": share / GIB, "peak_gib": report.memory_bytes / GIB,
            "above_share_gib": (report.memory_bytes - share) / GIB, "planned_gib": stage.memory_bytes / GIB,
        })  # fmt: skip
    facts = {
        "parameters": graph.num_parameters, "dtype": a.dtype, "capture_seconds": captured_s,
        "coordinator_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
        "step_seconds": [s.seconds for s in steps], "losses": [s.loss for s in steps], "peers": rows,
    }  # fmt: skip
    print(json.dumps(facts, indent=2))
    if a.json:
        a.json.write_text(json.dumps(facts))


def _parameters(op, graph) -> list[str]:
    from geotrain.graph.ir import op_refs

    return [n for n in op_refs(op) if n in graph.parameters]


if __name__ == "__main__":
    main()
