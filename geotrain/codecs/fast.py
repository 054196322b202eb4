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


@lru_cache(maxsize=3)
def _native(name: str) -> Any | None:
    try:
        return import_module(f"{__package__}.{name}")
    except (ImportError, RuntimeError):  # no numba, one that does not suit this NumPy, or no place for its cache
        return None
