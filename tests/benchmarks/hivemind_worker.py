"""One peer of hivemind's data-parallel optimizer: a process of the benchmark `hivemind`. I/O.

    python -m tests.benchmarks.hivemind_worker RANK SPEC

SPEC is JSON: job (JSON of a job), weights (folder), ip, peers (how many), first (address of the first peer, if this is
another one), delayed, seconds. The first line printed is this peer's address, the second says that it is ready. It
starts with the first line of its standard input; then it prints a line of JSON a microbatch; at the end the held-out
loss. Compression and state averaging are as in hivemind's own example of training ALBERT.
"""

import json
import sys
import time
from pathlib import Path

import hivemind
import torch
from hivemind.compression import Float16Compression

from geotrain import optim
from geotrain.config import parse_job
from geotrain.data import open_source

from .worlds import held_out_loss, load_model


def main(rank: int, spec: dict) -> None:
    torch.set_num_threads(1)
    job = parse_job(json.dumps(spec["job"]), "the benchmark")
    source, model = open_source(job), load_model(job, Path(spec["weights"]))
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{spec['ip']}/tcp/0"], initial_peers=spec["first"], start=True, use_ipfs=False
    )
    print(dht.get_visible_maddrs()[0], flush=True)
    size, count = job.train.microbatch_size, job.train.microbatches
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="benchmark",
        target_batch_size=size * count,
        batch_size_per_step=size,
        params=list(model.parameters()),
        optimizer=lambda parameters: torch.optim.AdamW(
            parameters, lr=job.train.lr, betas=job.train.betas, eps=job.train.eps, weight_decay=job.train.weight_decay
        ),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: optim.lr_at(step, job.train) / job.train.lr
        ),
        delay_grad_averaging=spec["delayed"],
        delay_optimizer_step=spec["delayed"],
        matchmaking_time=3.0,  # its default of 15 s would be much of what is measured
        averaging_timeout=300.0,
        grad_compression=Float16Compression(),
        state_averaging_compression=Float16Compression(),
        average_state_every=5,
        averager_opts={"target_group_size": spec["peers"], "request_timeout": 1.0},
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.5},
    )
    print("ready", flush=True)
    sys.stdin.readline()
    share, start, done = count // spec["peers"], time.monotonic(), 0
    while time.monotonic() - start < spec["seconds"]:
        loss, _ = model(**source.train(done // share, rank * share + done % share))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        line = {
            "at_s": time.monotonic(),
            "epoch": optimizer.local_epoch,
            "samples": done * size,
            "loss": float(loss.detach()),
        }
        print(json.dumps(line), flush=True)
    print(json.dumps({"epoch": optimizer.local_epoch, "held_out": held_out_loss(model, source)}), flush=True)
    sys.stdin.read()  # others may be in the middle of averaging with us


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
