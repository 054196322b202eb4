"""`geotrain demo`: a coordinator and its peers on this machine, on links like those between homes. I/O."""

import time
from importlib.resources import as_file, files
from pathlib import Path

import torch

from . import loops
from .config import parse_job
from .coordinator import Coordinator
from .generate import TextModel
from .jobs import open_job
from .local import LocalPeer, LocalPeers, read_topology, train_with
from .runner import Runner

PROMPT = "The "
SAMPLE_TOKENS = 300

JOB = """
[run]
name = "{name}"
seed = {seed}

[train]
steps = {steps}
microbatches = 6
microbatch_size = 2

[pipeline]
peers = {peers}
stages = {peers}

[evaluate]
microbatches = 6
"""


def demo(
    *, steps: int = 90, peers: int = 4, topology: Path | None = None, seed: int = 0, json_path: Path | None = None
) -> int:
    """Trains the built-in GPT on the text inside Python; returns the exit code.

    Args:
        topology: a TOML file of peers and links, by default the home network that comes with geotrain.

    Raises:
        UserError: more peers than the topology has, or what the run itself raises.
    """
    with as_file(files("peers") / "topologies" / "home.toml") as home:
        path = topology or home
        shape = read_topology(path).take(peers)
        chosen = [
            LocalPeer(name, duty=peer.duty, memory_gib=peer.memory_bytes and peer.memory_bytes / 2**30, device="cpu")
            for name, peer in shape.peers.items()
        ]
        name = f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
        job = parse_job(JOB.format(name=name, seed=seed, steps=steps, peers=peers), "demo")
        run_dir = Path(job.run.dir) / name
        runner = Runner(f"geotrain demo: {peers} peers at home")
        with runner:
            with LocalPeers(chosen, run_dir / "logs", path) as processes:
                runner.say("the model is captured, while the peers start")
                work = open_job(job)
                coordinator = Coordinator(
                    work.job, graph=work.graph, source=work.source, run_dir=run_dir, weights=work.weights,
                    on_event=runner.on_event, topology=shape, wait_s=60.0,
                )  # fmt: skip
                drive = train_with(coordinator, processes, runner.recorder)
                loops.run(runner.train(coordinator, drive))
            sample = None
            if not runner.interrupted:
                runner.say("the trained model writes a few lines")
                sample = _sample(run_dir, seed)
    return runner.finish(run_dir, json_path=json_path, sample=sample)


def _sample(run_dir: Path, seed: int) -> str:
    torch.set_num_threads(1)  # a small model: threads would mostly wait for one another
    model = TextModel(run_dir)
    return PROMPT + "".join(model.sample(PROMPT, tokens=SAMPLE_TOKENS, seed=seed))
