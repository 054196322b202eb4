"""What was measured, and the plans that follow from it. Pure."""

from collections.abc import Iterable, Sequence
from itertools import permutations

from .base import Link, LinkUse, Peer, Plan
from .config import JobConfig
from .graph import OpGraph
from .layout import Layout, lay_out


class Scheduler:
    """Plans for one job."""

    def __init__(self, job: JobConfig, graph: OpGraph) -> None:
        self._job, self._graph = job, graph
        self._uses: dict[tuple[str, str], LinkUse] = {}

    def saw(self, uses: Iterable[LinkUse]) -> None:
        for use in uses:
            if use.timed_bytes:
                self._uses[use.src, use.dst] = use

    def links(self, names: Sequence[str]) -> list[Link]:
        found: list[Link] = []
        for src, dst in permutations(names, 2):
            use, back = self._uses.get((src, dst)), self._uses.get((dst, src))
            if use is not None and back is not None:
                delay_s = max(0.0, ((use.delay_s or 0.0) + (back.delay_s or 0.0)) / 2)
                found.append(Link(src, dst, use.timed_bytes / max(use.busy_s, 1e-9), delay_s))
        return found

    def lay_out(self, peers: Sequence[Peer], epoch: int, given: Plan | None = None) -> Layout:
        """Raises `PlanError`."""
        links = self.links([peer.name for peer in peers])
        return lay_out(self._job, self._graph, peers, epoch, given, links)
