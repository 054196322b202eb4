"""A job becomes what a coordinator needs: the captured model, its data, its weights. I/O (reads what the job names,
writes a real model's weights to the run folder)."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from .base import TensorSpec
from .checkpoint import HF_FOLDER
from .config import FactoryModel, HfModel, JobConfig, load_job
from .data import Source, WeightedSource, open_source
from .disk import disk_errors
from .errors import CheckpointError
from .graph import OpGraph, capture
from .graph.deferred import programs, record
from .graph.weigh import WEIGHT, Places, weighted
from .models import build
from .pretrained import LORA, keep_small_files, load_converted, localize, stored_names
from .runfolder import JOB, refuse_used
from .trained import WEIGHTS, first_weights, read_graph
from .weights import SINGLE, WeightStore, tensor_chunks, write_tensors


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
    """Builds and captures the job's model; weights that are not in a folder of the user's go to the run folder.

    Raises `UserError`; one is that the run folder holds a run, whose weights are left alone.
    """
    folder = run_folder(job)
    refuse_used(folder, job.run.name)
    job = localize(job, folder)
    source = open_source(job)
    work = _open_model(job, source, folder)
    graph, source, note = weigh(work.graph, source, job)
    return replace(work, graph=graph, source=source, notes=(*work.notes, *note))


def graph_of(job: JobConfig) -> OpGraph:
    """The graph that a run of the job would have. Leaves nothing on the disk. Raises `UserError`."""
    with tempfile.TemporaryDirectory(prefix="geotrain-") as folder:
        job = localize(job, Path(folder))
        source = open_source(job)
        _, graph = _captured(job, source)
    graph, _, _ = weigh(graph, source, job)
    return graph


def weigh(graph: OpGraph, source: Source, job: JobConfig) -> tuple[OpGraph, Source, tuple[str, ...]]:
    """Graph and data of a run whose microbatches weigh as much as they hold, if they may differ in that. Also a note
    for the user, if they do and yet weigh the same."""
    if not source.masked:
        return graph, source, ()
    places = Places.of(graph)
    if places is None:
        return graph, source, ("the loss is not one cross-entropy over labels, so all microbatches weigh the same",)
    evaluated = min(job.evaluate.microbatches, source.held_out_microbatches)
    source = WeightedSource(source, places, job.train.microbatches, evaluated)
    return (graph if WEIGHT in graph.inputs else weighted(graph)), source, ()


def _captured(job: JobConfig, source: Source) -> tuple[nn.Module, OpGraph]:
    """The job's model and its graph. The model has weights only if its factory makes real ones."""
    config, inputs = job.model, source.train(0, 0)
    if isinstance(config, FactoryModel) and config.init == "real":
        module = build(config, source.vocab_size)
        return module, capture(module, inputs, autocast=job.train.autocast)
    module = record(lambda: build(config, source.vocab_size))
    return module, capture(module, inputs, autocast=job.train.autocast, init=programs(module))


def _open_model(job: JobConfig, source: Source, folder: Path) -> Work:
    config = job.model
    module, graph = _captured(job, source)
    if isinstance(config, FactoryModel) and config.init == "real":
        return Work(job, graph, source, save_weights(module, graph, folder / WEIGHTS))
    if not isinstance(config, HfModel):
        return Work(job, graph, source, None)
    keep_small_files(Path(config.path), folder / HF_FOLDER)
    if config.fresh:
        return Work(job, graph, source, None)
    weights, notes = _pretrained(config, graph, folder / WEIGHTS)
    return Work(job, graph, source, weights, tuple(notes))


def _pretrained(config: HfModel, graph: OpGraph, folder: Path) -> tuple[WeightStore, list[str]]:
    """A Hugging Face folder's weights under the names, and in the dtypes, of the graph. Where the folder's own differ,
    they are written to `folder`."""
    weights = WeightStore(config.path)
    stored = stored_names(graph, weights.names())
    missing = [name for name in graph.parameters if name not in stored and LORA not in name]
    if missing and len(missing) < len(graph.parameters):
        found = load_converted(config, [*graph.parameters, *graph.buffers])
        if any(name in found for name in missing):
            weights.close()
            save_tensors(found, folder)
            return WeightStore(folder), [f"the weights of {config.path} were converted by transformers"]
    if missing and not stored:
        raise CheckpointError(f"{config.path} has none of this model's parameters; is it another model's?")
    notes = [f"not in {config.path}, so fresh: {', '.join(missing)}"] if missing else []
    entries = {**graph.parameters, **graph.buffers}
    for name, there in stored.items():
        if weights.spec(there).shape != entries[name].spec.shape:
            theirs, ours = weights.spec(there).shape, entries[name].spec.shape
            raise CheckpointError(f"{config.path}: {there} has the shape {theirs}, its config.json makes it {ours}")
    if any(weights.spec(there).dtype != entries[name].spec.dtype for name, there in stored.items()):
        dtypes = {name: entries[name].spec.dtype for name in stored}
        weights = _converted(weights, stored, dtypes, folder)
        notes.append(f"the weights of {config.path} were converted to {config.dtype}; [model] dtype chooses another")
        return weights, notes
    weights.rename(stored)
    return weights, notes


def resume_job(run_dir: Path, job: JobConfig | None = None) -> Work:
    """The work that a run folder holds; `job` instead of the one it keeps, say with more steps.

    Raises `UserError` if there is none, or it is damaged.
    """
    job = job or load_job(run_dir / JOB)
    graph = read_graph(run_dir)
    weights = first_weights(run_dir, job, graph)
    graph, source, _ = weigh(graph, open_source(job), job)
    return Work(job, graph, source, weights)


def save_weights(module: nn.Module, graph: OpGraph, folder: Path) -> WeightStore:
    """Writes a module's parameters and buffers, by the names of its graph, to `folder`. Raises `LocalError`."""
    named: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {name: named[name].detach() for name in (*graph.parameters, *graph.buffers)}
    save_tensors(tensors, folder)
    return WeightStore(folder)


def save_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes tensors to one safetensors file in `folder`. Raises `LocalError` if the disk refuses."""
    specs = {n: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}
    with disk_errors(folder, "the weights"):
        folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / SINGLE, specs, lambda name: tensor_chunks(tensors[name]))


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
