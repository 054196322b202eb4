"""Microbatches by number: what step k, microbatch i is made of. I/O (opens the files that the job names).

Microbatch i of step k depends on (seed, k, i) and on nothing else, so any peer count, any restart and any
replay see the same one. Data is dealt without replacement: sample number n of the run is place n mod N of a
permutation keyed by (seed, n div N), so that every epoch sees every sample once.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import corpus, models
from .config import (
    DataConfig,
    EmbeddedData,
    HfModel,
    ImagesData,
    InstructData,
    JobConfig,
    JsonlData,
    TextData,
    TokensData,
)
from .corpus import Array, Tokenizer
from .errors import DataError
from .graph.weigh import WEIGHT, Places
from .instruct import IGNORED, Exchange, Exchanges

POSITIONS = "position_ids"

Inputs = dict[str, Tensor]
"""One microbatch, by the names of the parameters of the model's forward."""


class Source(Protocol):
    """Where microbatches come from."""

    tokens_per_microbatch: int
    """Tokens, or samples where the data is not tokens: what throughput counts."""

    held_out_microbatches: int
    """How many different ones `held_out` has; 0: none."""

    vocab_size: int | None
    """None where the data is not tokens."""

    tokenizer: Tokenizer | None
    """Turns text into tokens and back; None where the tokens came without one."""

    masked: bool
    """Whether microbatches may hold different numbers of places that the loss counts."""

    def train(self, step: int, microbatch: int) -> Inputs:
        """A pure function of the run's seed, the step and the microbatch, both from 0."""
        ...

    def held_out(self, index: int) -> Inputs:
        """Microbatch `index` of the data that is never trained on; starts over behind the last."""
        ...


def open_source(job: JobConfig) -> Source:
    """The data of a job, read or mapped. Raises `DataError`, one line."""
    data = job.data
    hugging_face = isinstance(job.model, HfModel)
    tokenizer = None
    samples: Samples
    if isinstance(data, ImagesData):
        names = data.names or ("pixel_values" if hugging_face else "images", "labels")
        samples = Images(*corpus.read_images(data.path), names=names)
    else:
        names = text_names(job)
        shift = data.shift if data.shift is not None else not hugging_face
        if isinstance(data, TokensData):
            streams = corpus.read_tokens(data.path, data.dtype)
            samples = Windows(streams, job.model.context, data.vocab, names=names, shift=shift)
        else:
            tokenizer = corpus.open_tokenizer(tokenizer_path(job))
            vocab_size = tokenizer.vocab_size
            if isinstance(data, InstructData):
                exchanges, context = _exchanges(job, data, tokenizer), job.model.context
                pack = data.pack and isinstance(job.model, HfModel) and models.takes(job.model, POSITIONS)
                samples = Exchanges(
                    exchanges, context, vocab_size, names=names, shift=shift, positions=POSITIONS if pack else None
                )
            else:
                text = [tokenizer.encode(_text(data))]
                samples = Windows(text, job.model.context, vocab_size, names=names, shift=shift)
    source = SampledSource(
        samples,
        seed=job.run.seed,
        microbatches=job.train.microbatches,
        microbatch_size=job.train.microbatch_size,
        held_out=data.held_out,
        tokenizer=tokenizer,
    )
    source.train(0, 0)  # what does not fit shows before peers are asked for
    return source


def text_names(job: JobConfig) -> tuple[str, str]:
    """What the model calls tokens and labels."""
    return job.data.names or ("input_ids" if isinstance(job.model, HfModel) else "tokens", "labels")


def tokenizer_path(job: JobConfig) -> str | None:
    """The tokenizer file of a job on text; None: a token is a byte."""
    chosen: str | None = getattr(job.data, "tokenizer", None)
    if chosen is None and isinstance(job.model, HfModel):
        file = Path(job.model.path) / "tokenizer.json"
        return str(file) if file.is_file() else None
    return chosen


def _exchanges(job: JobConfig, data: InstructData, tokenizer: Tokenizer) -> list[Exchange]:
    folder = Path(job.model.path) if isinstance(job.model, HfModel) else None
    style = corpus.chat_style(folder, data.template, data.end)
    records = corpus.read_records(data.path, [data.prompt, data.response])
    pairs = [(style.before(prompt), style.after(prompt, response)) for prompt, response in records]
    return [Exchange(tokenizer.encode(before), tokenizer.encode(after)) for before, after in pairs]


def _text(data: DataConfig) -> str:
    match data:
        case EmbeddedData():
            return corpus.embedded_text()
        case TextData():
            texts = corpus.read_texts(data.path)
        case JsonlData():
            texts = [text for (text,) in corpus.read_records(data.path, [data.field])]
        case _:
            raise DataError(f"data of kind {data.kind!r} is no text")
    if not any(text.strip() for text in texts):
        raise DataError(f"{', '.join(data.path)}: the text is empty; give a file with some")
    return data.separator.join(texts)


class Samples(Protocol):
    """Samples by index."""

    vocab_size: int | None
    tokens_per_sample: int

    def __len__(self) -> int: ...

    def batch(self, indices: NDArray[np.int64]) -> Inputs: ...


class Windows:
    """Stretches of `context` tokens that do not overlap, from one or several streams of tokens.

    A batch is two int64 tensors [B, T]. With `shift`, labels are the tokens that follow, and a window takes
    one token more from its stream; without, labels are the tokens themselves and the model shifts.
    """

    def __init__(
        self,
        streams: Sequence[Array],
        context: int,
        vocab_size: int,
        *,
        names: tuple[str, str] = ("tokens", "labels"),
        shift: bool = True,
    ) -> None:
        self.vocab_size: int | None = vocab_size
        self.tokens_per_sample = context
        self._streams, self._limit, self._names, self._shift = streams, vocab_size, names, shift
        self._size = context + shift
        self._ends = np.cumsum([len(s) // self._size for s in streams])
        if not len(self):
            longest = max(len(s) for s in streams)
            raise DataError(
                f"the data has {longest} tokens and one sample takes {self._size}; give more data, or set "
                "[model] context lower"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, indices: NDArray[np.int64]) -> Inputs:
        windows = torch.from_numpy(np.stack([self._window(int(i)) for i in indices]))
        if not self._shift:
            return dict(zip(self._names, (windows, windows.clone()), strict=True))
        return dict(zip(self._names, (windows[:, :-1].contiguous(), windows[:, 1:].contiguous()), strict=True))

    def _window(self, index: int) -> NDArray[np.int64]:
        stream = int(np.searchsorted(self._ends, index, side="right"))
        first = (index - (int(self._ends[stream - 1]) if stream else 0)) * self._size
        window = self._streams[stream][first : first + self._size].astype(np.int64)
        if window.max() >= self._limit:
            raise DataError(
                f"token {window.max()} is outside of a vocabulary of {self._limit}; set [data] vocab (and dtype) "
                "to what the file was made with"
            )
        return window


class Images:
    """Pairs of an image and a label. A batch is float32 [B, ...], uint8 scaled to 0..1, and labels [B], int64
    where they are whole numbers, else float32."""

    vocab_size: int | None = None
    tokens_per_sample = 1

    def __init__(self, images: Array, labels: Array, *, names: tuple[str, str] = ("images", "labels")) -> None:
        self._images, self._labels, self._names = images, labels, names
        if not len(images):
            raise DataError("the data has no images; check [data] path")

    def __len__(self) -> int:
        return len(self._images)

    def batch(self, indices: NDArray[np.int64]) -> Inputs:
        images = torch.from_numpy(self._images[indices].astype(np.float32))
        if self._images.dtype == np.uint8:
            images /= 255
        whole = self._labels.dtype.kind in "ui"
        labels = torch.from_numpy(self._labels[indices].astype(np.int64 if whole else np.float32))
        return dict(zip(self._names, (images, labels), strict=True))


class SampledSource:
    """Deals samples to microbatches.

    The held-out samples are the first `held_out` share of a permutation that is the same for every seed, so
    that runs compare; the others are dealt by the epoch's own permutation.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        seed: int,
        microbatches: int,
        microbatch_size: int,
        held_out: float = 0.0,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.masked = isinstance(samples, Exchanges)
        self.vocab_size = samples.vocab_size
        self.tokens_per_microbatch = samples.tokens_per_sample * microbatch_size
        self._samples, self._seed = samples, seed
        self._microbatches, self._size = microbatches, microbatch_size
        self._held_out = max(1, round(len(samples) * held_out)) if held_out else 0
        self._trained = len(samples) - self._held_out
        self.held_out_microbatches = -(-self._held_out // microbatch_size)
        if self._trained < 1:
            raise DataError(
                f"the data has {len(samples)} sample, too few to hold one out; give more data, or set "
                "[data] held_out = 0"
            )

    def train(self, step: int, microbatch: int) -> Inputs:
        first = (step * self._microbatches + microbatch) * self._size
        return self._samples.batch(self.trained_samples(first, self._size))

    def held_out(self, index: int) -> Inputs:
        if not self._held_out:
            raise DataError("no data is held out; set [data] held_out above 0, or [evaluate] microbatches = 0")
        places = np.arange(index * self._size, (index + 1) * self._size) % self._held_out
        return self._samples.batch(self._split(places))

    def trained_samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Which samples number `first` and the `count - 1` after it, counted over the whole run, are."""
        epochs, places = np.divmod(np.arange(first, first + count), self._trained)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            places[here] = permute(places[here], self._trained, (self._seed, int(epoch) + 1))
        return self._split(places + self._held_out)

    def _split(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return permute(places, len(self._samples), (0, 0))


def permute(places: NDArray[np.int64], size: int, key: tuple[int, ...]) -> NDArray[np.int64]:
    """A permutation of `range(size)` chosen by `key`, at some places, without memory for the rest.

    A Feistel network over the next power of four, walked until it comes back below `size` (Black and Rogaway
    2002, "Ciphers with arbitrary finite domains").
    """
    bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(bits)) - 1)
    round_keys = np.random.SeedSequence(key).generate_state(6, np.uint64)
    found = places.astype(np.uint64)
    outside = np.ones(len(found), bool)
    while outside.any():
        left, right = found[outside] >> bits, found[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        found[outside] = (left << bits) | right
        outside = found >= size
    return found.astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele et al. 2014): every bit of the input moves half of the output's."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


Batch = Mapping[str, Tensor] | Sequence[Tensor] | Tensor
"""One step's tensors: by name, or in the order of the model's forward."""


class BatchSource:
    """Batches in memory: step k trains on `batches[k % len(batches)]`, cut along the first dimension into
    equal microbatches.

    Args:
        batches: all of the same shapes, for the graph is static.
        microbatches: microbatches in a step; divides the first dimension.
        names: names of the tensors where batches are not mappings.
        held_out: further batches, to evaluate on.

    Raises:
        DataError: no batch, unequal ones, or one that cannot be cut.
    """

    vocab_size: int | None = None
    tokenizer: Tokenizer | None = None

    def __init__(
        self,
        batches: Sequence[Batch],
        microbatches: int,
        names: Sequence[str] = (),
        held_out: Sequence[Batch] = (),
    ) -> None:
        if not len(batches):
            raise DataError("there are no batches; give at least one")
        self._batches = [_by_name(batch, names) for batch in batches]
        self._held_out = [_by_name(batch, names) for batch in held_out]
        self._microbatches = microbatches
        first = _spec(self._batches[0])
        for number, batch in enumerate([*self._batches, *self._held_out]):
            if _spec(batch) != first:
                raise DataError(
                    f"batch {number} is {_spec(batch)}, the first is {first}; drop or pad it, shapes are static"
                )
        for name, tensor in self._batches[0].items():
            if tensor.ndim < 1 or tensor.shape[0] % microbatches:
                raise DataError(
                    f"{name} {list(tensor.shape)} cannot be cut into {microbatches} equal microbatches; change one"
                )
        self.masked = any(_is_masked(batch) for batch in (*self._batches, *self._held_out))
        self.held_out_microbatches = len(self._held_out) * microbatches
        self.tokens_per_microbatch = count_tokens(self.train(0, 0))

    def train(self, step: int, microbatch: int) -> Inputs:
        return self._cut(self._batches[step % len(self._batches)], microbatch)

    def held_out(self, index: int) -> Inputs:
        if not self._held_out:
            raise DataError("there are no held-out batches to evaluate on; give some")
        number, microbatch = divmod(index, self._microbatches)
        return self._cut(self._held_out[number % len(self._held_out)], microbatch)

    def _cut(self, batch: Inputs, microbatch: int) -> Inputs:
        return {name: t.chunk(self._microbatches)[microbatch].contiguous() for name, t in batch.items()}


class FunctionSource:
    """Microbatches from a function of (step, microbatch), which must give equal tensors for equal numbers."""

    vocab_size: int | None = None
    tokenizer: Tokenizer | None = None
    held_out_microbatches = 0
    masked = True

    def __init__(self, make: Callable[[int, int], Mapping[str, Tensor]]) -> None:
        self._make = make
        self.tokens_per_microbatch = count_tokens(self.train(0, 0))

    def train(self, step: int, microbatch: int) -> Inputs:
        return dict(self._make(step, microbatch))

    def held_out(self, index: int) -> Inputs:
        raise DataError("a data function has no held-out data; evaluate on batches instead")


class WeightedSource:
    """A source whose microbatches also hold their weight, see `graph.weigh`: among the microbatches of their step,
    or among the first `evaluated` held-out ones."""

    def __init__(self, source: Source, places: Places, microbatches: int, evaluated: int) -> None:
        self._source = source
        self.tokens_per_microbatch, self.held_out_microbatches = (
            source.tokens_per_microbatch, source.held_out_microbatches,
        )  # fmt: skip
        self.vocab_size, self.tokenizer, self.masked = source.vocab_size, source.tokenizer, source.masked

        @lru_cache(maxsize=2)
        def step(number: int) -> list[Inputs]:
            return _weighted([source.train(number, i) for i in range(microbatches)], places)

        @lru_cache(maxsize=1)
        def total() -> int:
            return sum(places.count(source.held_out(i)) for i in range(evaluated))

        self._step, self._total = step, total
        self._places, self._evaluated = places, evaluated

    def train(self, step: int, microbatch: int) -> Inputs:
        return self._step(step)[microbatch]

    def held_out(self, index: int) -> Inputs:
        inputs = self._source.held_out(index)
        return {**inputs, WEIGHT: _weight(self._places.count(inputs), self._total(), self._evaluated)}


def _weighted(batches: Sequence[Inputs], places: Places) -> list[Inputs]:
    counts = [places.count(batch) for batch in batches]
    total = sum(counts)
    return [
        {**b, WEIGHT: _weight(count, total, len(batches))} for b, count in zip(batches, counts, strict=True)
    ]  # fmt: skip


def _weight(count: int, total: int, microbatches: int) -> Tensor:
    return torch.tensor(count * microbatches / total if total else 0.0, dtype=torch.float32)


def _is_masked(batch: Inputs) -> bool:
    return any(not t.is_floating_point() and bool((t == IGNORED).any()) for t in batch.values())


def count_tokens(inputs: Inputs) -> int:
    """Tokens of a microbatch: places in its first tensor of whole numbers [B, T], else its samples."""
    for tensor in inputs.values():
        if tensor.ndim == 2 and not tensor.is_floating_point():
            return tensor.numel()
    return next(iter(inputs.values())).shape[0]


def _by_name(batch: Any, names: Sequence[str]) -> Inputs:
    if not isinstance(batch, Mapping):
        tensors = [batch] if isinstance(batch, Tensor) else list(batch)
        if len(tensors) > len(names):
            raise DataError(f"a batch has {len(tensors)} tensors and {len(names)} names; give one name each")
        batch = dict(zip(names, tensors, strict=False))
    for name, tensor in batch.items():
        if not isinstance(tensor, Tensor):
            raise DataError(f"{name} of a batch is {type(tensor).__name__}, not a tensor")
    return dict(batch)


def _spec(batch: Inputs) -> str:
    return ", ".join(f"{name} {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for name, t in batch.items())
