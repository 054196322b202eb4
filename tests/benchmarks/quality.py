"""What codecs cost in training from scratch: held-out loss against bytes on the links.

    python -m tests.benchmarks --only quality [--short]

A GPT over bytes, 4 layers of 192 channels in 4 stages (3 cuts), 128 places, AdamW 4e-3 with a linear decay, on the
embedded text; a sixteenth of it, spread evenly, is held out. All runs see the same tokens in the same order; a run
without loss is compared with the runs of the same seed. Every message is encoded and decoded as on a link, in one
process, so bytes are exact. Loss itself is compared, so codecs do not touch the evaluation.
"""

import statistics
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
    ("bf16", "bf16"), ("int8", "int8"), ("hd4", "hd4u"), ("hd4", "hd2u"), ("hd4", "hd2"), ("ec-01", "ecm-2"),
    ("tc-001", "tcm-1"), ("tcu-001", "tcm-05"), ("tcu-0025", "tcm-1"), ("tcu-005", "tcm-2"), ("tcu-01", "tcm-4"),
    ("topke-10", "topke-10"), ("adatopk-10", "adatopk-10"),
)  # fmt: skip
"""Codecs of activations and of their gradients."""
_PART, _HELD_OUT, _BATCH, _PLACES, _LR = 516, 16, 8, 128, 4e-3


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

    def __init__(self, seed: int, order: int, steps: int) -> None:
        self.tokens, self._held_out = _text()
        torch.manual_seed(seed)
        self.model = Gpt(GptModel(layers=4, hidden=192, heads=6, context=_PLACES), 256)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=_LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self._order, self._steps = torch.Generator().manual_seed(order), steps

    def step(self, step: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = _LR * min(1.0, (step + 1) / 40) * (1 - step / self._steps)
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


def train(forward: str, backward: str, seed: int, steps: int) -> Result:
    learner = Learner(seed, seed, steps)
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
    exact = [train(*LOSSLESS, seed, steps) for seed in seeds]
    return [table({pair: [train(*pair, seed, steps) for seed in seeds] for pair in pairs}, exact, steps)]


def table(results: dict[tuple[str, str], list[Result]], exact: list[Result], steps: int) -> Table:
    rows = []
    for (forward, backward), runs in results.items():
        increases = [100 * (run.loss / whole.loss - 1) for run, whole in zip(runs, exact, strict=False)]
        mean = [statistics.mean(values) for values in zip(*((
            r.forward_bytes, r.backward_bytes, r.forward_error, r.backward_error, r.factor
        ) for r in runs), strict=True)]  # fmt: skip
        rows.append([
            forward, backward, round(mean[0], 3), round(mean[1], 3), round(mean[4], 2), float(f"{mean[2]:.2g}"),
            float(f"{mean[3]:.2g}"), round(statistics.mean(increases), 2), " ".join(f"{i:+.2f}" for i in increases),
        ])  # fmt: skip
    losses = [run.loss for run in exact]
    return Table(
        f"Codecs in training from scratch, {steps} steps",
        [
            "forward", "backward", "bytes/element fwd", "bwd", "times under bf16", "error fwd", "error bwd",
            "loss increase %", "by seed",
        ],
        rows,
        notes=["lossless: " + ", ".join(f"{loss:.4f}" for loss in losses)],
    )  # fmt: skip
