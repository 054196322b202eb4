# pyright: basic, reportArgumentType=false
"""The inner loops of `numbers` and `transform`, compiled by numba; see `native`. Pure."""

import numpy as np

from .models import BINS, ZERO_SYMBOL
from .native import compiled, float32, inlined, int32, uint8, uint32, uint64
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
def mean_magnitudes(values, every, means):
    for r in range(len(values)):
        total = count = 0
        for i in range(0, values.shape[1], every):
            total += abs(values[r, i])
            count += 1
        means[r] = total / count


@compiled
def count_bits(values, low, every, bins, dithered, costs, bits):
    """`costs`: (BINS * symbols, tables); adds to `bits`: (rows, tables)."""
    count = np.empty(len(costs), np.int64)
    for r in range(len(values)):
        count[:] = 0
        row, quarter = values[r], uint32(dithered and low[r] == 0)
        for i in range(0, len(row), every):
            symbol = uint32((row[i] >> low[r]) + ZERO_SYMBOL)
            if symbol > uint32(2 * ZERO_SYMBOL):
                symbol = uint32(0)
            count[uint32(bins[r, i]) * quarter * uint32(2 * ZERO_SYMBOL + 1) + symbol] += 1
        for i in range(len(count)):
            if count[i]:
                for t in range(bits.shape[1]):
                    bits[r, t] += count[i] * costs[i, t]


@compiled
def to_symbols(values, low, reach, symbols):
    """Returns how many are out of reach."""
    far = 0
    for r in range(len(values)):
        row, own, shift, most = values[r], symbols[r], int32(low[r]), int32(reach[r])
        for i in range(len(row)):
            rest = row[i] >> shift
            out = abs(rest) > most
            far += out
            own[i] = uint8(0) if out else uint8(rest + int32(ZERO_SYMBOL))
    return far


@compiled
def to_values(symbols, coded, values):
    """`symbols` of the rows that are `coded`. Returns how many are out of reach."""
    far = at = 0
    for r in range(len(values)):
        if coded[r]:
            for i in range(values.shape[1]):
                values[r, i] = int32(symbols[at, i]) - int32(ZERO_SYMBOL)
                far += symbols[at, i] == 0
            at += 1
    return far


@compiled
def write_low(values, low, data):
    """`low` bits of each value of each row; `data` has room for them."""
    at = 0
    for r in range(len(values)):
        held = uint64(0)
        count = 0
        for i in range(values.shape[1] if low[r] else 0):
            held |= uint64(values[r, i] & ((1 << low[r]) - 1)) << uint64(count)
            count += low[r]
            while count >= 8:
                data[at] = uint8(held & uint64(255))
                held >>= uint64(8)
                count -= 8
                at += 1
        if count:
            data[at] = uint8(held)
            at += 1


@compiled
def read_low(data, low, values):
    """The inverse: they become the low bits of what is there."""
    at = 0
    for r in range(len(values)):
        held = uint64(0)
        count = 0
        for i in range(values.shape[1] if low[r] else 0):
            while count < low[r]:
                held |= uint64(data[at]) << uint64(count)
                count += 8
                at += 1
            values[r, i] = (values[r, i] << low[r]) + int32(held & uint64((1 << low[r]) - 1))
            held >>= uint64(low[r])
            count -= low[r]


def dithers(key, u, bins):
    _dithers(*halves(key), u, bins)


def round_dithered(v, inverse, u, values):
    _round(v, np.float32(inverse), u, values)
