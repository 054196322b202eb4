"""What every planner must respect: the runtime's own memory, and where a cut may be. Pure."""

from ..graph.cut import allowed_cuts

__all__ = ["GIB", "RUNTIME_BYTES", "allowed_cuts"]

GIB = 2**30

RUNTIME_BYTES = int(0.45 * GIB)
"""What a peer's process holds whatever its stage: Python, torch and gRPC after one optimizer step took 0.31
GiB (0.36 with hivemind) on Linux; the rest is for buffers that the allocator and the sockets keep."""

