"""Prompts that a run continues at its end, through its own pipeline: what goes in, and what comes out. I/O (opens the
model's chat template).

Greedy: the likeliest token each time. A pass through the pipeline is a microbatch, and adds one token to as many texts
as a microbatch has samples; all of a text is read again each time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .config import HfModel, InstructData, JobConfig
from .corpus import ChatStyle, chat_style
from .data import POSITIONS, Inputs, Source, text_names
from .errors import ConfigError, RemoteProtocolError
from .graph import LOGITS, OpGraph

_NEVER = "\0"
"""What no text holds."""


@dataclass(slots=True)
class _Text:
    prompt: str
    seen: list[int]
    given: int
    """So many of `seen` are the prompt."""

    ended: bool = False


class Prompts:
    """What is left to write of a job's `[evaluate] prompts`.

    Raises:
        ConfigError: there are prompts, and the data has no tokenizer or the model gives no logits.
    """

    def __init__(self, job: JobConfig, source: Source, graph: OpGraph) -> None:
        self._texts: list[_Text] = []
        prompts, tokenizer = job.evaluate.prompts, source.tokenizer
        if not prompts:
            return
        if tokenizer is None:
            raise ConfigError("[evaluate] prompts need a job on text; leave them out")
        if LOGITS not in graph.outputs:
            raise ConfigError("[evaluate] prompts need logits; return (loss, {'logits': ...}) from the model's forward")
        self._tokenizer, self._tokens = tokenizer, job.evaluate.tokens
        self._like = source.train(0, 0)
        self._name = text_names(job)[0]
        style, self._end = ChatStyle("{prompt}", ""), _NEVER
        if isinstance(job.data, InstructData):
            folder = Path(job.model.path) if isinstance(job.model, HfModel) else None
            style = chat_style(folder, job.data.template, job.data.end)
            self._end = style.end or _NEVER
        for prompt in prompts:
            seen = [int(token) for token in tokenizer.encode(style.before(prompt))]
            if not seen:
                raise ConfigError("a prompt in [evaluate] prompts is empty; give at least one character")
            self._texts.append(_Text(prompt, seen, len(seen)))

    def batch(self) -> tuple[Inputs, tuple[int, ...]] | None:
        """The next microbatch, and the place in each of its rows whose successor is asked for. None: all is written."""
        rows = self._open()
        if not rows:
            return None
        inputs = {name: tensor.clone() for name, tensor in self._like.items()}
        tokens = inputs[self._name]
        context = tokens.shape[1]
        if POSITIONS in inputs:
            inputs[POSITIONS] = torch.arange(context).expand_as(inputs[POSITIONS]).contiguous()
        places: list[int] = []
        for row, text in enumerate(rows):
            seen = text.seen[-context:]
            tokens[row] = 0
            tokens[row, : len(seen)] = torch.tensor(seen)
            places.append(len(seen) - 1)
        return inputs, tuple(places)

    def add(self, tokens: Sequence[int]) -> None:
        """What the model says to `batch`: a token a row. Raises `RemoteProtocolError` if it is not that."""
        rows = self._open()
        if len(tokens) != len(rows):
            raise RemoteProtocolError(f"a peer continues {len(tokens)} texts instead of {len(rows)}")
        for text, token in zip(rows, tokens, strict=True):
            if 0 <= token < self._tokenizer.vocab_size:
                text.seen.append(token)
                text.ended = len(text.seen) - text.given >= self._tokens or self._end in self._said(text)
            else:
                text.ended = True  # a vocabulary may be rounded up

    def written(self) -> list[tuple[str, str]]:
        """Each prompt, and what follows it so far."""
        return [(text.prompt, self._said(text).partition(self._end)[0]) for text in self._texts]

    def _open(self) -> list[_Text]:
        """The texts of the next microbatch."""
        left = [text for text in self._texts if not text.ended]
        return left[: len(self._like[self._name])] if left else []

    def _said(self, text: _Text) -> str:
        return self._tokenizer.decode(text.seen[text.given :])
