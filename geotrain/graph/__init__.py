"""Models as operator graphs: capture one, cut it, send it, run it."""

from .capture import capture
from .cut import Cut, boundary_bytes, candidate_cuts, cut, stage_edges, stage_modules
from .interpret import Program, RandomKey, seeded
from .ir import LOGITS, OpGraph, StageGraph
from .serial import from_bytes, graph_hash, to_bytes

__all__ = [
    "LOGITS",
    "Cut",
    "OpGraph",
    "Program",
    "RandomKey",
    "StageGraph",
    "boundary_bytes",
    "candidate_cuts",
    "capture",
    "cut",
    "from_bytes",
    "graph_hash",
    "seeded",
    "stage_edges",
    "stage_modules",
    "to_bytes",
]
