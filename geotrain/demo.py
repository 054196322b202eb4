"""`geotrain demo`: a coordinator and its peers on this machine, on links like those between homes. I/O."""

import time
from importlib.resources import as_file, files
from pathlib import Path

import torch

from .config import parse_job
from .disk import needs_folder
from .generate import TextModel
from .here import train_here
from .jobs import run_folder

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
    needs_folder(json_path)
    with as_file(files("peers") / "topologies" / "home.toml") as home:
        name = f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
        job = parse_job(JOB.format(name=name, seed=seed, steps=steps, peers=peers), "demo")
        runner, _ = train_here(job, f"geotrain demo: {peers} peers at home", topology or home)
    run_dir = run_folder(job)
    sample = None
    if not runner.interrupted:
        sample = _sample(run_dir, seed)
    return runner.finish(run_dir, json_path=json_path, sample=sample)


def _sample(run_dir: Path, seed: int) -> str:
    torch.set_num_threads(1)  # a small model: threads would mostly wait for one another
    model = TextModel(run_dir)
    return PROMPT + "".join(model.sample(PROMPT, tokens=SAMPLE_TOKENS, seed=seed))
