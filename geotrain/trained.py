"""What a run has made of its model: the newest or best checkpoint, and the weights beneath it that no step changes.
I/O."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from . import models
from .base import TensorSpec
from .checkpoint import HF_FOLDER, Checkpoint, best, latest, verify
from .config import HfModel, JobConfig, load_job
from .disk import disk_errors
from .errors import CheckpointError, UserError
from .graph import OpGraph, from_bytes
from .pretrained import LORA, stored_names
from .runfolder import GRAPH, JOB
from .weights import SINGLE, WeightStore, write_tensors

WEIGHTS = "weights"
"""The folder inside a run folder of the weights that it starts from, where they are in no folder of the user's."""


def read_graph(run_dir: Path) -> OpGraph:
    """The model of a run. Raises `UserError` if there is none, or it is damaged."""
    try:
        graph = from_bytes((run_dir / GRAPH).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{run_dir} holds no run: {error.strerror} ({GRAPH})") from None
    if not isinstance(graph, OpGraph):
        raise CheckpointError(f"{run_dir / GRAPH} is one stage, not a model; restore the run folder")
    return graph


def first_weights(run_dir: Path, job: JobConfig, graph: OpGraph) -> WeightStore | None:
    """What a run starts from, by the graph's names; None: peers make it."""
    if (run_dir / WEIGHTS).is_dir():
        return WeightStore(run_dir / WEIGHTS)
    if not isinstance(job.model, HfModel) or job.model.fresh:
        return None
    weights = WeightStore(job.model.path)
    weights.rename(stored_names(graph, weights.names()))
    return weights


class Trained:
    """A run's parameters and persistent buffers by name. Close it, or use it as a context.

    Raises:
        CheckpointError: the run has no complete checkpoint.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.job = load_job(run_dir / JOB)
        found = (best(run_dir) if self.job.evaluate.keep_best else None) or latest(run_dir)
        if found is None:
            raise CheckpointError(f"{run_dir} has no complete checkpoint; let it train until it writes one")
        self.checkpoint: Checkpoint = found
        graph = read_graph(run_dir)
        self.ties: Mapping[str, str] = graph.ties
        self._base = first_weights(run_dir, self.job, graph)
        self._store_of = {name: found.store for name in found.manifest.state_dict_names}
        if self._base is not None:
            kept = [*graph.parameters, *(n for n, b in graph.buffers.items() if b.persistent)]
            self._store_of |= {n: self._base for n in kept if n not in self._store_of and n in self._base}

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: replace(store.spec(name), stride=None) for name, store in self._store_of.items()}

    def chunks(self, name: str) -> Iterator[tuple[int, bytes]]:
        return self._store_of[name].chunks(name)

    def load(self, name: str) -> Tensor:
        """By its name in the model's state dict. Raises `CheckpointError` if there is none."""
        name = self.ties.get(name, name)
        if name not in self._store_of:
            raise CheckpointError(f"{self.checkpoint.path} and the weights beneath it have no tensor {name!r}")
        return self._store_of[name].load(name)

    def module(self, vocab_size: int | None) -> nn.Module:
        """The job's model with these tensors, in memory, in evaluation mode."""
        module = models.build(self.job.model, vocab_size).eval()
        with torch.no_grad():
            for name, tensor in module.state_dict(keep_vars=True).items():
                stored = self.load(name)
                if stored.shape != tensor.shape:
                    raise CheckpointError(
                        f"{self.checkpoint.path}: {name!r} does not fit the job's model; is it of another job?"
                    )
                tensor.copy_(stored)
        return module

    def close(self) -> None:
        for store in (self.checkpoint.store, self._base):
            if store is not None:
                store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def export(run_dir: Path, out: Path, *, adapter: bool = False) -> Path:
    """Writes a run's model; returns the file of weights.

    A job from Hugging Face gives a folder that `from_pretrained` loads, configuration and tokenizer included. One with
    LoRA gives the model with its adapters merged into it or, with `adapter`, the adapters alone for
    `PeftModel.from_pretrained`. All others give one safetensors file, tied parameters once, as
    `safetensors.torch.save_model` writes them. But for merging, it takes no more memory than one tensor.

    Raises:
        CheckpointError: the run has no complete checkpoint, or its hashes do not match.
        UserError: `adapter`, and the run has none; or there are files in `out`, which are left alone.
    """
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} holds files, maybe another model's; export into a new folder")
    with Trained(run_dir) as trained:
        verify(trained.checkpoint)
        config = trained.job.model
        lora = config.lora if isinstance(config, HfModel) else None
        if adapter and lora is None:
            raise UserError(f"{run_dir} trains no adapter; export it without --adapter")
        with disk_errors(out, "the export"):
            out.mkdir(parents=True, exist_ok=True)
        if adapter:
            return _write_adapter(trained, out)
        if lora is not None:
            merged: Any = trained.module(None)
            merged.merge_and_unload().save_pretrained(out)
        else:
            write_tensors(out / SINGLE, trained.specs, trained.chunks, trained.ties)
    with disk_errors(out, "the export"):
        for source in sorted((run_dir / HF_FOLDER).glob("*")):
            if source.is_file() and source.suffix != ".safetensors" and not source.name.endswith(".index.json"):
                shutil.copyfile(source, out / source.name)
    return out / SINGLE


def _write_adapter(trained: Trained, out: Path) -> Path:
    import peft
    from safetensors.torch import save_file

    with torch.device("meta"):
        module: Any = models.build(trained.job.model, None)
    adapters = {name: trained.load(name) for name in trained.specs if LORA in name}
    settings = module.peft_config["default"]
    settings.base_model_name_or_path, settings.inference_mode = str(trained.job.model.path), True  # type: ignore[union-attr]
    with disk_errors(out, "the export"):
        settings.save_pretrained(out)
        path = out / "adapter_model.safetensors"
        save_file(peft.get_peft_model_state_dict(module, state_dict=adapters), path, metadata={"format": "pt"})
    return path
