"""Decoders of top-k, of sparse tensors, of principal axes, of sized channels and of changes, written from their
docstrings alone, in NumPy."""

from functools import cache

import numpy as np

from tests.reference_codecs import EIGHTHS, decode, integral, power, rans, words

F = np.float32


def bits(data: bytes) -> list[int]:
    return [byte >> i & 1 for byte in data for i in range(8)]


def places(data: bytes) -> tuple[list[int], bytes]:
    """(places, what follows)."""
    low, count, stream = data[0], int.from_bytes(data[1:5], "little"), bits(data[5:])
    high, at, zeros = [], 0, 0
    while len(high) < count:
        if stream[at]:
            high.append(zeros)
            zeros = 0
        else:
            zeros += 1
        at += 1
    start = -(-at // 8) * 8
    found, before = [], -1
    for i, h in enumerate(high):
        rest = sum(stream[start + i * low + j] << j for j in range(low))
        before += (h << low) + rest + 1
        found.append(before)
    return found, data[5 + (start + count * low + 7) // 8 :]


def topk(payload: bytes, numel: int, kind: str) -> np.ndarray:
    assert payload[0] == 0
    body, x = payload[1:], np.zeros(numel, F)
    if kind == "adatopk":
        count = len(body) // 12
        x[np.frombuffer(body[4 * count :], "<i8")] = np.frombuffer(body[: 4 * count], "<f4")
        return x
    where, rest = places(body[4:])
    if kind == "topkb":
        x[where] = (np.frombuffer(rest, "<u2").astype(np.uint32) << 16).view(F)
        return x
    least, peak = (float(np.frombuffer(part[:4], "<f4")[0]) for part in (body, rest))
    codes = [nibble for byte in rest[4:] for nibble in (byte & 15, byte >> 4)]
    for at, code in zip(where, codes, strict=False):
        x[at] = F(least * (peak / least) ** ((code & 7) / 7)) * (-1 if code & 8 else 1)
    return x


def pack(payload: bytes, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    kind, body, numel = payload[0], payload[1:], int(np.prod(shape))
    if kind == 0:
        return np.frombuffer(body, dtype)
    if kind == 1:
        planes = np.frombuffer(body[9:], np.uint8).reshape(body[8], numel)
        least = int.from_bytes(body[:8], "little", signed=True)
        return np.array([least + int.from_bytes(planes[:, i].tobytes(), "little") for i in range(numel)], dtype)
    width = numel // shape[0] if kind == 3 else 1
    where, rest = places(body)
    x = np.zeros((numel // width, width), dtype)
    x[where] = np.frombuffer(rest, dtype).reshape(-1, width)
    return x.reshape(-1)


# -- numbers and principal axes


def probability(s: float, quarter: int) -> np.ndarray:
    q = np.arange(-72, 73)
    total = np.zeros(145)
    for i in range(4):
        u = (quarter + (i + 0.5) / 4) / 8
        total = total + integral((q + (0.5 - u)) / s) - integral((q - (0.5 + u)) / s)
    return total / 4


@cache
def table(t: int) -> list[np.ndarray]:
    """Its four."""
    s = (1.0, 1.4142135)[(t // 2 + 1) % 2] * 2.0 ** ((t // 2 + 1) // 2 - 7)
    if t % 2:
        p = [(probability(s / 2, b) * 3 + probability(s, b) * 4 + probability(2 * s, b)) / 8 for b in range(4)]
    else:
        p = [probability(s, b) for b in range(4)]
    q = np.arange(-72, 73)
    likely = np.any([row >= 2.0**-13 for row in p], 0) & (abs(q) < 72)
    within = abs(q) <= abs(q[likely]).max()
    tables = []
    for row in p:
        frequency = np.where(within, (row * (4094 - within.sum())).astype(int) + 1, 0)
        frequency[0] = 2
        frequency[np.argmax(frequency)] += 4096 - frequency.sum()
        tables.append(frequency)
    return tables


def numbers(data: bytes, rows: int, n: int, quarters: np.ndarray | None = None) -> tuple[np.ndarray, bytes]:
    """(values, what follows)."""
    kinds, length = data[:rows], int.from_bytes(data[rows : rows + 4], "little")
    coded = [r for r in range(rows) if kinds[r] != 255]
    low = [(kind - 40) // 4 + 1 if 40 <= kind < 255 else 0 for kind in kinds]
    which = np.array([
        4 * (34 + (kinds[r] - 40) % 4) if low[r] else 4 * kinds[r] + (0 if quarters is None else quarters[r, i])
        for r in coded for i in range(n)
    ])  # fmt: skip
    values, data = np.zeros((rows, n), np.int64), data[rows + 4 :]
    if coded:
        values[coded] = rans(data[:length], which, [f for t in range(40) for f in table(t)]).reshape(-1, n) - 72
    data = data[length:]
    for r, i in np.argwhere(values == -72).tolist():
        values[r, i] = int.from_bytes(data[:4], "little", signed=True)
        data = data[4:]
    for r in coded:
        if low[r]:
            size = (n * low[r] + 7) // 8
            stream, data = bits(data[:size]), data[size:]
            for i in range(n):
                values[r, i] = (values[r, i] << low[r]) + sum(stream[i * low[r] + j] << j for j in range(low[r]))
    return values, data


def dither(key: int, n: int) -> np.ndarray:
    word = words(key, np.arange((n + 1) // 2))
    halves = np.concatenate([word & np.uint32(0xFFFF), word >> np.uint32(16)])[:n]
    return (halves.astype(F) - F(32767.5)) * F(2.0**-16)


def octaves(sizes: np.ndarray) -> np.ndarray:
    """2**(7 - (s + 1/2)/4), of s - 64."""
    return np.array([EIGHTHS[-(2 * c + 1) % 8] * F(2.0 ** (7 - -(-(2 * c + 1) // 8))) for c in sizes + 64], F)


def channels(payload: bytes, shape: tuple[int, ...], error: float, key: int) -> np.ndarray:
    assert payload[0] == 0
    width, rows = shape[-1], int(np.prod(shape[:-1]))
    down, data = power(payload[1]), payload[2:]
    by_channel, data = numbers(data, 1, width)
    by_row, data = numbers(data, 1, rows)
    u = dither(key, width * rows).reshape(width, rows)
    values, data = numbers(data, width, rows, (abs(u) * 8).astype(int))
    assert not data
    v = (np.where(u < 0, -values, values).astype(F) - u) * octaves(by_channel[0])[:, None]
    return (v.T * (octaves(by_row[0]) * down * F((12 * error) ** 0.5))[:, None]).reshape(-1)


def delta(payload: bytes, shape: tuple[int, ...], before: np.ndarray | None, key: int) -> np.ndarray:
    """Of samples that are all new (None), or all known: `before` is what both ends remember of them."""
    assert payload[0] == 0
    body = payload[1 + -(-shape[0] // 8) :]
    length = int.from_bytes(body[:4], "little")
    assert bits(payload[1:])[: shape[0]] == [int(before is not None)] * shape[0]
    if before is None:
        return channels(body[4 : 4 + length], shape, 0.004, key)
    return decode("hd2", body[4 + length :], shape, "float32", key) + before.reshape(-1)


def rows(payload: bytes, shape: tuple[int, ...], inner: str, key: int) -> np.ndarray:
    assert payload[0] == 4
    where, rest = places(payload[5:])
    x = np.zeros(shape, F)
    x[where] = decode(inner, rest, (len(where), shape[1]), "float32", key).reshape(-1, shape[1])
    return x.reshape(-1)


def transform(payload: bytes, shape: tuple[int, ...], kind: str, key: int) -> np.ndarray:
    """Of a message with new axes and rows of 1024 elements at most."""
    assert payload[:2] == b"\0\1"
    width, rows = shape[-1], int(np.prod(shape[:-1]))
    data = payload[6:]
    rank = int.from_bytes(data[:2], "little")
    fine = np.frombuffer(data[2 : 2 + rank], np.int8).astype(float)
    codes, data = numbers(data[2 + rank :], rank, width)
    turn = np.linalg.qr((codes * 2.0 ** -fine[:, None]).T, mode="complete").Q.astype(F)  # noqa: TID251
    step, down, data = np.frombuffer(data[:4], "<f4")[0], power(data[4]), data[5:]
    sizes = np.ones(rows, F)
    if kind != "tcm":
        s, data = numbers(data, 1, rows)
        sizes = octaves(s[0])
    if kind == "tc":
        values, data = numbers(data, rank, rows)
        v = values.astype(F)
    else:
        u = dither(key, width * rows).reshape(width, rows)
        values, data = numbers(data, width, rows, (abs(u) * 8).astype(int))
        v = np.where(u < 0, -values, values).astype(F) - u
    assert not data
    return ((v.T @ (turn[:, : len(v)].T * step)) * (sizes[:, None] * down)).reshape(-1)
