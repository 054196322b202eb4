# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Rows of small whole numbers, each by the table that suits it best, entropy-coded. Pure.

    kinds    u8 for each row: 255, all zeros; 40 + 4 (k - 1) + j, values of k >= 1 low bits sent as they are and the
             rest by table 34 + j; else the number of its table
    length   u32 of the next part
    symbols  rest + 72 of all other rows by rANS; -72 stands for a value that is in `far`
    far      i32 for each of those, in order
    low      k bits of each value, lowest first; rows in order, each in whole bytes          (little-endian)

Table t is of a rounded Gaussian (t even) or of a mixture of three, which has heavier tails (t odd), whose deviation is
2**((t // 2 + 1) / 2 - 7). Where the numbers were rounded with a dither that both ends know, there is one for each
quarter of its magnitude, as in `models`.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ..errors import RemoteProtocolError
from . import rans
from .fast import number_kernels as kernels
from .models import BINS, ZERO_SYMBOL, probabilities

Array = np.ndarray[Any, Any]

_TABLES, _WIDE, _MOST_LOW, _ZEROS = 40, 34, 24, 255
_SYMBOLS = 2 * ZERO_SYMBOL + 1
_SAMPLE = 512
"""Values of a row that are looked at to choose its table."""


def write(values: Array, bins: Array | None = None) -> bytes:
    """`values`: (rows, n) int32, below 2**30. `bins`: (rows, n) uint8, which quarter the dither is in."""
    n = values.shape[1]
    low = _low_bits(values)
    kinds = _choose(values, bins, low)
    symbols, far = _symbols(values, low, _reaches()[_table(kinds)])
    kinds[~values.any(1)] = _ZEROS
    coded = kinds != _ZEROS
    data = b""
    if coded.all():
        data = rans.encode(symbols.reshape(-1), _which(kinds, n, bins), _tables())
    elif coded.any():
        which = _which(kinds[coded], n, None if bins is None else bins[coded])
        data = rans.encode(symbols[coded].reshape(-1), which, _tables())
    low[~coded] = 0
    return b"".join([
        kinds.tobytes(), len(data).to_bytes(4, "little"), data, far.astype("<i4").tobytes(), _write_low(values, low)
    ])  # fmt: skip


def read(data: memoryview, rows: int, n: int, bins: Array | None = None) -> tuple[Array, int]:
    """(values, bytes that they took). Raises `RemoteProtocolError`."""
    kinds = np.frombuffer(data[:rows], np.uint8)
    start = rows + 4
    end = start + int.from_bytes(data[rows:start], "little")
    low = np.where(kinds >= _TABLES, (kinds.astype(np.int64) - _TABLES) // 4 + 1, 0)
    coded = kinds != _ZEROS
    low[~coded] = 0
    if data.nbytes < max(start, end) or (low > _MOST_LOW).any():
        raise RemoteProtocolError("a message of numbers was cut")
    values = np.zeros((rows, n), np.int32)
    if coded.any():
        which = _which(kinds[coded], n, None if bins is None else bins[coded])
        symbols = rans.decode(data[start:end], which, _tables()).reshape(-1, n)
        if native := kernels(torch.device("cpu")):
            far = native.to_values(symbols, coded, values)
        else:
            values[coded] = symbols.astype(np.int32) - ZERO_SYMBOL
            far = int(np.count_nonzero(symbols == 0))
        if far:
            start, end = end, end + 4 * far
            if data.nbytes < end:
                raise RemoteProtocolError("a message of numbers was cut")
            values[values == -ZERO_SYMBOL] = np.frombuffer(data[start:end], "<i4")
    elif end != start:
        raise RemoteProtocolError("a message of numbers is too long")
    start, end = end, end + int(((n * low + 7) // 8).sum())
    if data.nbytes < end:
        raise RemoteProtocolError("a message of numbers was cut")
    _read_low(np.frombuffer(data[start:end], np.uint8).copy(), low, values)
    return values, end


def _write_low(values: Array, low: Array) -> bytes:
    if native := kernels(torch.device("cpu")):
        data = np.empty(int(((values.shape[1] * low + 7) // 8).sum()), np.uint8)
        native.write_low(values, low, data)
        return data.tobytes()
    parts: list[bytes] = []
    for row in np.flatnonzero(low):
        bits: Array = (values[row][:, None] >> np.arange(low[row])) & 1
        parts.append(np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").tobytes())
    return b"".join(parts)


def _read_low(data: Array, low: Array, values: Array) -> None:
    """Puts them under the `values`."""
    if native := kernels(torch.device("cpu")):
        return native.read_low(data, low, values)
    n = values.shape[1]
    for row in np.flatnonzero(low):
        k = int(low[row])
        own, data = data[: (n * k + 7) // 8], data[(n * k + 7) // 8 :]
        bits = np.unpackbits(own, count=n * k, bitorder="little").reshape(n, k)
        values[row] = (values[row] << k) + (bits.astype(np.int32) << np.arange(k, dtype=np.int32)).sum(1)


def _low_bits(values: Array) -> Array:
    """So many that the mean magnitude of the rest is 5 at most."""
    every = max(values.shape[1] // _SAMPLE, 1)
    if native := kernels(torch.device("cpu")):
        size = np.empty(len(values))
        native.mean_magnitudes(values, every, size)
    else:
        size = np.abs(values[:, ::every]).mean(1, dtype=np.float64)
    return np.clip(np.ceil(np.log2(np.maximum(size, 1e-9) / 5)), 0, _MOST_LOW).astype(np.int64)


def _choose(values: Array, bins: Array | None, low: Array) -> Array:
    """The kind of each row: what its values take the fewest bits by."""
    rows, n = values.shape
    every = max(n // _SAMPLE, 1)
    bits = np.zeros((rows, _TABLES), np.int64)  # whole numbers, so that all machines choose the same
    if native := kernels(torch.device("cpu")):
        native.count_bits(values, low, every, values if bins is None else bins, bins is not None, _costs(), bits)
    else:
        symbols = (values[:, ::every] >> low[:, None]).astype(np.int64) + ZERO_SYMBOL
        symbols[(symbols < 0) | (symbols >= _SYMBOLS)] = 0
        at: Array = symbols + (np.arange(rows) * (BINS * _SYMBOLS))[:, None]
        if bins is not None:
            at += bins[:, ::every] * (np.where(low > 0, 0, _SYMBOLS))[:, None]
        count = np.bincount(at.reshape(-1), minlength=rows * BINS * _SYMBOLS).reshape(rows, -1)
        bits += count @ _costs()
    last = np.argmin(bits[:, _WIDE : _WIDE + 4], 1)
    kinds: Array = np.where(low > 0, _TABLES + 4 * (low - 1) + last, np.argmin(bits, 1))
    return kinds.astype(np.uint8)


def _symbols(values: Array, low: Array, reach: Array) -> tuple[Array, Array]:
    """(symbols, what is out of reach)."""
    symbols = np.empty(values.shape, np.uint8)
    if native := kernels(torch.device("cpu")):
        if not native.to_symbols(values, low, reach, symbols):
            return symbols, np.empty(0, np.int32)
        at = np.flatnonzero(symbols == 0)
        return symbols, values.reshape(-1)[at] >> low[at // values.shape[1]]
    rest = values >> low[:, None]
    far = np.abs(rest) > reach[:, None]
    symbols[:] = np.where(far, 0, rest + ZERO_SYMBOL)
    return symbols, rest[far]


def _table(kinds: Array) -> Array:
    return np.where(kinds < _TABLES, kinds, _WIDE + (kinds - _TABLES) % 4).astype(np.uint8)


def _which(kinds: Array, n: int, bins: Array | None) -> Array:
    """The rANS table of each value."""
    plain = kinds < _TABLES
    table = _table(kinds) * np.uint8(BINS)
    if bins is None:
        return np.repeat(table, n)
    return (table[:, None] + bins * plain[:, None].astype(np.uint8)).reshape(-1)


@lru_cache(maxsize=1)
def _distributions() -> Array:
    """(tables, bins, symbols)."""
    rows: list[Array] = []
    for t in range(_TABLES):
        s = (1.0, 1.4142135)[(t // 2 + 1) % 2] * 2.0 ** ((t // 2 + 1) // 2 - 7)
        shapes = [((0.5, 3), (1.0, 4), (2.0, 1)), ((1.0, 8),)][t % 2 == 0]
        for b in range(BINS):
            rows.append(np.sum([probabilities(s * wide, b) * weight for wide, weight in shapes], 0) / 8)
    return np.stack(rows).reshape(_TABLES, BINS, _SYMBOLS)


@lru_cache(maxsize=1)
def _reaches() -> Array:
    """(tables,): the largest value that has a chance of 2**-13 or more; larger ones are `far`."""
    likely: Array = np.any(_distributions() >= 2.0**-13, 1)[:, 1:-1]
    return np.where(likely, np.abs(np.arange(1 - ZERO_SYMBOL, ZERO_SYMBOL)), 0).max(1)


@lru_cache(maxsize=1)
def _tables() -> rans.Tables:
    """Table BINS * t + bin: frequencies of at least 1 within the reach, 2 for the sign of a `far` one."""
    within = np.abs(np.arange(-ZERO_SYMBOL, ZERO_SYMBOL + 1)) <= np.repeat(_reaches(), BINS)[:, None]
    chance = _distributions().reshape(-1, _SYMBOLS)
    frequency = np.where(within, (chance * (rans.TOTAL - 2 - within.sum(1))[:, None]).astype(np.int64) + 1, 0)
    frequency[:, 0] = 2
    frequency[np.arange(len(frequency)), frequency.argmax(1)] += rans.TOTAL - frequency.sum(1)
    return rans.make_tables(frequency)


@lru_cache(maxsize=1)
def _costs() -> Array:
    """(bins * symbols, tables) int64: 1/256 bits; a value without a frequency is `far`."""
    frequency = _tables().frequency.astype(np.float64)
    bits = np.rint(256 * np.where(frequency > 0, -np.log2(np.maximum(frequency, 1) / rans.TOTAL), 43))
    return np.ascontiguousarray(bits.reshape(_TABLES, BINS * _SYMBOLS).T.astype(np.int64))
