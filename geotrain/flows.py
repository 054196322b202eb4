"""Messages on directed links, some of which share an uplink or a downlink: who is sent when, and how fast. Pure.

Who sends at the same time over one end gets an equal part of it; what a slower link cannot use is left to the others.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from .base import COORDINATOR, Link
from .errors import PlanError

End = tuple[str, str]
"""(up or down, peer)."""

Ends = list[tuple[float, int, int]]
"""When links will be done with what they send: (time, link, version). A later version of a link takes its place."""


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What a directed link carries in a step, and how long it is busy with that."""

    src: str
    dst: str
    nbytes: float
    busy_s: float


class Flows:
    """Links by number, each with its queue. One that is alone at its ends carries what comes one after the other, and
    it is known at once when a message will have left (`carry`). `shared` ones are played through, since their speed
    depends on what else is under way (`enqueue`, `start`, `done`, `proceed`).

    Args:
        links: rates and latencies; a pair that is not among them has neither.
        up, down: bytes per second of the ends that all links of a peer share, by peer.
    """

    def __init__(self, links: Iterable[Link], up: Mapping[str, float], down: Mapping[str, float]) -> None:
        self._given = {(link.src, link.dst): link for link in links}
        self._caps = {"up": up, "down": down}
        self._numbers: dict[tuple[str, str], int] = {}
        self.latency: list[float] = []
        self._rate: list[float] = []
        self._free: list[float] = []
        self._busy: list[float] = []
        self._nbytes: list[float] = []
        self._at: dict[End, list[int]] = {}
        """Links by the shared end (up or down, peer) that they have."""
        self._waiting: list[deque[tuple[float, int, int, int]]] = []
        self._left: list[float] = []
        self._speed: list[float] = []
        self._since: list[float] = []
        self._began: list[float] = []
        self._version: list[int] = []
        self._now: dict[End, dict[int, float]] = {}
        """By shared end, what each link under way may use of it at the moment."""
        self._parts: dict[tuple[End, tuple[int, ...]], dict[int, float]] = {}

    def number(self, src: str, dst: str) -> int:
        if (src, dst) in self._numbers:
            return self._numbers[src, dst]
        given = self._given.get((src, dst), Link(src, dst, math.inf, 0.0))
        rate = given.rate_bytes_per_s
        for end, peer in (("up", src), ("down", dst)):
            cap = self._caps[end].get(peer, math.inf)
            rate = min(rate, cap)
            if cap < math.inf:
                self._at.setdefault((end, peer), []).append(len(self._rate))
        if not rate > 0:
            raise PlanError(f"the link from {src} to {dst} has no rate; give it one above 0")
        self._numbers[src, dst] = len(self._rate)
        self._rate.append(rate)
        self.latency.append(given.latency_s)
        for column in (self._free, self._busy, self._nbytes, self._left, self._speed, self._since, self._began):
            column.append(0.0)
        self._version.append(0)
        self._waiting.append(deque())
        return self._numbers[src, dst]

    @cached_property
    def shared(self) -> list[bool]:
        together = {link for links in self._at.values() if len(links) > 1 for link in links}
        return [link in together for link in range(len(self._rate))]

    @cached_property
    def from_coordinator(self) -> list[bool]:
        return [src == COORDINATOR for src, _ in self._numbers]

    @cached_property
    def _ends(self) -> list[list[End]]:
        shared = {end: links for end, links in self._at.items() if len(links) > 1}
        return [[end for end, links in shared.items() if link in links] for link in range(len(self._rate))]

    @cached_property
    def _near(self) -> list[list[int]]:
        """By link, all that have a shared end with it, itself too."""
        return [sorted({other for end in ends for other in self._at[end]}) for ends in self._ends]

    def carry(self, link: int, nbytes: float, now: float) -> float:
        """When a message that is ready now has left over a link of its own."""
        seconds = nbytes / self._rate[link]
        self._nbytes[link] += nbytes
        self._busy[link] += seconds
        self._free[link] = left = max(now, self._free[link]) + seconds
        return left

    def enqueue(self, link: int, nbytes: float, what: tuple[int, int, int]) -> bool:
        """Whether the (shared) link is idle, so that it must be started."""
        self._nbytes[link] += nbytes
        self._waiting[link].append((nbytes, *what))
        return len(self._waiting[link]) == 1

    def start(self, link: int, now: float) -> Ends:
        """Sends the next message; gives when it and the others at its ends will have left, (time, link, version)."""
        self._left[link], self._since[link], self._speed[link] = self._waiting[link][0][0], now, 0.0
        self._began[link] = now
        return self._share(link, now)

    def done(self, link: int) -> tuple[int, int, int]:
        """The message that has left: (message, copy, microbatch)."""
        return self._waiting[link].popleft()[1:]

    def proceed(self, link: int, now: float) -> Ends:
        """After `done`: the next message, or its part of the ends for the others."""
        self._busy[link] += now - self._began[link]
        self._began[link] = now
        if self._waiting[link]:
            self._left[link], self._since[link] = self._waiting[link][0][0], now
            return [self._end(link, now)]
        self._speed[link] = 0.0
        return self._share(link, now)

    def current(self, link: int, version: int) -> bool:
        return self._version[link] == version

    def loads(self) -> tuple[LinkLoad, ...]:
        return tuple(LinkLoad(src, dst, self._nbytes[i], self._busy[i]) for (src, dst), i in self._numbers.items())

    def _share(self, changed: int, now: float) -> Ends:
        """Divide the ends of a link that begins or stops among what is under way there."""
        for end in self._ends[changed]:
            self._now[end] = self._part(end)
        again: Ends = []
        for link in self._near[changed]:
            if not self._waiting[link]:
                continue
            first, *more = self._ends[link]
            speed = self._now[first][link]
            for end in more:
                speed = min(speed, self._now[end][link])
            if speed != self._speed[link]:
                self._left[link] = max(0.0, self._left[link] - self._speed[link] * (now - self._since[link]))
                self._since[link], self._speed[link] = now, speed
                again.append(self._end(link, now))
        return again

    def _end(self, link: int, now: float) -> tuple[float, int, int]:
        self._version[link] += 1
        return now + self._left[link] / self._speed[link], link, self._version[link]

    def _part(self, end: End) -> dict[int, float]:
        """What each link under way at one end may use: equal parts, but no more than its own rate."""
        active = tuple(link for link in self._at[end] if self._waiting[link])
        if (end, active) not in self._parts:
            kind, peer = end
            left, parts = self._caps[kind][peer], dict[int, float]()
            for count, link in enumerate(sorted(active, key=lambda i: (self._rate[i], i))):
                parts[link] = min(self._rate[link], left / (len(active) - count))
                left -= parts[link]
            self._parts[end, active] = parts
        return self._parts[end, active]
