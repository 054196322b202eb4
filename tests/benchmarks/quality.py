"""What codecs cost in training from scratch: held-out loss against bytes on the links.

    python -m tests.benchmarks --only quality [--short]

A GPT over bytes, 4 layers of 192 channels in 4 stages (3 cuts), 128 places, AdamW 2e-3 with a linear decay, on the
embedded text; a sixteenth of it, spread evenly, is held out. Runs of a seed see the same tokens in the same order.
Every message is encoded and decoded as on a link, in one process, so bytes are exact; codecs do not touch the
evaluation.

Training is chaotic: weights that differ in their last bit end at losses that differ, on the training text as on the
held-out one, so more text to evaluate on would not help. Of the rates 1e-3, 2e-3 and 4e-3 the second ends lowest
without loss (means of three seeds); the third is higher, and there chance moves a run by up to 2 %. Each seed is run
twice without loss, the second time nudged so; a run is compared with the mean of the two, and a pair's mean over the
seeds has the standard error of what is left between seeds, pooled over all pairs that do not diverge.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from geotrain.config import GptModel
from geotrain.corpus import embedded_text
from geotrain.models import Gpt

from .crossings import Crossings
from .tables import Table

LOSSLESS = "identity", "identity"
SEEDS = (0, 1, 2)
PAIRS = (
    ("bf16", "bf16"), ("int8", "int8"), ("hd4", "hd4u"), ("hd4", "hd2u"), ("ec-0025", "ecm-1"), ("ec-01", "ecm-2"),
    ("tc-001", "tcm-1"), ("tcu-001", "tcm-05"), ("tcu-0025", "tcm-1"), ("tcu-005", "tcm-2"), ("tcu-01", "tcm-4"),
    ("topk-10", "topk-10"), ("adatopk-10", "adatopk-10"),
)  # fmt: skip
"""Codecs of activations and of their gradients."""
NUDGE = 1e-6
DIVERGED = 50.0
"""A loss increase, in percent, that tells nothing of chance any more."""

_PART, _HELD_OUT, _BATCH, _PLACES = 516, 16, 8, 128
_MODEL = GptModel(layers=4, hidden=192, heads=6, context=_PLACES)


@dataclass(frozen=True)
class Result:
    loss: float
    forward_bytes: float
    backward_bytes: float
    forward_error: float
    backward_error: float

    @property
    def factor(self) -> float:
        """Times fewer bytes than bf16, both ways summed."""
        return 4 / (self.forward_bytes + self.backward_bytes)


class Learner:
    """The model, its optimizer and its data."""

    def __init__(
        self, seed: int, order: int, steps: int, nudge: float = 0.0, model: GptModel = _MODEL, lr: float = 2e-3
    ) -> None:
        """The weights begin larger by the fraction `nudge`."""
        self.tokens, self._held_out = _text()
        torch.manual_seed(seed)
        self.model = Gpt(model, 256)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + nudge)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self._order, self._steps, self._lr = torch.Generator().manual_seed(order), steps, lr

    def step(self, step: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * min(1.0, (step + 1) / 40) * (1 - step / self._steps)
        starts = torch.randint(len(self.tokens) - _PLACES - 1, (_BATCH,), generator=self._order)
        batch = torch.stack([self.tokens[s : s + _PLACES + 1] for s in starts.tolist()])
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = self.model(batch[:, :-1], batch[:, 1:])
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()

    def held_out_loss(self) -> float:
        places = range(0, _PART - _PLACES, _PLACES)
        inputs = torch.cat([self._held_out[:, p : p + _PLACES] for p in places])
        labels = torch.cat([self._held_out[:, p + 1 : p + 1 + _PLACES] for p in places])
        with torch.no_grad():
            pairs = zip(inputs.split(16), labels.split(16), strict=True)
            return sum(self.model(x, y)[0].item() * len(x) for x, y in pairs) / len(inputs)


def train(forward: str, backward: str, seed: int, steps: int, nudge: float = 0.0) -> Result:
    learner = Learner(seed, seed, steps, nudge)
    crossings = Crossings([learner.model.blocks[i] for i in range(3)], forward, backward, seed)
    for step in range(steps):
        crossings.step = step
        learner.step(step)
    with crossings.off():
        loss = learner.held_out_loss()
    figures = crossings.figures()
    return Result(
        loss, figures["forward bytes"], figures["backward bytes"], figures["forward error"], figures["backward error"]
    )


def _text() -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens to train on, parts held out)."""
    data = torch.frombuffer(bytearray(embedded_text().encode()), dtype=torch.uint8).long()
    parts = data[: len(data) // _PART * _PART].view(-1, _PART)
    held_out = torch.arange(len(parts)) % _HELD_OUT == 7
    return parts[~held_out].reshape(-1), parts[held_out]


def benchmark(short: bool) -> list[Table]:
    steps, seeds = (5, (0,)) if short else (400, SEEDS)
    pairs = PAIRS[7:9] if short else PAIRS
    exact = [[train(*LOSSLESS, seed, steps, nudge) for nudge in (0.0, NUDGE)] for seed in seeds]
    return [table({pair: [train(*pair, seed, steps) for seed in seeds] for pair in pairs}, exact, steps)]


def table(results: Mapping[tuple[str, str], list[Result]], exact: Sequence[Sequence[Result]], steps: int) -> Table:
    """`exact`: for each seed, runs without loss."""
    whole = [statistics.mean(run.loss for run in runs) for runs in exact]
    increases = {
        pair: [100 * (run.loss / loss - 1) for run, loss in zip(runs, whole, strict=True)]
        for pair, runs in results.items()
    }
    trained = [found for found in increases.values() if max(found) < DIVERGED]
    rest = [i - statistics.mean(found) for found in trained for i in found]
    freedom = len(rest) - len(trained)
    notes = ["lossless, twice each seed: " + ", ".join(f"{run.loss:.4f}" for runs in exact for run in runs)]
    if freedom:
        error = math.sqrt(sum(r * r for r in rest) / freedom / len(whole))
        notes.append(f"standard error of a loss increase: {error:.2f} %")
    rows = []
    for (forward, backward), runs in results.items():
        mean = [statistics.mean(values) for values in zip(*((
            r.forward_bytes, r.backward_bytes, r.forward_error, r.backward_error, r.factor
        ) for r in runs), strict=True)]  # fmt: skip
        found = increases[forward, backward]
        rows.append([
            forward, backward, round(mean[0], 3), round(mean[1], 3), round(mean[4], 2), float(f"{mean[2]:.2g}"),
            float(f"{mean[3]:.2g}"), round(statistics.mean(found), 2), " ".join(f"{i:+.2f}" for i in found),
        ])  # fmt: skip
    return Table(
        f"Codecs in training from scratch, {steps} steps",
        [
            "forward", "backward", "bytes/element fwd", "bwd", "times under bf16", "error fwd", "error bwd",
            "loss increase %", "by seed",
        ],
        rows,
        notes=notes,
    )  # fmt: skip
