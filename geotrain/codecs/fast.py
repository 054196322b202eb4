"""Finds the native kernels, if there are any, and what else makes this machine fast. Pure.

They come with numba, which is optional (`pip install geotrain[fast]`) and brings its own compiler; what it compiles is
kept on disk, so a second start compiles nothing. Without it, and on other devices, torch writes the same bytes.
"""

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch


def kernels(device: torch.device) -> Any | None:
    """The module `native`, or None where torch has to do."""
    return _native("native") if device.type == "cpu" else None


def entropy_kernels(device: torch.device) -> Any | None:
    """The module `native_entropy`, or None."""
    return _native("native_entropy") if device.type == "cpu" else None


def number_kernels(device: torch.device) -> Any | None:
    """The module `native_numbers`, or None."""
    return _native("native_numbers") if device.type == "cpu" else None


@lru_cache(maxsize=1)
def bfloat16_units() -> bool:
    """Whether this CPU multiplies matrices of bfloat16 several times as fast as those of float32."""
    cpu: Any = torch.cpu  # before torch 2.12 there is no public way to ask
    return bool(getattr(cpu, "_is_avx512_bf16_supported", bool)())


@lru_cache(maxsize=3)
def _native(name: str) -> Any | None:
    try:
        return import_module(f"{__package__}.{name}")
    except (ImportError, RuntimeError):  # no numba, one that does not suit this NumPy, or no place for its cache
        return None
