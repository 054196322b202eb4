"""Text from a trained run: the job's model with the newest checkpoint's weights, whole, on this machine. I/O."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .config import ImagesData, JobConfig, ModuleModel, TokensData
from .corpus import Tokenizer, open_tokenizer
from .data import text_names, tokenizer_path
from .errors import UserError
from .graph import LOGITS
from .graph.capture import split_loss
from .trained import Trained


class TextModel:
    """A causal language model of a run, ready to sample.

    Raises:
        UserError: the run has no text model, or no checkpoint yet.
    """

    def __init__(self, run_dir: Path) -> None:
        with Trained(run_dir) as trained:
            job = trained.job
            self.tokenizer = _tokenizer(run_dir, job)
            self._model = trained.module(self.tokenizer.vocab_size)
        self._context = job.model.context
        self._names = text_names(job)

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
        if LOGITS not in extras:
            raise UserError("the model gives no logits; return (loss, {'logits': ...}) from its forward")
        return extras[LOGITS][0, -1].float()


def _tokenizer(run_dir: Path, job: JobConfig) -> Tokenizer:
    data = job.data
    if isinstance(job.model, ModuleModel) or isinstance(data, ImagesData | TokensData):
        raise UserError(f"the data of {run_dir} came without a tokenizer, so there is no text to give")
    return open_tokenizer(tokenizer_path(job))
