"""Sizes of things in a byte: eighths of an octave below a power of two. Pure."""

from functools import lru_cache

import torch

EIGHTHS = (1.0, 1.0905077, 1.1892071, 1.2968396, 1.4142135, 1.5422108, 1.6817929, 1.8340081)
"""2**(i/8), to be read as float32."""

ZERO = 255
"""The scale of a block of zeros."""


@lru_cache(maxsize=1)
def reaches() -> torch.Tensor:
    """(256,) float32, falling: 2**(7 - i/8), and 0 for `ZERO`."""
    up = torch.tensor([EIGHTHS[-i % 8] for i in range(256)], dtype=torch.float32)
    reach = up * torch.tensor([2.0 ** (7 - -(-i // 8)) for i in range(256)], dtype=torch.float32)
    reach[ZERO] = 0.0
    return reach


def scales_of(reach: torch.Tensor) -> torch.Tensor:
    """The scale (int64) of the least reach that covers; what is too small for all of them has 254."""
    rising = reaches().flip(0).to(reach.device)
    scale = ZERO - torch.searchsorted(rising, reach.contiguous())
    return torch.where(reach > 0, scale.clamp(0, ZERO - 1), ZERO)
