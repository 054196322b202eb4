"""Models in one line, captured without weights and without data: what plans need before there is a job. I/O.

    transformer:blocks=24,hidden=1024,seq=1024,vocab=32000,microbatch=1     the built-in decoder
    hf:DIR,seq=4096                                                         a Hugging Face folder, or its config.json

Everything is on the meta device: a model of 70 billion parameters takes as little memory as a small one.
"""

import json
import re
from typing import Literal

import torch

from .config import Count, Dtype, GptModel, HfModel, JobConfig, TrainConfig
from .errors import ConfigError
from .graph import OpGraph, capture
from .models import build
from .tables import Section, parse

_HEAD = 64
"""Width of an attention head, where it divides `hidden`: what most decoders have."""


class _Spec(Section):
    seq: Count = 1024
    """Tokens in one sample."""

    microbatch: Count = 1
    """Samples in one microbatch."""

    microbatches: Count = 8
    """Microbatches in one step."""

    dtype: Dtype = "float32"
    optimizer: Literal["adamw", "sgd"] = "adamw"

    @property
    def train(self) -> TrainConfig:
        return TrainConfig(microbatches=self.microbatches, microbatch_size=self.microbatch, optimizer=self.optimizer)


class _Transformer(_Spec):
    """Keys as in [model] kind = "gpt", but for `blocks` (layers) and `seq` (context)."""

    blocks: Count = 12
    hidden: Count = 768
    vocab: Count = 32000
    heads: Count | None = None
    kv_heads: Count | None = None
    mlp_hidden: Count | None = None
    tied: bool = False
    norm: Literal["rms", "layer"] = "rms"
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    positions: Literal["rotary", "learned"] = "rotary"
    bias: bool = False

    @property
    def model(self) -> GptModel:
        heads = self.heads or (self.hidden // _HEAD if self.hidden % _HEAD == 0 else 1)
        keys = ("hidden", "kv_heads", "mlp_hidden", "tied", "norm", "mlp", "positions", "bias", "dtype")
        given = {"layers": self.blocks, "context": self.seq, "heads": heads} | {key: getattr(self, key) for key in keys}
        return parse(GptModel, json.dumps(given), "--graph", None)


class _HuggingFace(_Spec):
    """A causal language model."""


def open_spec(text: str) -> tuple[JobConfig, OpGraph]:
    """The model that a spec names, and a job that trains it. Raises `UserError` if it says nothing that can be built.

    >>> job, graph = open_spec("transformer:blocks=2,hidden=32,seq=16,vocab=100")
    >>> job.model.layers, graph.values["tokens"].spec.shape
    (2, (1, 16))
    """
    kind, _, rest = text.partition(":")
    words = [word for word in rest.split(",") if word]
    match kind:
        case "transformer":
            spec = parse(_Transformer, _values(words), "--graph", None)
            model, vocab, names = spec.model, spec.vocab, ("tokens", "labels")
        case "hf" if words:
            spec = parse(_HuggingFace, _values(words[1:]), "--graph", None)
            model = HfModel(kind="hf", path=words[0], dtype=spec.dtype, context=spec.seq, fresh=True)
            vocab, names = None, ("input_ids", "labels")
        case _:
            raise ConfigError(
                f"--graph: {text!r} is no model; write transformer:blocks=24,hidden=1024 or hf: and a folder"
            )
    with torch.device("meta"):
        module = build(model, vocab)
        tokens = torch.zeros(spec.microbatch, spec.seq, dtype=torch.int64)
    return JobConfig(model=model, train=spec.train), capture(module, dict.fromkeys(names, tokens))


def _values(words: list[str]) -> str:
    """`key=value` words as JSON."""
    pairs = [word.partition("=") for word in words]
    for key, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"--graph: {key!r} has no value; write {key}=VALUE")
    return json.dumps({key.strip(): _value(value.strip()) for key, _, value in pairs})


def _value(word: str) -> int | bool | str:
    return int(word) if re.fullmatch(r"\d+", word) else {"true": True, "false": False}.get(word, word)
