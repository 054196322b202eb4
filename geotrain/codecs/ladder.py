"""What the planner knows of codecs: bytes, seconds, and how much training they cost. Pure.

The ladders are defaults, until a job has measured its own: bytes and seconds are of activations and gradients of a
small GPT trained from scratch (one message of 1024 tokens a step, with axes of its own), on one thread (AVX-512, native
kernels). Costs are of it, too, because lost steps show most there: 6.5 (+- 1.7) times the relative squared error of
activations and 0.15 (+- 0.07) times that of their gradients, by least squares over 19 runs whose losses chance alone
moves by 1.2 % (`python -m tests.benchmarks --only quality`). Where principal axes do not pay, `tcu-E` and `tcm-E` are
by themselves `ec-E` and `ecm-E`: the same error, and more bytes.

Weights that were trained before have ladders of their own. Their activations have no few principal axes, and a few
channels that are many times the others, so what is small beside a message's mean is not small beside most channels;
errors of gradients matter less. Costs are of SmolLM2-135M, LoRA and all weights, after 24 steps: a loss higher by 1 %
for 3 cuts is taken as 2 % more steps for each (`python -m tests.benchmarks --only finetuning`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Rung:
    """One codec in one direction. `cost`: the extra steps needed, as a fraction, for each boundary that uses it.
    Seconds are those of an element: encoding at the sender, decoding at the receiver. `seen`: in this job, so its bytes
    are those of its messages."""

    codec: str
    bytes_per_element: float
    encode_seconds_per_element: float = 0.0
    decode_seconds_per_element: float = 0.0
    cost: float = 0.0
    seen: bool = False


@dataclass(frozen=True, slots=True)
class Rates:
    """Of a codec, for each element; `nbytes` is None where a job has not seen them: they are what is typical."""

    encode_s: float
    decode_s: float
    nbytes: float | None = None


RAW = Rung("identity", 4.0)
"""Nothing is lost; its bytes are the tensors' own."""

_BF16 = Rung("bf16", 2.0, 0.32e-9, 0.34e-9)
_INT8 = Rung("int8", 1.01, 0.92e-9, 0.22e-9)
_HD6 = Rung("hd6", 0.77, 0.93e-9, 0.74e-9)
_HD4 = Rung("hd4", 0.52, 1.0e-9, 0.83e-9)
_HD4U = replace(_HD4, codec="hd4u")
"""Their bytes and seconds are the same for any tensors, so each ladder adds only what they cost there."""

FORWARD: tuple[Rung, ...] = (
    RAW,
    _BF16,
    replace(_INT8, cost=0.003),
    replace(_HD6, cost=0.004),
    Rung("tcu-001", 0.30, 15e-9, 10e-9, 0.0065),
    Rung("tcu-0025", 0.27, 14e-9, 10e-9, 0.016),
    Rung("tcu-005", 0.245, 14e-9, 10e-9, 0.032),
    Rung("tcu-01", 0.22, 14e-9, 10e-9, 0.065),
)
BACKWARD: tuple[Rung, ...] = (
    RAW,
    _BF16,
    replace(_INT8, cost=0.003),
    replace(_HD4U, cost=0.003),
    Rung("tcm-05", 0.22, 13e-9, 10e-9, 0.0075),
    Rung("tcm-1", 0.19, 13e-9, 10e-9, 0.015),
    Rung("tcm-2", 0.163, 13e-9, 10e-9, 0.03),
    Rung("tcm-4", 0.136, 12e-9, 9e-9, 0.06),
)
PRETRAINED_FORWARD: tuple[Rung, ...] = (
    RAW,
    _BF16,
    replace(_INT8, cost=0.001),
    replace(_HD6, cost=0.001),
    replace(_HD4, cost=0.002),
    Rung("ch-01", 0.47, 25e-9, 16e-9, 0.003),
    Rung("ec-02", 0.40, 4.4e-9, 4.7e-9, 0.05),
)
PRETRAINED_BACKWARD: tuple[Rung, ...] = (
    RAW,
    _BF16,
    replace(_INT8, cost=0.001),
    replace(_HD4U, cost=0.001),
    Rung("ecm-05", 0.32, 4.5e-9, 5.3e-9, 0.003),
    Rung("ecm-1", 0.26, 4.5e-9, 5.3e-9, 0.006),
    Rung("ecm-2", 0.21, 4.5e-9, 5.3e-9, 0.012),
    Rung("ecm-4", 0.157, 4.5e-9, 5.3e-9, 0.024),
)
"""Least compression first."""


def typical(rungs: Iterable[Rung]) -> dict[str, Rates]:
    """Of each codec, as the ladder has it: no job has seen it."""
    return {rung.codec: Rates(rung.encode_seconds_per_element, rung.decode_seconds_per_element) for rung in rungs}


def with_relatives(seen: Mapping[str, Rates], rungs: Sequence[Rung]) -> dict[str, Rates]:
    """What was seen of codecs, and what is to be expected of the others of their kind (`tcu-01` is one of `tcu-001`):
    bytes that are off as those of the nearest one are, and its seconds.

    >>> with_relatives({"tcu-0025": Rates(1e-9, 1e-9, 0.54)}, FORWARD)["tcu-01"]
    Rates(encode_s=1e-09, decode_s=1e-09, nbytes=0.44)
    """
    found = dict(seen)
    for i, rung in enumerate(rungs):
        kind = rung.codec.partition("-")[0]
        alike = [j for j, other in enumerate(rungs) if other.codec in seen and other.codec.partition("-")[0] == kind]
        if rung.codec not in seen and alike:
            near = rungs[min(alike, key=lambda j: abs(i - j))]
            of = seen[near.codec]
            if of.nbytes is not None:
                of = replace(of, nbytes=rung.bytes_per_element * of.nbytes / near.bytes_per_element)
            found[rung.codec] = of
    return found


_LOSS_FOR_E_FOLD_STEPS = 0.17
"""What the held-out loss falls by, as a fraction of itself, while the number of steps grows e-fold: 0.30 of 1.76 nats
a byte, the model and text of the costs above at 400 steps."""


def extra_steps(loss_increase: float) -> float:
    """The fraction of steps more that make up for a held-out loss higher by this fraction."""
    return math.expm1(loss_increase / _LOSS_FOR_E_FOLD_STEPS)
