"""Random numbers that both ends of a link know: a hash of (message key, counter). Pure.

Integers only, so that every machine and device draws the same: 32-bit multiply and xor-shift rounds (the constants are
those of C. Wellons' `lowbias32`), with half of the key before each round. Element i of a message has counter i.
"""

import torch

FIRST, SECOND = 0x21F0AAAD, 0x735A2D97


def signed(word: int) -> int:
    """The low 32 bits as an int32 says them."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def words(key: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """`count` random words (int32) of the counters from `start`.

        h = i ^ low;  h ^= h >> 16;  h *= FIRST;  h ^= high;  h ^= h >> 15;  h *= SECOND;  h ^= h >> 15

    `low` and `high` are the halves of the 64-bit key; shifts are of unsigned numbers.
    """
    h = torch.arange(start, start + count, dtype=torch.int32, device=device)
    h ^= signed(key)
    h ^= (h >> 16) & 0xFFFF
    h *= signed(FIRST)
    h ^= signed(key >> 32)
    h ^= (h >> 15) & 0x1FFFF
    h *= signed(SECOND)
    h ^= (h >> 15) & 0x1FFFF
    return h
