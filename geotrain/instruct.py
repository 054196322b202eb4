"""Prompts and responses as rows of tokens: only responses are learned, and short samples share a row. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import DataError

IGNORED = -100
"""A label that counts nothing."""

_OPEN_ROWS = 64
"""A sample goes into the first of so many rows that has room."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Tokens of a prompt and of the response to it."""

    prompt: NDArray[Any]
    response: NDArray[Any]


class Exchanges:
    """Rows of `context` tokens, of one or several exchanges each. See `data.Samples`.

    A batch is int64 [B, T] each: tokens, labels (`IGNORED` on prompts, on padding and on the first token of a
    sample, which nothing precedes) and, where `positions` names it, the place of each token in its own sample. With
    `shift`, labels are the tokens that follow; without, the tokens themselves, and the model shifts. What does not fit
    into a row is cut off at its end.

    Raises:
        DataError: nothing is left to learn.
    """

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        context: int,
        vocab_size: int,
        *,
        names: tuple[str, str] = ("tokens", "labels"),
        shift: bool = True,
        positions: str | None = None,
    ) -> None:
        self.vocab_size: int | None = vocab_size
        self.tokens_per_sample = context
        self._context, self._names, self._positions = context, names, positions
        pairs = [_pair(exchange, context, shift) for exchange in exchanges]
        self._pairs = [(tokens, labels) for tokens, labels in pairs if (labels != IGNORED).any()]
        if not self._pairs:
            raise DataError(
                f"no response begins within [model] context = {context} tokens; set it higher, or check the data"
            )
        lengths = [len(tokens) for tokens, _ in self._pairs]
        self._rows = _packed(lengths, context) if positions is not None else [[i] for i in range(len(lengths))]

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        shape = (len(indices), self._context)
        tokens, labels, places = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64), np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            at = 0
            for i in self._rows[int(index)]:
                sample, targets = self._pairs[i]
                end = at + len(sample)
                tokens[row, at:end], labels[row, at:end], places[row, at:end] = sample, targets, np.arange(len(sample))
                at = end
        arrays = {self._names[0]: tokens, self._names[1]: labels}
        if self._positions is not None:
            arrays[self._positions] = places
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _pair(exchange: Exchange, context: int, shift: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    tokens = np.concatenate([exchange.prompt, exchange.response]).astype(np.int64)[: context + shift]
    labels = tokens.copy()
    labels[: max(1, len(exchange.prompt))] = IGNORED
    return (tokens[:-1], labels[1:]) if shift else (tokens, labels)


def _packed(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Rows of samples that fit together: each goes into the first open row with room for it."""
    rows: list[list[int]] = []
    left: list[int] = []
    for i, length in enumerate(lengths):
        first = max(0, len(rows) - _OPEN_ROWS)
        row = next((r for r in range(first, len(rows)) if left[r] >= length), len(rows))
        if row == len(rows):
            rows.append([])
            left.append(room)
        rows[row].append(i)
        left[row] -= length
    return rows
