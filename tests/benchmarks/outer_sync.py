"""What codecs cost where replicas agree: held-out loss against bits for each parameter.

    python -m tests.benchmarks --only outer-sync [--short]

Two replicas of the GPT of `quality`, each with its own half of the tokens and its own optimizer, send what 20 steps
changed in their parameters, and both go on from the mean of the two; 10 rounds.
"""

from dataclasses import dataclass

import torch

from geotrain.codecs import State, get_codec
from geotrain.codecs.base import Message
from geotrain.graph.serial import tensor_spec

from .crossings import CPU
from .quality import Learner
from .tables import Table

CODECS = ("identity", "sync4", "sync2")


@dataclass(frozen=True)
class Result:
    loss: float
    bits: float
    """For each parameter, in each round."""


def train(name: str, seed: int, rounds: int, steps: int, replicas: int = 2) -> Result:
    learners = [Learner(seed, 100 * seed + r, rounds * steps) for r in range(replicas)]
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
    rounds, steps, seeds = (2, 2, (0,)) if short else (10, 20, (0, 1, 2))
    return [table({name: [train(name, seed, rounds, steps) for seed in seeds] for name in CODECS})]


def table(results: dict[str, list[Result]]) -> Table:
    exact = results["identity"]
    rows = []
    for name, runs in results.items():
        losses = [run.loss for run in runs]
        increases = [100 * (run.loss / whole.loss - 1) for run, whole in zip(runs, exact, strict=False)]
        rows.append([
            name, round(runs[0].bits, 2), round(sum(losses) / len(losses), 4),
            round(sum(increases) / len(increases), 2), " ".join(f"{i:+.2f}" for i in increases),
        ])  # fmt: skip
    return Table("Codecs between replicas", ["codec", "bits/parameter", "held-out loss", "increase %", "by seed"], rows)
