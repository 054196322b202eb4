"""Datasets of samples, as the Trainer of Hugging Face takes them, become microbatches; its arguments in our words. I/O
(reads samples when they are asked for).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .corpus import Tokenizer
from .data import Inputs, SampledSource, count_tokens
from .errors import DataError, UserError
from .instruct import IGNORED

Collate = Callable[[list[Any]], Mapping[str, Tensor]]


class Dataset(Protocol):
    """Samples by number, each a mapping of tensors, arrays, lists or numbers."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


class Padded:
    """The default collator: stacks the fields of samples. Fields that differ in length are filled up to the longest of
    the whole dataset: labels with `IGNORED`, all others with zeros, for graphs are static."""

    def __init__(self, *datasets: Dataset) -> None:
        self._longest: dict[str, int] = {}
        for dataset in datasets:
            for i in range(len(dataset)):
                for name, value in _fields(dataset[i]).items():
                    if value.ndim == 1:
                        self._longest[name] = max(self._longest.get(name, 0), len(value))

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        rows = [_fields(sample) for sample in samples]
        return {name: torch.stack([self._filled(name, row[name]) for row in rows]) for name in rows[0]}

    def _filled(self, name: str, value: Tensor) -> Tensor:
        missing = self._longest.get(name, 0) - len(value) if value.ndim == 1 else 0
        if missing <= 0:
            return value
        return torch.cat([value, value.new_full((missing,), IGNORED if name == "labels" else 0)])


class RowSource:
    """Microbatches of samples: dealt without replacement for training, in order for evaluation. Where the last held-out
    microbatch is short, it is filled with samples whose labels count nothing."""

    vocab_size: int | None = None
    tokenizer: Tokenizer | None = None
    masked = True

    def __init__(
        self,
        train: Dataset,
        held_out: Dataset | None,
        collate: Collate | None,
        *,
        seed: int,
        microbatches: int,
        size: int,
    ) -> None:
        if not len(train):
            raise DataError("train_dataset is empty; give at least one sample")
        self._collate = collate or Padded(train, *([] if held_out is None else [held_out]))
        self._held_out, self._size = held_out, size
        self._source = SampledSource(
            _Rows(train, self._collate), seed=seed, microbatches=microbatches, microbatch_size=size
        )
        first = self._source.train(0, 0)
        self.tokens_per_microbatch = count_tokens(first)
        labels = first.get("labels")
        self._can_fill = labels is not None and not labels.is_floating_point()
        count = 0 if held_out is None else len(held_out)
        self.held_out_microbatches = -(-count // size) if self._can_fill else count // size

    def train(self, step: int, microbatch: int) -> Inputs:
        return self._source.train(step, microbatch)

    def held_out(self, index: int) -> Inputs:
        if self._held_out is None:
            raise DataError("there is no eval_dataset to evaluate on; give one")
        places = range(index * self._size, (index + 1) * self._size)
        there = [i for i in places if i < len(self._held_out)]
        batch = dict(
            self._collate([self._held_out[i] for i in there] + [self._held_out[0]] * (self._size - len(there)))
        )
        if len(there) < self._size:
            batch["labels"] = batch["labels"].clone()
            batch["labels"][len(there) :] = IGNORED
        return batch


class _Rows:
    vocab_size: int | None = None
    tokens_per_sample = 1

    def __init__(self, dataset: Dataset, collate: Collate) -> None:
        self._dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: NDArray[np.int64]) -> Inputs:
        return dict(self._collate([self._dataset[int(i)] for i in indices]))


def read_arguments(args: Any, samples: int) -> dict[str, Any]:
    """The keywords of our `Trainer` that a `transformers.TrainingArguments` (or anything with its fields) stands for.

    Raises:
        UserError: it asks for what peers do not do.
    """
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if schedule not in ("constant", "constant_with_warmup", "linear", "cosine"):
        raise UserError(f"lr_scheduler_type {schedule!r} is not known here; use constant, linear or cosine")
    size, microbatches = args.per_device_train_batch_size, args.gradient_accumulation_steps
    steps = args.max_steps
    if steps <= 0:
        steps = math.ceil(args.num_train_epochs * samples / (size * microbatches))
    warmup = args.warmup_steps
    if 0 < warmup < 1:  # newer versions take a share here
        warmup = math.ceil(steps * warmup)
    return {
        "steps": steps, "microbatches": microbatches, "microbatch_size": size, "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon, "weight_decay": args.weight_decay,
        "clip_norm": args.max_grad_norm, "lr_schedule": schedule.removesuffix("_with_warmup"),
        "warmup_steps": int(warmup), "min_lr_fraction": 0.0, "seed": args.seed,
        "autocast": "bfloat16" if args.bf16 else None, "evaluate_every": int(args.eval_steps or 0),
    }  # fmt: skip


def _fields(sample: Any) -> dict[str, Tensor]:
    if not isinstance(sample, Mapping):
        raise DataError(f"a sample is {type(sample).__name__}, not a mapping of fields; or give a data_collator")
    return {str(name): torch.as_tensor(value) for name, value in sample.items()}
