# pyright: basic, reportArgumentType=false
"""The inner loops of `entropy` and `rans`, compiled by numba; see `native`. Pure."""

import numpy as np

from .models import BINS, ZERO_SYMBOL
from .native import (
    compiled,
    dither,
    energy_of,
    float32,
    inlined,
    int32,
    rotate,
    rotate_back,
    spread,
    uint8,
    uint16,
    uint32,
    uint64,
)  # fmt: skip
from .tiles import BLOCK, LANES, TILE

_RECIPROCALS = np.array([0, *((1 << 44) // f + 1 for f in range(1, 4096))], np.uint64)
"""x * this >> 44 is x // f for x < f * 2**20."""


# All indices are unsigned: those that may be negative cost a comparison each, which doubles the time.


@compiled
def rans_encode(symbols, which, table, states, words):
    """Fills `words`, which has room for one more, from the end; returns the first that is used."""
    lanes, width, entries = len(states), uint32(table.shape[1]), table.reshape(-1)
    at = uint32(len(words))
    first = (len(symbols) - 1) // lanes * lanes
    while first >= 0:
        own, tables = symbols[first : first + lanes], which[first : first + lanes]
        for i in range(len(own)):
            lane = uint32(len(own) - 1 - i)
            entry = entries[uint32(tables[lane]) * width + uint32(own[lane])]
            f = uint32(entry & uint32(0xFFFF))
            x = states[lane]
            full = x >= uint32(f << uint32(20))
            words[uint32(at - uint32(1))] = uint16(x & uint32(0xFFFF))
            at = uint32(at - uint32(full))
            x = uint32(x >> uint32(16)) if full else x
            quotient = uint32((uint64(x) * _RECIPROCALS[f]) >> uint64(44))
            states[lane] = uint32((quotient << uint32(12)) + (x - quotient * f) + uint32(entry >> uint32(16)))
        first -= lanes
    return at


@compiled
def rans_decode(words, which, table, states, symbols):
    """Returns the words used, -1 where there were not enough. `words` has as many more as there are lanes."""
    lanes, entries = len(states), table.reshape(-1)
    there = len(words) - lanes
    used = 0
    for first in range(0, len(which), lanes):
        own, tables = symbols[first : first + lanes], which[first : first + lanes]
        for lane in range(len(own)):
            x = states[lane]
            entry = entries[(uint32(tables[lane]) << uint32(12)) | (x & uint32(0xFFF))]
            x = uint32(
                uint32(entry & uint32(0xFFF)) * uint32(x >> uint32(12)) + ((entry >> uint32(12)) & uint32(0xFFF))
            )
            longer = uint32(uint32(x << uint32(16)) | uint32(words[uint32(used)]))  # read anyway: a branch costs more
            low = x < uint32(65536)
            x = longer if low else x
            used += low
            states[lane] = x
            own[lane] = uint8(entry >> uint32(24))
        if used > there:
            return -1
    return used


@inlined
def _rotate_tile(x, up, sign, lanes, v, energy, a, b):
    n = lanes * BLOCK
    for i in range(len(x)):
        a[i] = x[i] * up * sign[i]
    for i in range(len(x), n):
        a[i] = 0
    rotate(a, b, n // 2)
    energy_of(a, b, lanes)
    for i in range(n):
        v[i] = a[i]
    for i in range(lanes):
        energy[i] = b[i]


@compiled
def _rotate_all(x, up, sign, v, energy):
    a, b = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    whole = len(x) // TILE
    for t in range(whole):
        _rotate_tile(
            x[t * TILE : (t + 1) * TILE], up, sign, LANES, v[t * TILE : (t + 1) * TILE],
            energy[t * LANES : (t + 1) * LANES], a, b,
        )  # fmt: skip
    rest = energy[whole * LANES :]
    if len(rest):
        _rotate_tile(x[whole * TILE :], up, sign, len(rest), v[whole * TILE :], rest, a, b)


@inlined
def _quantize_tile(v, inverse, group, tile, low, high, lanes, symbols, which, b, u, k):
    n = lanes * BLOCK
    for i in range(lanes):
        b[i] = inverse[i]
        k[i] = group[i]
    spread(b, lanes)
    spread(k, lanes)
    dither(u, tile, low, high, n // 2)
    far = float32(ZERO_SYMBOL)
    for i in range(n):
        q = np.floor(v[i] * b[i] + (u[i] + float32(0.5)))
        q = -q if u[i] < 0 else q
        symbols[i] = uint8(int32(min(max(q, -far), far) + far))
    for i in range(n):
        which[i] = uint8(k[i] * uint8(BINS) + uint8(int32(abs(u[i]) * float32(2 * BINS))))


@compiled
def _quantize_all(v, inverse, group, low, high, symbols, which):
    b, u, k = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.uint8)
    whole = len(v) // TILE
    for t in range(whole):
        i, j, p, q = t * LANES, (t + 1) * LANES, t * TILE, (t + 1) * TILE
        _quantize_tile(v[p:q], inverse[i:j], group[i:j], t, low, high, LANES, symbols[p:q], which[p:q], b, u, k)
    rest = inverse[whole * LANES :]
    if len(rest):
        i, p = whole * LANES, whole * TILE
        _quantize_tile(v[p:], rest, group[i:], whole, low, high, len(rest), symbols[p:], which[p:], b, u, k)


@inlined
def _choose_tile(group, tile, low, high, lanes, which, u, k):
    n = lanes * BLOCK
    for i in range(lanes):
        k[i] = group[i]
    spread(k, lanes)
    dither(u, tile, low, high, n // 2)
    for i in range(n):
        which[i] = uint8(k[i] * uint8(BINS) + uint8(int32(abs(u[i]) * float32(2 * BINS))))


@compiled
def _choose_all(group, low, high, which):
    u, k = np.empty(TILE, np.float32), np.empty(TILE, np.uint8)
    whole = len(which) // TILE
    for t in range(whole):
        _choose_tile(
            group[t * LANES : (t + 1) * LANES], t, low, high, LANES, which[t * TILE : (t + 1) * TILE], u, k
        )  # fmt: skip
    rest = group[whole * LANES :]
    if len(rest):
        _choose_tile(rest, whole, low, high, len(rest), which[whole * TILE :], u, k)


@inlined
def _restore_tile(symbols, steps, tile, low, high, sign, down, lanes, x, a, b, u):
    n = lanes * BLOCK
    for i in range(lanes):
        b[i] = steps[i]
    spread(b, lanes)
    dither(u, tile, low, high, n // 2)
    for i in range(n):
        q = float32(symbols[i]) - float32(ZERO_SYMBOL)
        q = -q if u[i] < 0 else q
        a[i] = (q - u[i]) * b[i]
    rotate_back(a, b, n // 2)
    for i in range(len(x)):
        x[i] = a[i] * sign[i] * down


@compiled
def _restore_all(symbols, steps, low, high, sign, down, x):
    a, b, u = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    whole = len(x) // TILE
    for t in range(whole):
        p, q = t * TILE, (t + 1) * TILE
        step = steps[t * LANES : (t + 1) * LANES]
        _restore_tile(symbols[p:q], step, t, low, high, sign, down, LANES, x[p:q], a, b, u)
    rest = steps[whole * LANES :]
    if len(rest):
        p = whole * TILE
        _restore_tile(symbols[p:], rest, whole, low, high, sign, down, len(rest), x[p:], a, b, u)


def halves(key):
    return np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)


def rotate_blocks(x, up, sign, v, energy):
    _rotate_all(x, np.float32(up), sign, v, energy)


def quantize_blocks(v, inverse, group, key, symbols, which):
    _quantize_all(v, inverse, group, *halves(key), symbols, which)


def choose_tables(group, key, which):
    _choose_all(group, *halves(key), which)


def restore_blocks(symbols, steps, key, sign, down, x):
    _restore_all(symbols, steps, *halves(key), sign, np.float32(down), x)
