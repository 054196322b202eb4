"""What a stage's process holds, and how much of a peer's memory a plan may use. Pure.

Weights, gradients, optimizer state, live microbatches, frames on their way and what an op holds while it runs come
from `cost`; inputs that wait, codec residuals and the runtime are added here. A run refuses a stage above `USABLE` of
what its peer allows: the estimate is within 20% of the measured peak (`python -m tests.benchmarks --only memory`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..base import Peer
from ..cost import CostTable
from ..graph.cut import allowed_cuts

__all__ = ["GIB", "Memory", "allowed_cuts", "stage_memory", "usable_bytes", "ways_out"]

Floats = NDArray[np.float64]

GIB = 2**30

RUNTIME_BYTES = int(0.40 * GIB)
"""What a peer's process holds whatever its stage: Python, torch and gRPC took 0.35 GiB after an optimizer step on
Linux; the rest is what the allocator and the sockets keep."""

CODEC_BYTES = int(0.20 * GIB)
"""Numba and the compiled loops of lossy codecs."""

STEPS_AHEAD = 2
"""The coordinator sends the inputs of so many steps ahead."""

USABLE = 0.8
"""Of a peer's memory: the estimate may be a fifth too low."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of every stage of a table, by (first, end) border. `state` is held whatever runs, `live` by each live
    microbatch; with recompute `received` by each, and `live` by one of them."""

    state: Floats
    live: Floats
    received: Floats

    def peak(self, live_microbatches: int, recompute: bool) -> Floats:
        if recompute:
            return self.state + self.live + live_microbatches * self.received
        return self.state + live_microbatches * self.live


def stage_memory(table: CostTable, microbatches: int, *, lossy: bool = False, residual_bytes: float = 0.0) -> Memory:
    """Of all stages between a table's borders.

    Args:
        lossy: whether the plan compresses anything.
        residual_bytes: what the codecs of a stage keep from step to step.
    """
    state, one = (table.memory_bytes(live).astype(np.float64) for live in (0, 1))
    inputs = table["input_bytes"].astype(np.float64)
    runtime = RUNTIME_BYTES + CODEC_BYTES * lossy + residual_bytes
    waiting = STEPS_AHEAD * microbatches * inputs
    return Memory(state + waiting + runtime, one - state, table["bytes_in"] + inputs)


def usable_bytes(peer: Peer) -> float:
    """What a plan may use of a peer's memory."""
    return USABLE * peer.memory_bytes


def ways_out(peer: str, needed: float, limit: float, live: int, recompute: bool) -> str:
    """The end of a sentence about a stage that does not fit: figures, and what to do. `limit` is `usable_bytes`."""
    third = "give it more memory (its activations are recomputed already)" if recompute else "recompute activations"
    return (
        f"{peer} needs {needed / GIB:.2f} GiB with {live} live microbatches and may use {limit / GIB:.2f} GiB "
        f"({USABLE:.0%} of its memory); let more peers join, make the microbatch smaller, or {third}"
    )
