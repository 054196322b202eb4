"""Where a Hugging Face model comes from (a folder, the hub, a GGUF file), and which of its tensors is which. I/O."""

import contextlib
import importlib.util
import io
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from .config import HUB, PACKAGE, HfModel, JobConfig
from .disk import disk_errors
from .errors import ConfigError, UserError
from .graph import OpGraph

MODEL = "model"
"""The folder inside a run folder that a GGUF file becomes."""

_SMALL = ("*.json", "*.txt", "*.model", "*.jinja")

LORA = ".lora_"
"""Is in the name of an adapter's tensor, and of no other."""

_ADAPTED, _BASE = "base_model.model.", ".base_layer"
"""What peft adds to the names of a model's own tensors."""


def localize(job: JobConfig, run_folder: Path) -> JobConfig:
    """The job with its model in a folder on this disk. A GGUF file is unpacked into the run folder; a name on the hub
    is fetched into the hub's own cache. Raises `UserError`."""
    config = job.model
    if not isinstance(config, HfModel):
        return job
    path = Path(config.path)
    if config.path.startswith(HUB):
        path = _from_hub(config.path.removeprefix(HUB), weights=not config.fresh)
    elif config.path.startswith(PACKAGE):
        path = _from_package(config.path.removeprefix(PACKAGE))
    if path.suffix == ".gguf":
        path = _from_gguf(path, config.dtype, run_folder / MODEL)
    return job.model_copy(update={"model": config.model_copy(update={"path": str(path.absolute())})})


def own_name(name: str) -> str:
    """A tensor's name in the model that peft wrapped; others are as they were."""
    return name.removeprefix(_ADAPTED).replace(f"{_BASE}.", ".")


def stored_names(graph: OpGraph, there: Collection[str]) -> dict[str, str]:
    """By parameter and buffer, the name that a folder of weights has it under: its own, or another name of the same
    tensor."""
    aliases: dict[str, list[str]] = {}
    for alias, kept in graph.ties.items():
        aliases.setdefault(kept, []).append(alias)
    found: dict[str, str] = {}
    for name in (*graph.parameters, *graph.buffers):
        names = (name, *aliases.get(name, ()))
        known = next((n for n in (*names, *map(own_name, names)) if n in there), None)
        if known is not None:
            found[name] = known
    return found


def load_converted(config: HfModel, names: Collection[str]) -> Mapping[str, Any]:
    """The tensors that transformers makes of a folder whose names are not the model's own (of `names`)."""
    import transformers

    with _quiet_about(config.path):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            config.path, local_files_only=True, dtype=config.dtype
        )
    state: dict[str, Any] = model.state_dict()
    return {name: state[own_name(name)] for name in names if own_name(name) in state}


def keep_small_files(source: Path, folder: Path) -> None:
    """Copies a Hugging Face folder's configuration and tokenizer, which an export puts beside the trained weights."""
    with disk_errors(folder, "the model's configuration"):
        folder.mkdir(parents=True, exist_ok=True)
        files = source.iterdir() if source.is_dir() else [source]
        for file in files:
            if any(file.match(pattern) for pattern in _SMALL) and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)


def _from_hub(name: str, weights: bool) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise UserError('[model] path: the hub needs transformers; run `pip install "geotrain[hf]"`') from None
    patterns: list[str] = [*_SMALL, "*.safetensors"] if weights else [*_SMALL]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the library raises its own, httpx's and OSError's
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"[model] path: {name} cannot be fetched from the Hugging Face hub: {reason}") from None


def _from_package(path: str) -> Path:
    """A file inside an installed Python package, whose code is not run."""
    package, _, inside = path.partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or spec.origin is None:
        raise ConfigError(f"[model] path: no Python package {package!r} is installed; install it with --no-deps")
    return Path(spec.origin).parent / inside


def _from_gguf(path: Path, dtype: str, folder: Path) -> Path:
    if not path.is_file():
        raise ConfigError(f"[model] path: there is no GGUF file {path}; check the path")
    try:
        import gguf  # noqa: F401
        import transformers
    except ImportError:
        raise UserError('[model] path: GGUF files need transformers; run `pip install "geotrain[hf]"`') from None
    with _quiet_about(str(path)):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model.hf_quantizer = None  # its numbers are plain ones now, and may be saved
        vars(model.config).pop("quantization_config", None)
        with disk_errors(folder, "the model"):
            shutil.rmtree(folder, ignore_errors=True)
            unfinished = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(unfinished, ignore_errors=True)
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            unfinished.rename(folder)
    return folder


@contextlib.contextmanager
def _quiet_about(path: str) -> Iterator[None]:
    """Progress bars and advice are for users of transformers; what it raises becomes one line."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except (OSError, ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"[model] path: transformers cannot load {path}: {' '.join(str(error).split())[:300]}"
        ) from None
    finally:
        logging.set_verbosity(verbosity)
