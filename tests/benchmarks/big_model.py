"""Memory of each process while a Llama-shaped model of 1 billion parameters trains on 4 peers. I/O.

The model is captured on the meta device: the coordinator (this process) never holds its weights, and each peer makes
its own. A peer's share is its parameters, gradients and AdamW's two states; the table shows each peer's peak resident
memory beside it, after two steps. Needs about 12 GiB of free memory.
"""

import asyncio
import resource
import tempfile
import time
from pathlib import Path

from geotrain import config, events
from geotrain.coordinator import Coordinator
from geotrain.data import open_source
from geotrain.graph import capture
from geotrain.graph.deferred import programs, record
from geotrain.graph.ir import op_refs
from geotrain.local import LocalPeer, LocalPeers
from geotrain.models import build

from .tables import Cell, Table

GIB = 2**30
BYTES_A_PARAMETER = 4 * 2
"""Weight, gradient and AdamW's two states, each of a bfloat16's size."""


def benchmark(short: bool) -> list[Table]:
    layers, hidden, peers = (4, 256, 2) if short else (18, 2048, 4)
    model = config.GptModel(
        layers=layers, hidden=hidden, heads=hidden // 128, context=128, norm="rms", mlp="swiglu",
        positions="rotary", bias=False, tied=False, dtype="bfloat16",
    )  # fmt: skip
    job = config.JobConfig(
        model=model,
        train=config.TrainConfig(steps=2, microbatches=2, microbatch_size=1),
        pipeline=config.PipelineConfig(peers=peers, stages=peers),
        compression=config.CompressionConfig(max_loss_increase=0),
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
        names = [LocalPeer(f"peer{i}", memory_gib=8.0, device="cpu") for i in range(peers)]
        with LocalPeers(names, folder / "logs") as processes:
            processes.give(ticket)
            await runner.run()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(asyncio.wait_for(whole(Path(folder) / "run"), 1200))
    plan = next(e.plan for e in seen if isinstance(e, events.Planned))
    steps = [e for e in seen if isinstance(e, events.StepCommitted)]
    coordinator = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    rows: list[tuple[Cell, ...]] = [("coordinator", None, None, coordinator, coordinator)]
    for stage, report in zip(plan.stages, steps[-1].stages, strict=True):
        names = {n for op in graph.ops[stage.first_op : stage.end_op] for n in op_refs(op) if n in graph.parameters}
        share = sum(graph.parameters[n].spec.numel for n in names) * BYTES_A_PARAMETER / GIB
        peak = report.memory_bytes / GIB
        rows.append((report.peer, share, stage.memory_bytes / GIB, peak, peak - share))
    return [
        Table(
            f"memory of {graph.num_parameters / 1e9:.2f} billion parameters in bfloat16 on {peers} peers, GiB",
            ("process", "weights, gradients, AdamW", "planned", "peak", "above its share"),
            rows,
            notes=[f"captured in {captured_s:.1f} s; steps of {', '.join(f'{s.seconds:.2f} s' for s in steps)}"],
        )
    ]
