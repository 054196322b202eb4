"""One rank of `torch.distributed.pipelining` over gloo: a process of the benchmark `torch-pipelining`. I/O.

    python -m tests.benchmarks.torch_worker RANK SPEC

SPEC is JSON: job (JSON of a job), weights (folder), split (blocks of each stage), schedule, master, steps. Prints a
line of JSON a step: when it ended (monotonic seconds, one clock for all processes of a machine) and, on the last rank,
its loss.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.nn import functional as F

from geotrain import models, optim
from geotrain.config import parse_job
from geotrain.data import open_source

from .worlds import load_model

PORT = 29500


class Part(torch.nn.Module):
    """The blocks [first, end) of a GPT; the first part embeds, the last gives logits."""

    def __init__(self, whole: models.Gpt, first: int, end: int) -> None:
        super().__init__()
        self.embedding = whole.embedding if first == 0 else None
        self.blocks = whole.blocks[first:end]
        last = end == len(whole.blocks)
        self.norm, self.head = (whole.norm, whole.head) if last else (None, None)
        self.head_size = whole.config.hidden // whole.config.heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = models._rotation(torch.arange(x.shape[1]), self.head_size)
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, turned)
        return x if self.head is None else self.head(self.norm(x))


def main(rank: int, spec: dict) -> None:
    torch.set_num_threads(1)
    job = parse_job(json.dumps(spec["job"]), "the benchmark")
    source, split = open_source(job), spec["split"]
    part = Part(load_model(job, Path(spec["weights"])), sum(split[:rank]), sum(split[: rank + 1]))
    optimizer = optim.build(dict(part.named_parameters()), job.train)
    ranks, count = len(split), job.train.microbatches
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"tcp://{spec['master']}:{PORT}")
    stage = pipelining.PipelineStage(part, rank, ranks, torch.device("cpu"))
    kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[spec["schedule"]]
    schedule = kind(
        stage, n_microbatches=count,
        loss_fn=lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    )  # fmt: skip
    for step in range(spec["steps"]):
        microbatches = [source.train(step, i) for i in range(count)] if rank in (0, ranks - 1) else []
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(torch.cat([m["tokens"] for m in microbatches]))
        elif rank == ranks - 1:
            schedule.step(target=torch.cat([m["labels"] for m in microbatches]), losses=losses)
        else:
            schedule.step()
        optim.set_lr(optimizer, optim.lr_at(step, job.train))
        optimizer.step()
        optimizer.zero_grad()
        loss = float(torch.stack(losses).detach().mean()) if losses else None
        print(json.dumps({"step": step + 1, "at_s": time.monotonic(), "loss": loss}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
