"""A job becomes what a coordinator needs: the captured model, its data, its weights. I/O (reads what the job names,
writes a real model's weights to the run folder)."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from .base import TensorSpec
from .checkpoint import HF_FOLDER
from .config import FactoryModel, HfModel, JobConfig, load_job
from .data import Inputs, Source, open_source
from .disk import disk_errors
from .errors import CheckpointError
from .graph import OpGraph, capture, from_bytes
from .graph.deferred import programs, record
from .models import build
from .runfolder import GRAPH, JOB
from .weights import SINGLE, WeightStore, tensor_chunks, write_tensors

_WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Work:
    """A job, its model and its data. `weights` None: peers make fresh ones. `notes` are worth telling."""

    job: JobConfig
    graph: OpGraph
    source: Source
    weights: WeightStore | None
    notes: tuple[str, ...] = ()


def run_folder(job: JobConfig) -> Path:
    return Path(job.run.dir) / job.run.name


def open_job(job: JobConfig) -> Work:
    """Builds and captures the job's model; a real factory's weights go to the run folder. Raises `UserError`."""
    source = open_source(job)
    config = job.model
    if isinstance(config, FactoryModel) and config.init == "real":
        module = build(config, source.vocab_size)
        graph, weights = capture_module(module, source.train(0, 0), job, run_folder(job) / _WEIGHTS)
        return Work(job, graph, source, weights)
    module = record(lambda: build(config, source.vocab_size))
    graph = capture(module, source.train(0, 0), autocast=job.train.autocast, init=programs(module))
    if not isinstance(config, HfModel):
        return Work(job, graph, source, None)
    _keep_config(Path(config.path), run_folder(job) / HF_FOLDER)
    if config.fresh:
        return Work(job, graph, source, None)
    weights = WeightStore(config.path)
    aliases = {name: [a for a, kept in graph.ties.items() if kept == name] for name in graph.parameters}
    missing = [n for n in graph.parameters if not any(other in weights for other in (n, *aliases[n]))]
    if len(missing) == len(graph.parameters):
        raise CheckpointError(f"{config.path} has none of this model's parameters; is it another model's?")
    notes = (f"not in {config.path}, so fresh: {', '.join(missing)}",) if missing else ()
    return Work(job, graph, source, weights, notes)


def resume_job(run_dir: Path, job: JobConfig | None = None) -> Work:
    """The work that a run folder holds; `job` instead of the one it keeps, say with more steps.

    Raises `UserError` if there is none, or it is damaged.
    """
    job = job or load_job(run_dir / JOB)
    try:
        graph = from_bytes((run_dir / GRAPH).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{run_dir} holds no run to resume: {error.strerror} ({GRAPH})") from None
    if not isinstance(graph, OpGraph):
        raise CheckpointError(f"{run_dir / GRAPH} is one stage, not a model; restore the run folder")
    weights: WeightStore | None = None
    if (run_dir / _WEIGHTS).is_dir():
        weights = WeightStore(run_dir / _WEIGHTS)
    elif isinstance(job.model, HfModel) and not job.model.fresh:
        weights = WeightStore(job.model.path)
    return Work(job, graph, open_source(job), weights)


def capture_module(module: nn.Module, inputs: Inputs, job: JobConfig, folder: Path) -> tuple[OpGraph, WeightStore]:
    """A module with real weights: its graph, and its parameters and buffers, written to `folder`."""
    graph = capture(module, inputs, autocast=job.train.autocast)
    named: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {name: named[name].detach() for name in (*graph.parameters, *graph.buffers)}
    save_tensors(tensors, folder)
    return graph, WeightStore(folder)


def save_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes tensors to one safetensors file in `folder`. Raises `LocalError` if the disk refuses."""
    specs = {n: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}
    with disk_errors(folder, "the weights"):
        folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / SINGLE, specs, lambda name: tensor_chunks(tensors[name]))


def _keep_config(source: Path, folder: Path) -> None:
    """Copies a Hugging Face folder's small files, which `geotrain export` puts beside the trained weights."""
    with disk_errors(folder, "the model's configuration"):
        folder.mkdir(parents=True, exist_ok=True)
        files = source.iterdir() if source.is_dir() else [source]
        for file in files:
            if file.suffix in (".json", ".txt", ".model", ".jinja") and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
