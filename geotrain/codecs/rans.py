"""Entropy coding against known tables: interleaved range asymmetric numeral systems (rANS). Pure.

    states   u32 for each lane, as the decoder starts
    words    u16, in the order in which the decoder takes them                (little-endian)

Symbol i belongs to lane i % lanes; there is a lane for each 2048 symbols, rounded down to a power of two, 512 at most.
Each table's frequencies add up to 4096, and a symbol of frequency f and cumulative frequency c takes
log2(4096 / f) bits. Decoding symbol i: slot = state % 4096 names it, state = f * (state // 4096) + slot - c, and if
that is below 2**16 the next word w makes it state * 2**16 + w. At the end all states are 2**16 and no word is left.

J. Duda, https://arxiv.org/abs/1311.2540; the interleaving is F. Giesen's, https://arxiv.org/abs/1402.3392.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import RemoteProtocolError
from .fast import entropy_kernels as kernels

Array = np.ndarray[Any, Any]

TOTAL = 4096
_LOW = 1 << 16


@dataclass(frozen=True, slots=True)
class Tables:
    """`symbols`: (tables, symbols) uint32, frequency | cumulative frequency << 16. `slots`: (tables, 4096) uint32, by
    slot: frequency | (slot - cumulative frequency) << 12 | symbol << 24."""

    symbols: Array
    slots: Array

    @property
    def frequency(self) -> Array:
        return self.symbols & np.uint32(0xFFFF)


def make_tables(frequency: Array) -> Tables:
    """From (tables, symbols) frequencies; each row adds up to 4096, and no symbol has all of them."""
    frequency = frequency.astype(np.uint32)
    start = np.cumsum(frequency, 1, dtype=np.uint32) - frequency
    symbol = np.stack([np.repeat(np.arange(len(row), dtype=np.uint32), row) for row in frequency])
    f, c = np.take_along_axis(frequency, symbol, 1), np.take_along_axis(start, symbol, 1)
    inside = np.arange(TOTAL, dtype=np.uint32) - c
    return Tables(frequency | start << np.uint32(16), f | inside << np.uint32(12) | symbol << np.uint32(24))


def lanes_of(count: int) -> int:
    return 1 << min(max(count // 2048, 1).bit_length() - 1, 9)


def encode(symbols: Array, which: Array, tables: Tables) -> bytes:
    """`symbols` and `which` (the table of each): uint8, one dimension."""
    lanes = lanes_of(len(symbols))
    states = np.full(lanes, _LOW, np.uint32)
    if native := kernels(torch.device("cpu")):
        words = np.empty(len(symbols) + 1, np.uint16)
        first = native.rans_encode(symbols, which, tables.symbols, states, words)
        return states.tobytes() + words[first:].tobytes()
    state = states.astype(np.uint64)
    taken: list[Array] = []
    for first in range((len(symbols) - 1) // lanes * lanes, -1, -lanes):
        symbol, table = symbols[first : first + lanes], which[first : first + lanes]
        entry = tables.symbols[table, symbol].astype(np.uint64)
        f = entry & np.uint64(0xFFFF)
        x = state[: len(symbol)]
        full = x >= f << np.uint64(20)
        taken.append((x[full] & np.uint64(0xFFFF)).astype(np.uint16))
        x[full] >>= np.uint64(16)
        x[:] = (x // f << np.uint64(12)) + x % f + (entry >> np.uint64(16))
    return state.astype("<u4").tobytes() + b"".join(part.astype("<u2").tobytes() for part in reversed(taken))


def decode(data: memoryview, which: Array, tables: Tables) -> Array:
    """The symbols, uint8. Raises `RemoteProtocolError` where `data` is not exactly what `encode` writes."""
    lanes = lanes_of(len(which))
    if data.nbytes < 4 * lanes or data.nbytes % 2:
        raise RemoteProtocolError("an entropy-coded message was cut")
    states = np.frombuffer(data[: 4 * lanes], "<u4").astype(np.uint32)
    words = np.frombuffer(data[4 * lanes :], "<u2").astype(np.uint16)
    symbols = np.empty(len(which), np.uint8)
    if native := kernels(torch.device("cpu")):
        room = np.concatenate([words, np.zeros(lanes, np.uint16)])  # a whole step is read before it is checked
        used = native.rans_decode(room, which, tables.slots, states, symbols)
    else:
        used = _decode(words, which, tables, states, symbols)
    if used != len(words) or (states != _LOW).any():
        raise RemoteProtocolError("an entropy-coded message does not end where it should")
    return symbols


def _decode(words: Array, which: Array, tables: Tables, states: Array, symbols: Array) -> int:
    """Fills `symbols` and leaves the last `states`. Returns the words used, -1 where there were not enough."""
    used, lanes = 0, len(states)
    for first in range(0, len(which), lanes):
        table = which[first : first + lanes]
        x = states[: len(table)]
        entry = tables.slots[table, x & np.uint32(TOTAL - 1)]
        x[:] = (entry & np.uint32(0xFFF)) * (x >> np.uint32(12)) + (entry >> np.uint32(12) & np.uint32(0xFFF))
        short = np.flatnonzero(x < _LOW)
        if used + len(short) > len(words):
            return -1
        x[short] = (x[short] << np.uint32(16)) | words[used : used + len(short)]
        used += len(short)
        symbols[first : first + lanes] = entry >> np.uint32(24)
    return used
