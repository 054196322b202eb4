# pyright: basic, reportArgumentType=false
"""The inner loops of `numbers` and `transform`, compiled by numba; see `native`. Pure."""

import numpy as np

from .models import BINS, ZERO_SYMBOL
from .native import compiled, float32, inlined, int32, uint8, uint32
from .native_entropy import halves
from .noise import FIRST, SECOND


@inlined
def _word(i, low, high):
    h = uint32(uint32(i) ^ low)
    h = uint32((h ^ (h >> uint32(16))) * uint32(FIRST)) ^ high
    h = uint32((h ^ (h >> uint32(15))) * uint32(SECOND))
    return uint32(h ^ (h >> uint32(15)))


@inlined
def _uniform(half):
    return (float32(int32(half)) - float32(32767.5)) * float32(2.0**-16)


@compiled
def _dithers(low, high, u, bins):
    half = (len(u) + 1) // 2
    for i in range(half):
        h = _word(i, low, high)
        u[i] = _uniform(h & uint32(0xFFFF))
        if i + half < len(u):
            u[i + half] = _uniform(h >> uint32(16))
    for i in range(len(u)):
        bins[i] = uint8(int32(abs(u[i]) * float32(2 * BINS)))


@compiled
def _round(v, inverse, u, values):
    most = float32(2.0**29)
    for i in range(len(v)):
        q = np.floor(v[i] * inverse + u[i] + float32(0.5))
        q = -q if u[i] < 0 else q
        values[i] = int32(min(max(q, -most), most))


@compiled
def restore(values, u, v):
    for i in range(len(v)):
        q = float32(values[i])
        v[i] = (-q if u[i] < 0 else q) - u[i]


@compiled
def count_symbols(values, low, every, bins, dithered, count):
    """`count`: (rows, BINS, symbols)."""
    for r in range(len(values)):
        plain = dithered and low[r] == 0
        for i in range(0, values.shape[1], every):
            symbol = (values[r, i] >> low[r]) + ZERO_SYMBOL
            if symbol < 0 or symbol > 2 * ZERO_SYMBOL:
                symbol = 0
            count[r, bins[r, i] if plain else 0, symbol] += 1


@compiled
def to_symbols(values, low, reach, symbols):
    """Returns how many are out of reach."""
    far = 0
    for r in range(len(values)):
        for i in range(values.shape[1]):
            rest = values[r, i] >> low[r]
            if abs(rest) > reach[r]:
                far += 1
                symbols[r, i] = 0
            else:
                symbols[r, i] = uint8(rest + ZERO_SYMBOL)
    return far


def dithers(key, u, bins):
    _dithers(*halves(key), u, bins)


def round_dithered(v, inverse, u, values):
    _round(v, np.float32(inverse), u, values)
