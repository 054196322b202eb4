"""Which of n places are taken, in the fewest bits that Rice codes of the gaps need. Pure.

    low     u8: b, how many low bits of a gap are sent as they are
    count   u32: places
    unary   for each place gap >> b zeros and a one; the gap is the number of free places before it, since the last one
    rest    b bits for each place, lowest first                (each part in whole bytes, lowest bit of a byte first)

The b is the one that makes the whole smallest. With b = 0 this is a bitmap; else it is what Rice codes take, laid out
so that all of it is read at once (P. Elias 1974, R. Fano 1971).
"""

from typing import Any

import numpy as np

from ..errors import RemoteProtocolError

Array = np.ndarray[Any, Any]

_HEAD, _MOST_LOW = 5, 31


def write(places: Array) -> bytes:
    """`places`: rising, int64."""
    gaps = np.diff(places, prepend=-1) - 1
    low = min(range(_MOST_LOW + 1), key=lambda b: _bits(gaps, b))
    high = gaps >> low
    unary = np.zeros(int(high.sum()) + len(gaps), np.uint8)
    unary[np.cumsum(high + 1) - 1] = 1
    rest = ((gaps[:, None] >> np.arange(low)) & 1).astype(np.uint8)
    head = low.to_bytes(1, "little") + len(gaps).to_bytes(4, "little")
    return head + b"".join(np.packbits(part.reshape(-1), bitorder="little").tobytes() for part in (unary, rest))


def read(data: memoryview, size: int) -> tuple[Array, int]:
    """(places below `size`, bytes that they took). Raises `RemoteProtocolError`."""
    count, low = int.from_bytes(data[1:_HEAD], "little"), data[0] if data.nbytes else 0
    if data.nbytes < _HEAD or count > size or low > _MOST_LOW:
        raise RemoteProtocolError("a list of places was cut or is too long")
    if not count:
        return np.empty(0, np.int64), _HEAD
    most = -(-((size >> low) + count) // 8)
    bits = np.unpackbits(np.frombuffer(data[_HEAD : _HEAD + most], np.uint8), bitorder="little")
    ones = np.flatnonzero(bits)[:count]
    if len(ones) < count:
        raise RemoteProtocolError("a list of places was cut")
    start = _HEAD + (int(ones[-1]) + 8) // 8
    end = start + (count * low + 7) // 8
    if data.nbytes < end:
        raise RemoteProtocolError("a list of places was cut")
    high = np.diff(ones, prepend=-1) - 1
    rest = np.unpackbits(np.frombuffer(data[start:end], np.uint8), count=count * low, bitorder="little")
    gaps = (high << low) + (rest.reshape(count, low).astype(np.int64) << np.arange(low)).sum(1)
    places = np.cumsum(gaps + 1) - 1
    if places[-1] >= size:
        raise RemoteProtocolError("a list of places goes beyond the end")
    return places, end


def _bits(gaps: Array, low: int) -> int:
    return int((gaps >> low).sum()) + len(gaps) * (1 + low)
