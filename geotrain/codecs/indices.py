"""Which of n places are taken, in the fewest bits that Rice codes of the gaps need. Pure.

    low     u8: b, how many low bits of a gap are sent as they are
    count   u32: places
    unary   for each place gap >> b zeros and a one; the gap is the number of free places before it, since the last one
    rest    b bits for each place, lowest first                (each part in whole bytes, lowest bit of a byte first)

The b is the one that makes the whole smallest. With b = 0 this is a bitmap; else it is what Rice codes take, laid out
so that all of it is read at once (P. Elias 1974, R. Fano 1971). Reading takes memory for the places only, and no more
of them than the caller says there may be.
"""

from typing import Any

import numpy as np

from ..errors import RemoteProtocolError

Array = np.ndarray[Any, Any]

_HEAD, _MOST_LOW = 5, 31
_PIECE = 1 << 14
"""Bytes of the unary part, or places of the rest, that are looked at together: the bits of a piece lie in the cache."""


def write(places: Array) -> bytes:
    """`places`: rising, int64."""
    gaps = np.diff(places, prepend=-1) - 1
    low = min(range(_MOST_LOW + 1), key=lambda b: _bits(gaps, b))
    high = gaps >> low
    unary = np.zeros(int(high.sum()) + len(gaps), np.uint8)
    unary[np.cumsum(high + 1) - 1] = 1
    head = low.to_bytes(1, "little") + len(gaps).to_bytes(4, "little")
    return head + np.packbits(unary, bitorder="little").tobytes() + _write_low(gaps, low)


def read(data: memoryview, size: int, most: int) -> tuple[Array, int]:
    """(`most` places below `size` or fewer, bytes that they took). Raises `RemoteProtocolError`."""
    count, low = int.from_bytes(data[1:_HEAD], "little"), data[0] if data.nbytes else 0
    if data.nbytes < _HEAD or count > min(size, most) or low > _MOST_LOW:
        raise RemoteProtocolError("a list of places was cut or is too long")
    if not count:
        return np.empty(0, np.int64), _HEAD
    longest = -(-((size >> low) + count) // 8)
    ones = _ones(np.frombuffer(data[_HEAD : _HEAD + longest], np.uint8), count)
    if len(ones) < count:
        raise RemoteProtocolError("a list of places was cut")
    start = _HEAD + (int(ones[-1]) + 8) // 8
    end = start + (count * low + 7) // 8
    if data.nbytes < end:
        raise RemoteProtocolError("a list of places was cut")
    gaps = np.diff(ones, prepend=-1) - 1
    gaps <<= low
    _read_low(np.frombuffer(data[start:end], np.uint8), low, gaps)
    gaps += 1
    places = np.cumsum(gaps)
    places -= 1
    if places[-1] >= size:
        raise RemoteProtocolError("a list of places goes beyond the end")
    return places, end


def _ones(data: Array, count: int) -> Array:
    """Where the first `count` bits are set, or all if there are fewer."""
    ones, found = np.empty(count, np.int64), 0
    for first in range(0, len(data), _PIECE):
        at = np.flatnonzero(np.unpackbits(data[first : first + _PIECE], bitorder="little"))[: count - found]
        ones[found : found + len(at)] = at + 8 * first
        found += len(at)
        if found == count:
            break
    return ones[:found]


def _write_low(gaps: Array, low: int) -> bytes:
    pieces = (gaps[first : first + _PIECE, None] >> np.arange(low) & 1 for first in range(0, len(gaps), _PIECE))
    return b"".join(np.packbits(bits.astype(np.uint8), bitorder="little").tobytes() for bits in pieces)


def _read_low(data: Array, low: int, gaps: Array) -> None:
    """Adds them to the `gaps`."""
    for first in range(0, len(gaps) if low else 0, _PIECE):
        part = gaps[first : first + _PIECE]
        own = data[first // 8 * low :][: (len(part) * low + 7) // 8]
        bits = np.unpackbits(own, count=len(part) * low, bitorder="little").reshape(-1, low)
        part += (bits.astype(np.int64) << np.arange(low)).sum(1)


def _bits(gaps: Array, low: int) -> int:
    return int((gaps >> low).sum()) + len(gaps) * (1 + low)
