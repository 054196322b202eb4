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
    stored = _stored_names(graph, weights)
    missing = [name for name in graph.parameters if name not in stored]
    if len(missing) == len(graph.parameters):
        raise CheckpointError(f"{config.path} has none of this model's parameters; is it another model's?")
    notes = [f"not in {config.path}, so fresh: {', '.join(missing)}"] if missing else []
    entries = {**graph.parameters, **graph.buffers}
    for name, there in stored.items():
        if weights.spec(there).shape != entries[name].spec.shape:
            theirs, ours = weights.spec(there).shape, entries[name].spec.shape
            raise CheckpointError(f"{config.path}: {there} has the shape {theirs}, its config.json makes it {ours}")
    if any(weights.spec(there).dtype != entries[name].spec.dtype for name, there in stored.items()):
        dtypes = {name: entries[name].spec.dtype for name in stored}
        weights = _converted(weights, stored, dtypes, run_folder(job) / _WEIGHTS)
        notes.append(f"the weights of {config.path} were converted to {config.dtype}; [model] dtype chooses another")
    return Work(job, graph, source, weights, tuple(notes))


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


def _stored_names(graph: OpGraph, weights: WeightStore) -> dict[str, str]:
    """By parameter and buffer, the name that the store has it under: its own, or another name of the same tensor."""
    aliases: dict[str, list[str]] = {}
    for alias, kept in graph.ties.items():
        aliases.setdefault(kept, []).append(alias)
    names = {name: [name, *aliases.get(name, ())] for name in (*graph.parameters, *graph.buffers)}
    return {name: next(n for n in all_names if n in weights) for name, all_names in names.items()
            if any(n in weights for n in all_names)}  # fmt: skip


def _converted(weights: WeightStore, stored: Mapping[str, str], dtypes: Mapping[str, str], folder: Path) -> WeightStore:
    """The weights in other dtypes, written to `folder` tensor by tensor."""
    specs = {name: TensorSpec(weights.spec(there).shape, dtypes[name]) for name, there in stored.items()}
    with disk_errors(folder, "the weights"):
        folder.mkdir(parents=True, exist_ok=True)
    with weights:
        write_tensors(
            folder / SINGLE,
            specs,
            lambda name: tensor_chunks(weights.load(stored[name]).to(getattr(torch, dtypes[name]))),
        )
    return WeightStore(folder)


def _keep_config(source: Path, folder: Path) -> None:
    """Copies a Hugging Face folder's small files, which `geotrain export` puts beside the trained weights."""
    with disk_errors(folder, "the model's configuration"):
        folder.mkdir(parents=True, exist_ok=True)
        files = source.iterdir() if source.is_dir() else [source]
        for file in files:
            if file.suffix in (".json", ".txt", ".model", ".jinja") and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
