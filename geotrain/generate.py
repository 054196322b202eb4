"""Text from a trained run: the job's model with the newest checkpoint's weights, whole, on this machine. I/O."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from . import models
from .checkpoint import Checkpoint, latest
from .config import HfModel, ImagesData, JobConfig, ModuleModel, TokensData, load_job
from .corpus import Tokenizer, open_tokenizer
from .errors import CheckpointError, UserError
from .graph.capture import split_loss
from .runfolder import JOB


class TextModel:
    """A causal language model of a run, ready to sample.

    Raises:
        UserError: the run has no text model, or no checkpoint yet.
    """

    def __init__(self, run_dir: Path) -> None:
        job = load_job(run_dir / JOB)
        checkpoint = latest(run_dir)
        if checkpoint is None:
            raise CheckpointError(f"{run_dir} has no complete checkpoint; let it train until it writes one")
        with checkpoint.store:
            self.tokenizer = _tokenizer(run_dir, job)
            self._model = models.build(job.model, self.tokenizer.vocab_size).eval()
            _load(self._model, checkpoint)
        self._context = job.model.context
        self._names = job.data.names or ("input_ids" if isinstance(job.model, HfModel) else "tokens", "labels")

    def sample(self, prompt: str, *, tokens: int, temperature: float = 0.8, seed: int = 0) -> Iterator[str]:
        """Yields text that follows the prompt, piece by piece; temperature 0 takes the likeliest token."""
        random = torch.Generator().manual_seed(seed)
        seen = [int(token) for token in self.tokenizer.encode(prompt)]
        if not seen:
            raise UserError("the prompt is empty; give at least one character")
        first, said = len(seen), ""
        for _ in range(tokens):
            logits = self._logits(seen[-self._context :])
            if temperature > 0:
                token = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=random)
            else:
                token = logits.argmax()
            seen.append(int(token))
            text = self.tokenizer.decode(seen[first:])
            if not text.endswith("\ufffd"):  # a character whose last bytes are still to come
                yield text[len(said) :]
                said = text

    @torch.no_grad()
    def _logits(self, seen: list[int]) -> Tensor:
        """What comes next, as float32 logits [V]."""
        tokens = torch.tensor([seen])
        _, extras = split_loss(self._model(**dict.fromkeys(self._names, tokens)))
        if "logits" not in extras:
            raise UserError("the model gives no logits; return (loss, {'logits': ...}) from its forward")
        return extras["logits"][0, -1].float()


def _tokenizer(run_dir: Path, job: JobConfig) -> Tokenizer:
    data = job.data
    if isinstance(job.model, ModuleModel) or isinstance(data, ImagesData | TokensData):
        raise UserError(f"the data of {run_dir} came without a tokenizer, so there is no text to give")
    return open_tokenizer(data.tokenizer)


def _load(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Overwrites every parameter and persistent buffer, one at a time."""
    ties = checkpoint.manifest.ties
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            stored = checkpoint.store.load(ties.get(name, name))
            if stored.shape != tensor.shape:
                raise CheckpointError(
                    f"{checkpoint.path}: {name!r} does not fit the job's model; is it of another job?"
                )
            tensor.copy_(stored)
