"""Decoders written from the codecs' docstrings alone, in NumPy, without torch: proof that the layouts can be
implemented elsewhere, and a second opinion on every bit."""

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
    else:
        x = hadamard(body, numel, int(name[2]), name.endswith("u"), key)
    most = F(3.3895314e38) if dtype == "bfloat16" else np.finfo(F).max
    return np.clip(np.nan_to_num(x, nan=0.0), -most, most)


def int8(body: bytes, numel: int, channels: int) -> np.ndarray:
    width = channels if channels >= 32 else 64
    rows = -(-numel // width)
    scales = (np.frombuffer(body[1 : 1 + 2 * rows], "<u2").astype(np.uint32) << 16).view(F)
    codes = np.frombuffer(body[1 + 2 * rows :], np.int8).astype(F)
    return codes * np.repeat(scales / F(127), width)[:numel] * power(body[0])


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
