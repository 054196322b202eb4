"""What every planner must respect: the runtime's own memory, and where a cut may be. Pure."""

from collections.abc import Sequence

from ..graph import OpGraph
from ..graph.cut import Cut
from ..graph.ir import op_refs

GIB = 2**30

RUNTIME_BYTES = int(0.45 * GIB)
"""What a peer's process holds whatever its stage: Python, torch and gRPC after one optimizer step took 0.31
GiB (0.36 with hivemind) on Linux; the rest is for buffers that the allocator and the sockets keep."""


def allowed_cuts(graph: OpGraph, cuts: Sequence[Cut]) -> list[Cut]:
    """Those that leave all ops touching one buffer that the forward pass changes in one stage."""
    spans: dict[str, tuple[int, int]] = {}
    for i, op in enumerate(graph.ops):
        for name in op_refs(op):
            if name in graph.buffers and graph.buffers[name].mutated:
                spans[name] = (spans.get(name, (i, i))[0], i)
    return [cut for cut in cuts if not any(first < cut.op_index <= last for first, last in spans.values())]
