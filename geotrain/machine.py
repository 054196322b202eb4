"""What this machine can do: its device, its speed, its memory; measured, not typed in. I/O."""

import contextlib
import ctypes
import os
import platform
import time

import torch

from .errors import ConfigError

_SIZE = 512
_BURSTS = 8
_BURST_S = 0.02
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""From glibc's malloc.h."""


def pick_device(name: str) -> torch.device:
    """`auto` is an accelerator if there is one. Raises `ConfigError` for one that this machine lacks."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigError(f"this machine has no device {name!r}; use auto or cpu") from None
    return device


def measured_flops_per_s(device: torch.device, threads: int | None) -> float:
    """Floating-point operations a second of float32 matrix products of 512 x 512, 2 x 512^3 each: the best of
    eight bursts of 20 ms, since others may use the machine meanwhile."""
    if threads is not None:
        torch.set_num_threads(threads)
    left, right = (torch.randn(_SIZE, _SIZE, device=device) for _ in range(2))
    best = 0.0
    for _ in range(_BURSTS):
        products, start, elapsed = 0, time.perf_counter(), 0.0
        while elapsed < _BURST_S:
            torch.mm(left, right)
            if device.type != "cpu":
                torch.accelerator.synchronize()
            products, elapsed = products + 1, time.perf_counter() - start
        best = max(best, products * 2.0 * _SIZE**3 / elapsed)
    return best


def free_memory_bytes(device: torch.device) -> int:
    """Nine tenths of what is free now, so that the owner can still work."""
    if device.type == "cuda":
        return int(0.9 * torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            available = next(line for line in file if line.startswith("MemAvailable:"))
        free = int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return int(0.9 * free)


def allocate_tightly() -> None:
    """Makes glibc keep one heap for all threads, and large tensors outside it; elsewhere nothing.

    The compute thread's own heap would be made of pieces of 64 MiB, which tensors of some 10 MiB fill badly, and glibc
    takes ever larger ones from it, up to 32 MiB. A stage that ends in 16 MiB of logits held 155 MiB more than at its
    start, and holds 99 MiB like this, of which its tensors are 79; steps take 1 to 3% more processor time.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, 8 << 20)


def kind(device: torch.device, threads: int | None) -> str:
    """What this machine computes with. Machines of one kind differ only in speed: duty cap, clock, other load."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} {device.type} {threads or torch.get_num_threads()}"
