"""Decoders written from the codecs' docstrings alone, in NumPy, without torch: proof that the layouts can be
implemented elsewhere, and a second opinion on every bit."""

from itertools import pairwise

import numpy as np

F = np.float32
EIGHTHS = np.array([1.0, 1.0905077, 1.1892071, 1.2968396, 1.4142135, 1.5422108, 1.6817929, 1.8340081], F)
PLANES = {8: (8,), 6: (4, 2), 4: (4,), 3: (2, 1), 2: (2,), 1: (1,)}


def decode(name: str, payload: bytes, shape: tuple[int, ...], dtype: str, key: int) -> np.ndarray:
    """float32 elements in memory order (dtype float32 or bfloat16: only the range is taken from it)."""
    assert payload[0] == 0
    body, numel = payload[1:], int(np.prod(shape))
    if name == "bf16":
        x = (np.frombuffer(body, "<u2").astype(np.uint32) << 16).view(F)
    elif name == "int8":
        x = int8(body, numel, shape[-1])
    elif name.startswith("ec"):
        x = entropy(body, numel, shape[-1], name, key)
    else:
        x = hadamard(body, numel, int(name[2]), name.endswith("u"), key)
    most = F(3.3895314e38) if dtype == "bfloat16" else np.finfo(F).max
    return np.clip(np.nan_to_num(x, nan=0.0), -most, most)


def int8(body: bytes, numel: int, channels: int) -> np.ndarray:
    width = channels if channels >= 32 else 64
    rows = -(-numel // width)
    scales = (np.frombuffer(body[1 : 1 + 2 * rows], "<u2").astype(np.uint32) << 16).view(F)
    codes = np.frombuffer(body[1 + 2 * rows :], np.int8).astype(F)
    return codes * np.repeat(scales * F(1 / 127), width)[:numel] * power(body[0])


def hadamard(body: bytes, numel: int, bits: int, unbiased: bool, key: int) -> np.ndarray:
    blocks = -(-numel // 64)
    reach = np.array([EIGHTHS[-i % 8] * F(2.0 ** (7 - -(-i // 8))) for i in range(255)] + [0], F)
    steps = (reach * F(2 / (2**bits - 1)))[np.frombuffer(body[1 : 1 + blocks], np.uint8)]
    codes = np.frombuffer(body[1 + blocks :], np.uint8)
    out = []
    for tile in range(-(-blocks // 16)):
        step = steps[tile * 16 : tile * 16 + 16]
        n = 64 * len(step)
        code = unpack(codes[tile * 128 * bits :][: n * bits // 8], bits, n)
        v = code.astype(F) - F(2 ** (bits - 1) - 0.5)
        if unbiased:
            v = v - dither(key, tile, n)
        out.append(unrotate(v * np.tile(step, 64)) * signs(key)[:n])
    return np.concatenate(out)[:numel] * power(body[0], -6)


def unpack(packed: np.ndarray, bits: int, n: int) -> np.ndarray:
    code, done = np.zeros(n, np.int64), 0
    for w in PLANES[bits]:
        plane, packed = packed[: n * w // 8], packed[n * w // 8 :]
        values = np.concatenate([(plane >> (w * i)) & (2**w - 1) for i in range(8 // w)])
        code += values.astype(np.int64) << done
        done += w
    return code


def unrotate(v: np.ndarray) -> np.ndarray:
    half = len(v) // 2
    for _ in range(6):
        a, b = v[:half], v[half:]
        v = np.stack([a + b, a - b], 1).reshape(-1)
    return v


def words(key: int, counters: np.ndarray) -> np.ndarray:
    h = counters.astype(np.int64).astype(np.uint32) ^ np.uint32(key & 0xFFFFFFFF)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x21F0AAAD) ^ np.uint32(key >> 32)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x735A2D97)
    return h ^ (h >> np.uint32(15))


def signs(key: int) -> np.ndarray:
    word = words(key, np.arange(-32, 0))
    bits = (word[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return np.where(bits == 1, F(-1), F(1)).reshape(-1)


def dither(key: int, tile: int, n: int) -> np.ndarray:
    word = words(key, 512 * tile + np.arange(n // 2))
    halves = np.concatenate([word & np.uint32(0xFFFF), word >> np.uint32(16)])
    return (halves.astype(F) - F(32767.5)) * F(2.0**-16)


def power(exponent: int, more: int = 0) -> np.float32:
    """2 to a signed byte."""
    return F(2.0 ** ((exponent ^ 0x80) - 0x80 + more))


# -- ec and ecm: dithered, entropy-coded


def entropy(body: bytes, numel: int, channels: int, name: str, key: int) -> np.ndarray:
    error, whole = float("0." + name.split("-")[1]), name.startswith("ecm")
    blocks, length = -(-numel // 64), int.from_bytes(body[1:5], "little")
    change = rans(body[5 : 5 + length], np.zeros(blocks, np.int64), [deltas()])
    size = (64 + np.cumsum(change - 64)) % 128
    reach = np.array([EIGHTHS[-i % 8] * F(2.0 ** (7 - -(-i // 8))) for i in range(255)] + [0], F)
    sigma = reach[1::2]  # [127] is 0
    if whole:
        mean = sum(float(sigma[r]) ** 2 * int(n) for r, n in enumerate(np.bincount(size, minlength=128))) / blocks
        means = np.full(blocks, mean)
    else:
        each = channels // 64 if channels % 64 == 0 else 1
        means = []
        for row in sigma[size].astype(float).reshape(-1, each):
            mean = 0.0
            for value in row.tolist():
                mean += value * value
            means += [mean / each] * each
    wanted = (np.sqrt(12 * error * np.array(means)) * 0.9576033).astype(F)
    one = np.array([np.flatnonzero(reach[:255] >= w)[-1] if w else 255 for w in wanted])
    group = (one - 2 * size) >> 1
    step = np.where(group > 12, sigma[size] / F(8), reach[one])
    step = np.where(size == 127, F(0), step).astype(F)
    deviations = [0.0] + [float(EIGHTHS_DOUBLE[i % 4 * 2]) * 2.0 ** (i // 4) for i in range(-28, 13)]
    group = np.where(size == 127, 0, np.clip(group, -28, 12) + 29)
    needed = {g: [gaussian(deviations[g], quarter) for quarter in range(4)] for g in set(group.tolist())}
    tables = [needed[g][quarter] if g in needed else None for g in range(len(deviations)) for quarter in range(4)]
    noise, which, steps, widths = [], [], [], []
    for tile in range(-(-blocks // 16)):
        lanes = len(step[tile * 16 : tile * 16 + 16])
        u = dither(key, tile, 64 * lanes)
        noise.append(u)
        which.append(np.tile(group[tile * 16 : tile * 16 + 16], 64) * 4 + (np.abs(u) * 8).astype(np.int64))
        steps.append(np.tile(step[tile * 16 : tile * 16 + 16], 64))
        widths.append(64 * lanes)
    u = np.concatenate(noise)
    q = (rans(body[5 + length :], np.concatenate(which), tables) - 72).astype(F)
    v = (np.where(u < 0, -q, q) - u) * np.concatenate(steps)
    out, at = [], 0
    for width in widths:
        out.append(unrotate(v[at : at + width]) * signs(key)[:width])
        at += width
    return np.concatenate(out)[:numel] * power(body[0], -6)


EIGHTHS_DOUBLE = (1.0, 1.0905077, 1.1892071, 1.2968396, 1.4142135, 1.5422108, 1.6817929, 1.8340081)


def rans(data: bytes, which: np.ndarray, tables: list) -> np.ndarray:
    """One symbol after the other."""
    lanes = 1
    while lanes < 512 and lanes * 2 <= len(which) // 2048:
        lanes *= 2
    state = [int(x) for x in np.frombuffer(data[: 4 * lanes], "<u4")]
    words = iter(np.frombuffer(data[4 * lanes :], "<u2").tolist())
    symbols = []
    for i, table in enumerate(which):
        frequency = tables[table]
        start = np.cumsum(frequency) - frequency
        x, slot = state[i % lanes], state[i % lanes] % 4096
        symbol = int(np.flatnonzero(start <= slot)[-1])
        while frequency[symbol] == 0:
            symbol -= 1
        x = int(frequency[symbol]) * (x // 4096) + slot - int(start[symbol])
        state[i % lanes] = x * 65536 + next(words) if x < 65536 else x
        symbols.append(symbol)
    assert set(state) == {65536} and next(words, None) is None
    return np.array(symbols)


def deltas() -> np.ndarray:
    frequency = np.array([max(int(900 * 0.55 ** abs(d)), 3) for d in range(-64, 64)])
    frequency[64] += 4096 - frequency.sum()
    return frequency


def gaussian(s: float, quarter: int) -> np.ndarray:
    q = np.arange(-72, 73)
    if s == 0:
        probability = (q == 0).astype(float)
    else:
        us = [(quarter + (i + 0.5) / 4) / 8 for i in range(4)]
        total = np.zeros(145)
        for u in us:
            total = total + integral((q + (0.5 - u)) / s) - integral((q - (0.5 + u)) / s)
        probability = total / 4
    can = abs(q) <= int(8.8 * s + 1)
    frequency = np.where(can, (probability * (4096 - can.sum())).astype(int) + 1, 0)
    frequency[np.argmax(frequency)] += 4096 - frequency.sum()
    return frequency


def integral(x: np.ndarray) -> np.ndarray:
    half, ratio = [1.0], 0.9998779371377774
    for _ in range(640):
        half.append(half[-1] * ratio)
        ratio *= 0.9997558891748972
    density = half[:0:-1] + half
    table = [0.0]
    for a, b in pairwise(density):
        table.append(table[-1] + (a + b))
    sums = np.array(table) / table[-1]
    at = np.clip(x * 64 + 640, 0, 1279)
    low = at.astype(int)
    return sums[low] + (sums[low + 1] - sums[low]) * (at - low)
