"""What the planner knows of codecs: bytes, seconds, and how much training they cost. Pure.

The ladders are defaults, until a job has measured its own: bytes and seconds are of activations on one thread (AVX-512,
native kernels); costs are of a small GPT trained from scratch, where lost steps show most: about 4.5 times the relative
squared error of activations, 0.2 times that of their gradients (`python -m tests.benchmarks --only quality`).
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
    Rung("ec-0025", 0.59, 10e-9, 8.0e-9, 0.012),
    Rung("ec-005", 0.52, 9.7e-9, 7.2e-9, 0.022),
    Rung("ec-01", 0.46, 9.0e-9, 6.8e-9, 0.045),
    Rung("ec-02", 0.40, 6.9e-9, 6.5e-9, 0.09),
)
BACKWARD: tuple[Rung, ...] = (
    RAW,
    Rung("bf16", 2.0, 0.32e-9, 0.34e-9, 0.0),
    Rung("int8", 1.01, 0.92e-9, 0.22e-9, 0.003),
    Rung("hd4u", 0.52, 1.0e-9, 0.83e-9, 0.003),
    Rung("ecm-05", 0.27, 7.1e-9, 8.4e-9, 0.01),
    Rung("ecm-1", 0.22, 9.7e-9, 8.5e-9, 0.02),
    Rung("ecm-2", 0.17, 6.9e-9, 7.5e-9, 0.04),
    Rung("ecm-4", 0.13, 7.1e-9, 7.1e-9, 0.08),
)
"""Least compression first."""

_LOSS_FOR_E_FOLD_STEPS = 0.17
"""What the held-out loss falls by, as a fraction of itself, while the number of steps grows e-fold: 0.30 of 1.76 nats
a byte, the model and text of the costs above at 400 steps."""


def extra_steps(loss_increase: float) -> float:
    """The fraction of steps more that make up for a held-out loss higher by this fraction."""
    return math.expm1(loss_increase / _LOSS_FOR_E_FOLD_STEPS)
