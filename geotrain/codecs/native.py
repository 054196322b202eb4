# pyright: basic, reportArgumentType=false
"""The inner loops of `rounded` and `hadamard`, compiled by numba. Pure.

Same bytes as the torch code there: each float operation is rounded by itself (no fast math, nothing fused), in the
same order. The loops are flat and of constant length for whole tiles, because only then LLVM makes vectors of them.
"""

from typing import Any

import numba
import numpy as np

from .noise import FIRST, SECOND
from .scales import EIGHTHS, ZERO
from .tiles import BLOCK, LANES, TILE

_numba: Any = numba  # it has no types
float32, int16, int32 = _numba.float32, _numba.int16, _numba.int32
uint8, uint16, uint32, uint64 = _numba.uint8, _numba.uint16, _numba.uint32, _numba.uint64
compiled = _numba.njit(nogil=True, cache=True)
inlined = _numba.njit(inline="always")

_MANTISSAS = np.array(EIGHTHS, np.float32).view(np.int32) & 0x7FFFFF


@compiled
def upper_halves(bits, halves):
    for i in range(len(bits)):
        halves[i] = int16((bits[i] + int32(0x7FFF) + ((bits[i] >> int32(16)) & int32(1))) >> int32(16))


@compiled
def encode_rows(x, up, width, scales, codes):
    up = float32(up)
    for r in range(len(scales)):
        row = x[r * width : (r + 1) * width]
        out = codes[r * width : (r + 1) * width]
        largest = np.zeros(1, np.float32)
        m = float32(0)
        for j in range(len(row)):
            m = max(m, abs(row[j] * up))
        largest[0] = m
        bits = 0 if m < float32(2.0**-100) else (largest.view(np.int32)[0] + 0xFFFF) >> 16
        scales[r] = int16(bits)
        largest.view(np.int32)[0] = int32(bits << 16)
        inverse = float32(0) if bits == 0 else float32(1) / (largest[0] * float32(1 / 127))
        for j in range(len(row)):
            out[j] = np.int8(min(max(np.rint(row[j] * up * inverse), float32(-127)), float32(127)))


@compiled
def decode_rows(codes, steps, down, width, x):
    down = float32(down)
    for r in range(len(steps)):
        row = codes[r * width : (r + 1) * width]
        out = x[r * width : (r + 1) * width]
        step = steps[r]
        for j in range(len(row)):
            out[j] = float32(row[j]) * step * down


# -- hadamard: lane l, coefficient j of a tile of L lanes is at j * L + l


@inlined
def rotate(a, b, half):
    for _ in range(3):
        for i in range(half):
            b[i] = a[2 * i] + a[2 * i + 1]
            b[i + half] = a[2 * i] - a[2 * i + 1]
        for i in range(half):
            a[i] = b[2 * i] + b[2 * i + 1]
            a[i + half] = b[2 * i] - b[2 * i + 1]


@inlined
def rotate_back(a, b, half):
    for _ in range(3):
        for i in range(half):
            b[2 * i] = a[i] + a[i + half]
            b[2 * i + 1] = a[i] - a[i + half]
        for i in range(half):
            a[2 * i] = b[i] + b[i + half]
            a[2 * i + 1] = b[i] - b[i + half]


@inlined
def dither(u, tile, low, high, half):
    start = uint32(tile * (TILE // 2))
    for i in range(half):
        h = uint32(uint32(start + i) ^ low)
        h = uint32((h ^ (h >> uint32(16))) * uint32(FIRST)) ^ high
        h = uint32((h ^ (h >> uint32(15))) * uint32(SECOND))
        h = uint32(h ^ (h >> uint32(15)))
        u[i] = (float32(int32(h & uint32(0xFFFF))) - float32(32767.5)) * float32(2.0**-16)
        u[i + half] = (float32(int32(h >> uint32(16))) - float32(32767.5)) * float32(2.0**-16)


@inlined
def _largest(a, b, lanes):
    half = lanes * BLOCK // 2
    for i in range(half):
        b[i] = max(abs(a[i]), abs(a[i + half]))
    while half > lanes:
        half //= 2
        for i in range(half):
            b[i] = max(b[i], b[i + half])


@inlined
def energy_of(a, b, lanes):
    half = lanes * BLOCK // 2
    for i in range(half):
        b[i] = a[i] * a[i] + a[i + half] * a[i + half]
    while half > lanes:
        half //= 2
        for i in range(half):
            b[i] = b[i] + b[i + half]


@inlined
def spread(k, lanes):
    """The first `lanes` values, 64 times."""
    done = lanes
    while done < lanes * BLOCK:
        for i in range(done):
            k[i + done] = k[i]
        done *= 2


@inlined
def _scales(reach, lanes, scales):
    bits = reach.view(np.int32)
    for i in range(lanes):
        above = 0
        for r in range(8):
            above += (bits[i] & 0x7FFFFF) > _MANTISSAS[r]
        scale = 8 * (7 + 127 - (bits[i] >> 23)) - above
        scales[i] = uint8(ZERO if bits[i] == 0 else max(0, min(scale, ZERO - 1)))


@inlined
def _encode_tile(x, up, sign, inverse, bits, cover, dithered, tile, low, high, lanes, scales, codes, a, b, u, c):
    n = lanes * BLOCK
    for i in range(len(x)):
        a[i] = x[i] * up * sign[i]
    for i in range(len(x), n):
        a[i] = 0
    rotate(a, b, n // 2)
    if cover > 0:
        energy_of(a, b, lanes)
        for i in range(lanes):
            u[i] = np.sqrt(b[i]) * cover
        _largest(a, b, lanes)
        for i in range(lanes):
            b[i] = min(b[i], u[i])
    else:
        _largest(a, b, lanes)
    _scales(b, lanes, scales)
    for i in range(lanes):
        b[i] = inverse[scales[i]]
    spread(b, lanes)
    middle, top = float32(1 << (bits - 1)), float32((1 << bits) - 1)
    if dithered:
        dither(u, tile, low, high, n // 2)
        for i in range(n):
            c[i] = uint8(int32(min(max(a[i] * b[i] + (u[i] + middle), float32(0)), top)))
    else:
        for i in range(n):
            c[i] = uint8(int32(min(max(a[i] * b[i] + middle, float32(0)), top)))
    at = 0
    if bits == 8:
        for i in range(n):
            codes[i] = c[i]
    if bits == 4 or bits == 6:
        q = n // 2
        for i in range(q):
            codes[i] = (c[i] & uint8(15)) | ((c[i + q] & uint8(15)) << uint8(4))
        at = q
    if bits == 2 or bits == 3 or bits == 6:
        q = n // 4
        shift = uint8(4 if bits == 6 else 0)
        three = uint8(3)
        out = codes[at : at + q]
        for i in range(q):
            out[i] = (
                ((c[i] >> shift) & three)
                | (((c[i + q] >> shift) & three) << uint8(2))
                | (((c[i + 2 * q] >> shift) & three) << uint8(4))
                | (((c[i + 3 * q] >> shift) & three) << uint8(6))
            )
        at += q
    if bits == 1 or bits == 3:
        q = n // 8
        shift = uint8(2 if bits == 3 else 0)
        out = codes[at : at + q]
        for i in range(q):
            out[i] = (c[i] >> shift) & uint8(1)
        for r in range(1, 8):
            for i in range(q):
                out[i] |= ((c[i + r * q] >> shift) & uint8(1)) << uint8(r)


@inlined
def _decode_tile(scales, codes, steps, bits, dithered, tile, low, high, sign, down, lanes, x, a, b, u, c):
    n = lanes * BLOCK
    at = 0
    if bits == 8:
        for i in range(n):
            c[i] = codes[i]
    if bits == 4 or bits == 6:
        q = n // 2
        for i in range(q):
            c[i] = codes[i] & uint8(15)
            c[i + q] = codes[i] >> uint8(4)
        at = q
    if bits == 2 or bits == 3 or bits == 6:
        q = n // 4
        shift = uint8(4 if bits == 6 else 0)
        part = codes[at : at + q]
        if bits != 6:
            for i in range(n):
                c[i] = 0
        for r in range(4):
            for i in range(q):
                c[i + r * q] |= ((part[i] >> uint8(2 * r)) & uint8(3)) << shift
        at += q
    if bits == 1 or bits == 3:
        q = n // 8
        shift = uint8(2 if bits == 3 else 0)
        part = codes[at : at + q]
        if bits == 1:
            for i in range(n):
                c[i] = 0
        for r in range(8):
            for i in range(q):
                c[i + r * q] |= ((part[i] >> uint8(r)) & uint8(1)) << shift
    for i in range(lanes):
        b[i] = steps[scales[i]]
    spread(b, lanes)
    middle = float32(1 << (bits - 1)) - float32(0.5)
    if dithered:
        dither(u, tile, low, high, n // 2)
        for i in range(n):
            a[i] = (float32(c[i]) - middle - u[i]) * b[i]
    else:
        for i in range(n):
            a[i] = (float32(c[i]) - middle) * b[i]
    rotate_back(a, b, n // 2)
    for i in range(len(x)):
        x[i] = a[i] * sign[i] * down


@compiled
def _encode(x, up, sign, inverse, bits, cover, dithered, low, high, scales, codes):
    a, b, u = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    c = np.empty(TILE, np.uint8)
    whole = len(x) // TILE
    for t in range(whole):
        _encode_tile(
            x[t * TILE : (t + 1) * TILE][:TILE], up, sign, inverse, bits, cover, dithered, t, low, high, LANES,
            scales[t * LANES : (t + 1) * LANES], codes[t * 128 * bits : (t + 1) * 128 * bits], a, b, u, c,
        )  # fmt: skip
    rest = scales[whole * LANES :]
    if len(rest):
        _encode_tile(
            x[whole * TILE :], up, sign, inverse, bits, cover, dithered, whole, low, high, len(rest),
            rest, codes[whole * 128 * bits :], a, b, u, c,
        )  # fmt: skip


@compiled
def _decode(scales, codes, steps, bits, dithered, low, high, sign, down, x):
    a, b, u = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    c = np.empty(TILE, np.uint8)
    whole = len(x) // TILE
    for t in range(whole):
        _decode_tile(
            scales[t * LANES : (t + 1) * LANES], codes[t * 128 * bits : (t + 1) * 128 * bits], steps, bits, dithered,
            t, low, high, sign, down, LANES, x[t * TILE : (t + 1) * TILE], a, b, u, c,
        )  # fmt: skip
    rest = scales[whole * LANES :]
    if len(rest):
        _decode_tile(
            rest, codes[whole * 128 * bits :], steps, bits, dithered, whole, low, high, sign, down, len(rest),
            x[whole * TILE :], a, b, u, c,
        )  # fmt: skip


def encode_blocks(x, up, sign, inverse, bits, cover, dithered, key, scales, codes):
    """See `hadamard.Hadamard.write`; writes to `scales` and `codes`."""
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    _encode(x, np.float32(up), sign, inverse, bits, np.float32(cover / 8), dithered, low, high, scales, codes)


def decode_blocks(scales, codes, steps, bits, dithered, key, sign, down, x):
    """See `hadamard.Hadamard.read`; writes to `x`."""
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    _decode(scales, codes, steps, bits, dithered, low, high, sign, np.float32(down), x)
