"""What codecs cost where replicas agree: held-out loss against bits for each parameter.

    python -m tests.benchmarks --only outer-sync [--short]

Two replicas of a small GPT, each with its own half of the tokens and its own optimizer, send what 20 steps changed in
their parameters, and both go on from the mean of the two; 20 rounds. Chance alone (see `quality`) would hide what is
looked for, so the learning rate is a quarter of the one there, and each run is done twice, the second time with weights
that begin larger by a millionth. Increases are over the lossless runs of the same seed.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from geotrain.codecs import State, get_codec
from geotrain.codecs.base import Message
from geotrain.config import GptModel
from geotrain.graph.serial import tensor_spec

from .crossings import CPU
from .quality import NUDGE, SEEDS, Learner
from .tables import Table

CODECS = ("identity", "sync4", "sync2")
_MODEL = GptModel(layers=2, hidden=64, heads=2, context=128)
_LR = 1e-3


@dataclass(frozen=True)
class Result:
    loss: float
    bits: float
    """For each parameter, in each round."""


def train(name: str, seed: int, rounds: int, steps: int, nudge: float, replicas: int = 2) -> Result:
    learners = [Learner(seed, 100 * seed + r, rounds * steps, nudge, _MODEL, _LR) for r in range(replicas)]
    parameters = [list(learner.model.parameters()) for learner in learners]
    codec = get_codec(name)
    states: dict[tuple[int, int], State] = {}
    nbytes = elements = 0
    for number in range(rounds):
        before = [p.detach().clone() for p in parameters[0]]
        changes = [torch.zeros_like(p) for p in before]
        for r, learner in enumerate(learners):
            for step in range(steps):
                learner.step(number * steps + step)
            for i, (p, was) in enumerate(zip(parameters[r], before, strict=True)):
                change = p.detach() - was
                spec = tensor_spec(change)
                message = Message(hash((number, r, i)) % 2**64)
                payload, states[r, i] = codec.encode(change, states.get((r, i), codec.init(spec)), message)
                data = memoryview(bytearray(b"".join(payload)))
                changes[i] += codec.decode(data, spec, CPU, codec.init(spec), message)[0] / replicas
                nbytes, elements = nbytes + data.nbytes, elements + spec.numel
        with torch.no_grad():
            for mine in parameters:
                for p, was, change in zip(mine, before, changes, strict=True):
                    p.copy_(was + change)
    return Result(learners[0].held_out_loss(), 8 * nbytes / elements)


def benchmark(short: bool) -> list[Table]:
    rounds, steps, seeds = (2, 2, (0,)) if short else (20, 20, SEEDS)
    return [
        table({
            name: [[train(name, seed, rounds, steps, nudge) for nudge in (0.0, NUDGE)] for seed in seeds]
            for name in CODECS
        })
    ]  # fmt: skip


def table(results: Mapping[str, list[list[Result]]]) -> Table:
    """`results`: the two runs of each seed, by codec. A codec's increase has the standard error of a difference of two
    means, as far as runs of the same seed and codec differ."""
    means = {name: [statistics.mean(run.loss for run in pair) for pair in runs] for name, runs in results.items()}
    increases = {
        name: [100 * (loss / whole - 1) for loss, whole in zip(losses, means["identity"], strict=True)]
        for name, losses in means.items()
    }
    pairs = [pair for runs in results.values() for pair in runs]
    spread = [100 * (a.loss - b.loss) / (a.loss + b.loss) * math.sqrt(2) for a, b in pairs]
    deviation = math.sqrt(statistics.mean(s * s for s in spread))
    error = deviation / math.sqrt(len(means["identity"]))
    rows = [
        [
            name, round(results[name][0][0].bits, 2), round(statistics.mean(means[name]), 4),
            round(statistics.mean(found), 3), " ".join(f"{i:+.2f}" for i in found),
        ]
        for name, found in increases.items()
    ]  # fmt: skip
    return Table(
        "Codecs between replicas", ["codec", "bits/parameter", "held-out loss", "increase %", "by seed"], rows,
        notes=[f"standard error of an increase by what chance does to a run: {error:.2f} %"],
    )  # fmt: skip
