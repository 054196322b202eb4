"""The random rotation: blocks of 64 elements, 16 to a tile, signed and Hadamard-transformed. Pure.

A block's 64 elements become 64 sums of all of them under signs: what stands out in one channel is spread over all, and
any block looks like Gaussian noise to a quantizer. The last block is filled up with zeros; the last tile may have
fewer blocks (lanes). Element i of a tile is first taken times its sign: bit i % 32 of word i // 32 of the 32 words of
counters -32 to -1, a set bit for minus. Then six times

    y[i] = x[2i] + x[2i + 1],   y[i + n/2] = x[2i] - x[2i + 1]          (n = 64 * lanes)

which leaves coefficient j of lane l at j * lanes + l: the butterflies run over whole vectors, and so does all that
follows. Not normalized: a coefficient is up to 64 times the largest element. The inverse, but for a factor of 64, is
the same backwards. Dither: the coefficients of tile t at i and i + n/2 have the low and the high half of the word with
counter 512 t + i, as (half - 32767.5) / 65536: uniform in (-1/2, 1/2), and exact in float32.
"""

from collections.abc import Iterator

import torch

from .noise import words

BLOCK, LANES = 64, 16
TILE = BLOCK * LANES


def blocks_of(numel: int) -> int:
    return -(-numel // BLOCK)


def spans(numel: int) -> Iterator[tuple[int, int, int]]:
    """(first tile, tiles, lanes): the whole tiles, and the rest."""
    whole, rest = divmod(blocks_of(numel), LANES)
    if whole:
        yield 0, whole, LANES
    if rest:
        yield whole, 1, rest


def tiles(x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first tile, (tiles, 64 * lanes)) of the elements."""
    for first, count, lanes in spans(x.numel()):
        part = x[first * TILE : first * TILE + count * lanes * BLOCK]
        fill = count * lanes * BLOCK - part.numel()
        yield first, (torch.nn.functional.pad(part, (0, fill)) if fill else part).view(count, -1)


def signs(key: int, device: torch.device) -> torch.Tensor:
    """1024 times +1 or -1, float32."""
    bits = words(key, -32, 32, device)[:, None] >> torch.arange(32, dtype=torch.int32, device=device)
    return (1 - 2 * (bits & 1)).to(torch.float32).view(-1)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """(tiles, n) -> (tiles, n)."""
    for _ in range(6):
        even, odd = x[:, 0::2], x[:, 1::2]
        x = torch.cat([even + odd, even - odd], 1)
    return x


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[1] // 2
    for _ in range(6):
        a, b = x[:, :half], x[:, half:]
        x = torch.stack([a + b, a - b], 2).view(-1, 2 * half)
    return x


def dither(key: int, first: int, count: int, width: int, device: torch.device) -> torch.Tensor:
    """(count, width) of the tiles from `first`, in (-1/2, 1/2); `width` is 1024 where count is not 1."""
    half = width // 2
    word = words(key, first * (TILE // 2), count * half, device).view(count, half)
    halves = torch.cat([word & 0xFFFF, (word >> 16) & 0xFFFF], 1)
    return (halves.to(torch.float32) - 32767.5) * 2.0**-16


def energies(v: torch.Tensor, lanes: int) -> torch.Tensor:
    """(tiles, lanes): the sum of squares of each block, halves added to halves, so that all machines round alike."""
    total = v * v
    while total.shape[1] > lanes:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total
