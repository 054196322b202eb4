"""The model of a job: the built-in decoder, one of Hugging Face transformers, or a user's own. I/O (reads a
config or runs a user's file; weights are not read here).

Shapes: B samples of a microbatch, T tokens, C hidden, H heads, K key-value heads, D of one head, V tokens of
the vocabulary.
"""

import fnmatch
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import FactoryModel, GptModel, HfModel, LoraSection, ModelConfig, ModuleModel
from .errors import ConfigError, DataError, UserError
from .graph import LOGITS


def build(config: ModelConfig, vocab_size: int | None) -> nn.Module:
    """The job's model in training mode, on the device in force (`with torch.device("meta")`: no memory).

    Its forward ends in the loss; its inputs are named as `data.open_source(job)` names them. A Hugging Face
    model has random weights even where the folder holds trained ones: those are loaded by name.

    Args:
        vocab_size: the data's; None where the data is not tokens.

    Raises:
        UserError: the folder, file or function is missing or wrong, or does not fit the data.
    """
    model = _build(config, vocab_size)
    _freeze(model, config)
    return model


def _build(config: ModelConfig, vocab_size: int | None) -> nn.Module:
    match config:
        case GptModel():
            if vocab_size is None:
                raise DataError("the built-in GPT reads tokens, not images; set [model] kind to hf or factory")
            with _default_dtype(config.dtype):
                return Gpt(config, vocab_size).train()
        case HfModel():
            with _default_dtype(config.dtype):
                model = _hugging_face(config, vocab_size).train()
            return model if config.lora is None else _with_adapters(model, config.lora)
        case FactoryModel():
            return _from_factory(config).train()
        case ModuleModel():
            raise ConfigError('[model] kind = "module" is of a Python program; run that, or set kind to factory')


@contextmanager
def _default_dtype(name: str) -> Iterator[None]:
    """New parameters get this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Gpt(nn.Module):
    """A pre-norm decoder: GPT-2 (Radford et al. 2019) or, with the options, Llama (Touvron et al. 2023).

    Every module is plain `torch.nn` and every constant is computed in forward, so it can be built on the meta
    device.
    """

    def __init__(self, config: GptModel, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(vocab_size, config.hidden)
        self.positions = nn.Embedding(config.context, config.hidden) if config.positions == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.hidden, vocab_size, bias=False)
        self._initialize()
        if config.tied:
            self.head.weight = self.embedding.weight

    def _initialize(self) -> None:
        """GPT-2's: normal(0, 0.02), and narrower where a branch is added to the residual stream, by the
        square root of the number of such additions."""
        narrow = 0.02 / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=narrow if name.endswith((".out", ".down")) else 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean cross-entropy in nats.

        Args:
            tokens: int64 [B, T].
            labels: int64 [B, T], the token to predict at each place; -100 counts nothing.

        Returns:
            loss [] and {"logits": [B, T, V]}.
        """
        x_BTC = self.embedding(tokens)
        place_T = torch.arange(tokens.shape[1], device=tokens.device)
        rotation = None
        if self.positions is not None:
            x_BTC = x_BTC + self.positions(place_T)
        else:
            rotation = _rotation(place_T, self.config.hidden // self.config.heads)
        x_BTC = self.dropout(x_BTC)
        for block in self.blocks:
            x_BTC = block(x_BTC, rotation)
        logits_BTV = self.head(self.norm(x_BTC))
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), labels.flatten())
        return loss, {LOGITS: logits_BTV}


Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, [T, D/2] each."""


class _Block(nn.Module):
    def __init__(self, config: GptModel) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = _Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = _Mlp(config)

    def forward(self, x_BTC: Tensor, rotation: Rotation | None) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), rotation)
        return x_BTC + self.mlp(self.mlp_norm(x_BTC))


class _Attention(nn.Module):
    def __init__(self, config: GptModel) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_size = config.hidden // config.heads
        self.drop = config.dropout
        width = (self.heads + 2 * self.kv_heads) * self.head_size
        self.qkv = nn.Linear(config.hidden, width, bias=config.bias)
        self.out = nn.Linear(config.hidden, config.hidden, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor, rotation: Rotation | None) -> Tensor:
        B, T, _ = x_BTC.shape
        qkv = self.qkv(x_BTC).view(B, T, -1, self.head_size).transpose(1, 2)
        q_BHTD, k_BKTD, v_BKTD = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if rotation is not None:
            q_BHTD, k_BKTD = _rotate(q_BHTD, rotation), _rotate(k_BKTD, rotation)
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BKTD, v_BKTD,
            dropout_p=self.drop if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )  # fmt: skip
        return self.dropout(self.out(y_BHTD.transpose(1, 2).reshape(B, T, -1)))


class _Mlp(nn.Module):
    def __init__(self, config: GptModel) -> None:
        super().__init__()
        inner = config.mlp_hidden or (8 * config.hidden // 3 if config.mlp == "swiglu" else 4 * config.hidden)
        self.gate = nn.Linear(config.hidden, inner, bias=config.bias) if config.mlp == "swiglu" else None
        self.up = nn.Linear(config.hidden, inner, bias=config.bias)
        self.down = nn.Linear(inner, config.hidden, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        inner = self.up(x_BTC)
        inner = F.gelu(inner) if self.gate is None else F.silu(self.gate(x_BTC)) * inner
        return self.dropout(self.down(inner))


def _norm(config: GptModel) -> nn.Module:
    return nn.RMSNorm(config.hidden, eps=1e-6) if config.norm == "rms" else nn.LayerNorm(config.hidden)


def _rotation(place_T: Tensor, head_size: int) -> Rotation:
    """Rotary positions: place p turns pair i by p / 10000^(2i/D). Su et al. 2021."""
    pair = torch.arange(0, head_size, 2, device=place_T.device)
    angle = place_T[:, None] * torch.pow(10000.0, -pair / head_size)
    return angle.cos(), angle.sin()


def _rotate(x_BHTD: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = (r.to(x_BHTD.dtype) for r in rotation)
    a, b = x_BHTD.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def hf_class(config: HfModel) -> tuple[Any, Any]:
    """The class of a Hugging Face model, and its settings: what its config names, else the causal language model of
    its type. Raises `UserError`."""
    path = Path(config.path)
    if not (path / "config.json" if path.is_dir() else path).is_file():
        raise ConfigError(f"[model] path: there is no config.json at {path}; give a Hugging Face folder on this disk")
    try:
        import transformers
    except ImportError:
        raise UserError('[model] kind = "hf" needs transformers; run `pip install "geotrain[hf]"`') from None
    try:
        settings: Any = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        named: Any = getattr(transformers, (settings.architectures or ["none"])[0], None)
        if not (isinstance(named, type) and "labels" in inspect.signature(named.forward).parameters):
            named = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"[model] path: transformers cannot build {path}: {_one_line(error)}") from None
    settings.use_cache = False
    return named, settings


def takes(config: HfModel, name: str) -> bool:
    """Whether the model's forward has a parameter of that name."""
    return name in inspect.signature(hf_class(config)[0].forward).parameters


def _hugging_face(config: HfModel, vocab_size: int | None) -> nn.Module:
    make, settings = hf_class(config)
    _check_fit(settings, config, vocab_size)
    try:
        return make(settings)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"[model] path: transformers cannot build {config.path}: {_one_line(error)}") from None


def _with_adapters(model: nn.Module, lora: LoraSection) -> nn.Module:
    """The model, frozen, with float32 adapters to train, by peft."""
    try:
        import peft
    except ImportError:
        raise UserError('[model.lora] needs peft; run `pip install "geotrain[hf]"`') from None
    try:
        adapted = peft.get_peft_model(model, lora_settings(lora))  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(f"[model.lora] targets: {_one_line(error)}") from None
    return adapted.train()


def lora_settings(lora: LoraSection) -> Any:
    """What peft calls the section."""
    import peft

    every = lora.targets == ("all-linear",)
    return peft.LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout,  # type: ignore[arg-type]
        target_modules="all-linear" if every else list(lora.targets), task_type="CAUSAL_LM",
    )  # fmt: skip


def _freeze(model: nn.Module, config: ModelConfig) -> None:
    """Parameters whose names match a pattern of `[model] freeze` are not trained."""
    patterns: tuple[str, ...] = getattr(config, "freeze", ())
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matching = fnmatch.filter(named, pattern)
        if not matching:
            raise ConfigError(f"[model] freeze: no parameter matches {pattern!r}; the first is {next(iter(named), '')}")
        for name in matching:
            named[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError("[model] nothing is left to train; freeze less")


def _check_fit(settings: Any, config: HfModel, vocab_size: int | None) -> None:
    text = settings.get_text_config()
    known, places = getattr(text, "vocab_size", None), getattr(text, "max_position_embeddings", None)
    if vocab_size is not None and known is not None and vocab_size > known:
        raise DataError(
            f"the data has {vocab_size} tokens, the model knows {known}; set [data] tokenizer to the model's "
            "tokenizer.json"
        )
    if vocab_size is not None and places is not None and config.context > places:
        raise ConfigError(f"[model] context = {config.context} is more than the model's {places} positions")


def _from_factory(config: FactoryModel) -> nn.Module:
    """Runs the user's function. The folder of the file becomes importable, as for a script."""
    file, _, name = config.factory.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"[model] factory: there is no file {file}; check the path")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"geotrain_factory_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the file ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        make = getattr(module, name, None)
        if not callable(make):
            raise ConfigError(f"[model] factory: {file} has no function {name}; define it")
        model = make()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        what = f"{type(error).__name__}: {_one_line(error)}"
        raise UserError(f"[model] factory: {file}{_line_in(error, path)} raised {what}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"[model] factory: {name}() gave {type(model).__name__}; return an nn.Module")
    return model


def _line_in(error: BaseException, path: Path) -> str:
    """`:12`, where the error passed through the file last."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
    return f":{lines[-1]}" if lines else ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
