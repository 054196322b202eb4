"""How often a rounded Gaussian coefficient takes each value, as rANS frequencies. Pure.

For q = floor(v / step + u + 1/2) with v of standard deviation s steps and u in (-1/2, 1/2) known: mirrored where u is
negative, and then one table for each quarter of |u|, because what lies near an edge may fall on either side. Symbol 72
is zero. A value within 8.8 s + 1 can occur (64 numbers hold none above 8 times their root mean square) and has a
frequency of at least 1. Floats are added and multiplied only, in one order, so that all machines have the same tables.
"""

from functools import lru_cache
from itertools import pairwise

import numpy as np

from .rans import TOTAL, Array, Tables, make_tables

ZERO_SYMBOL = 72
BINS = 4
_POINTS, _FAR = 64, 10
"""Points of the Gaussian's integral for each standard deviation, and how many deviations it goes."""


@lru_cache(maxsize=16)
def gaussian_tables(deviations: tuple[float, ...]) -> Tables:
    """Table 4 i + bin is for deviation i, in steps, 8 at most; 0 for what is always zero."""
    rows = [_frequencies(probabilities(s, b), int(8.8 * s + 1)) for s in deviations for b in range(BINS)]
    return make_tables(np.stack(rows))


@lru_cache(maxsize=1)
def delta_tables() -> Tables:
    """One table, of differences between neighbours in a range of 128, modulo 128; 64 is none."""
    frequency = [max(int(900 * 0.55 ** abs(d)), 3) for d in range(-64, 64)]
    frequency[64] += TOTAL - sum(frequency)
    return make_tables(np.array([frequency]))


def probabilities(s: float, quarter: int) -> Array:
    """Of q = -72 to 72."""
    q = np.arange(-ZERO_SYMBOL, ZERO_SYMBOL + 1, dtype=np.float64)
    if s == 0:
        return (q == 0).astype(np.float64)
    total = np.zeros(len(q))
    for i in range(4):
        u = (quarter + (i + 0.5) / 4) / (2 * BINS)
        total = total + _integral((q + (0.5 - u)) / s) - _integral((q - (0.5 + u)) / s)
    return total / 4


def _integral(x: Array) -> Array:
    """Of the Gaussian density up to x, between points of a table."""
    at = np.clip(x * _POINTS + _POINTS * _FAR, 0, 2 * _POINTS * _FAR - 1)
    low = at.astype(np.int64)
    table = _gaussian_integral()
    return table[low] + (table[low + 1] - table[low]) * (at - low)


@lru_cache(maxsize=1)
def _gaussian_integral() -> Array:
    """At -10, -10 + 1/64, ... 10. The density falls by exp(-h**2 (i + 1/2)) from h * i to h * (i + 1)."""
    ratio, change = 0.9998779371377774, 0.9997558891748972  # exp(-1/8192), exp(-1/4096)
    half = [1.0]
    for _ in range(_POINTS * _FAR):
        half.append(half[-1] * ratio)
        ratio *= change
    density = [*half[:0:-1], *half]
    sums = [0.0]
    for a, b in pairwise(density):
        sums.append(sums[-1] + (a + b))
    return np.array(sums) / sums[-1]


def _frequencies(probability: Array, reach: int) -> Array:
    """Integers that add up to 4096; 0 beyond `reach`."""
    can = np.abs(np.arange(-ZERO_SYMBOL, ZERO_SYMBOL + 1)) <= reach
    whole = (probability * (TOTAL - can.sum())).astype(np.int64)
    frequency = np.where(can, whole + 1, 0)
    frequency[int(np.argmax(frequency))] += TOTAL - frequency.sum()
    return frequency
