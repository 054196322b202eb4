"""What the planner knows of codecs: bytes, seconds, and how much training they cost. Pure.

The ladders are defaults, until a job has measured its own: bytes and seconds are of activations and gradients of a
small GPT trained from scratch (one message of 1024 tokens a step, with axes of its own), on one thread (AVX-512, native
kernels). Costs are of it, too, because lost steps show most there: 6.5 (+- 1.7) times the relative squared error of
activations and 0.15 (+- 0.07) times that of their gradients, by least squares over 19 runs whose losses chance alone
moves by 1.2 % (`python -m tests.benchmarks --only quality`). Where principal axes do not pay, `tcu-E` and `tcm-E` are
by themselves `ec-E` and `ecm-E`: the same error, and more bytes.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rung:
    """One codec in one direction. `cost`: the extra steps needed, as a fraction, for each boundary that uses it.
    Seconds are those of an element: encoding at the sender, decoding at the receiver."""

    codec: str
    bytes_per_element: float
    encode_seconds_per_element: float = 0.0
    decode_seconds_per_element: float = 0.0
    cost: float = 0.0


RAW = Rung("identity", 4.0)
"""Nothing is lost; its bytes are the tensors' own."""

FORWARD: tuple[Rung, ...] = (
    RAW,
    Rung("bf16", 2.0, 0.32e-9, 0.34e-9, 0.0),
    Rung("int8", 1.01, 0.92e-9, 0.22e-9, 0.003),
    Rung("hd6", 0.77, 0.93e-9, 0.74e-9, 0.004),
    Rung("tcu-001", 0.30, 15e-9, 10e-9, 0.0065),
    Rung("tcu-0025", 0.27, 14e-9, 10e-9, 0.016),
    Rung("tcu-005", 0.245, 14e-9, 10e-9, 0.032),
    Rung("tcu-01", 0.22, 14e-9, 10e-9, 0.065),
)
BACKWARD: tuple[Rung, ...] = (
    RAW,
    Rung("bf16", 2.0, 0.32e-9, 0.34e-9, 0.0),
    Rung("int8", 1.01, 0.92e-9, 0.22e-9, 0.003),
    Rung("hd4u", 0.52, 1.0e-9, 0.83e-9, 0.003),
    Rung("tcm-05", 0.22, 13e-9, 10e-9, 0.0075),
    Rung("tcm-1", 0.19, 13e-9, 10e-9, 0.015),
    Rung("tcm-2", 0.163, 13e-9, 10e-9, 0.03),
    Rung("tcm-4", 0.136, 12e-9, 9e-9, 0.06),
)
"""Least compression first."""

_LOSS_FOR_E_FOLD_STEPS = 0.17
"""What the held-out loss falls by, as a fraction of itself, while the number of steps grows e-fold: 0.30 of 1.76 nats
a byte, the model and text of the costs above at 400 steps."""


def extra_steps(loss_increase: float) -> float:
    """The fraction of steps more that make up for a held-out loss higher by this fraction."""
    return math.expm1(loss_increase / _LOSS_FOR_E_FOLD_STEPS)
