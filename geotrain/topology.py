"""A network: peers with uplinks and downlinks, directed links with rates and delays. TOML text in and out. Pure.

    [[peer]]                      [[link]]
    name = "attic"                src = "attic"
    up_mbit_per_s = 20            dst = "kitchen"
    down_mbit_per_s = 100         mbit_per_s = 50     # optional
    duty = 0.5                    latency_ms = 12     # one way

A peer's uplink is shared by all links from it, its downlink by all links to it. What is left out does not limit. The
coordinator may be the end of a link; it is not a peer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from pydantic import Field

from .base import COORDINATOR, Link, Peer
from .errors import ConfigError
from .tables import Section, like
from .tables import parse as parse_tables

_BYTES_PER_MBIT = 1e6 / 8

_Rate = Annotated[float, Field(gt=0)]


class _PeerTable(Section):
    name: Annotated[
        str, like(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "at most 64 letters, digits, dots, dashes and underscores")
    ]
    region: str = ""
    flops: _Rate | None = None
    memory_gib: _Rate | None = None
    up_mbit_per_s: _Rate | None = None
    down_mbit_per_s: _Rate | None = None
    duty: Annotated[float, Field(gt=0, le=1)] = 1.0


class _LinkTable(Section):
    src: str
    dst: str
    mbit_per_s: _Rate | None = None
    latency_ms: Annotated[float, Field(ge=0, le=10_000)] = 0.0


class _Tables(Section):
    peer: tuple[_PeerTable, ...] = ()
    link: tuple[_LinkTable, ...] = ()


@dataclass(frozen=True, slots=True)
class TopologyPeer:
    """A machine as the file describes it. `flops` a second and `memory_bytes` are None where they are not told."""

    flops: float | None
    memory_bytes: int | None
    up_bytes_per_s: float
    down_bytes_per_s: float
    region: str
    duty: float


@dataclass(frozen=True)
class Topology:
    """Peers by name, in the file's order, and links. A rate without limit is `math.inf`."""

    peers: dict[str, TopologyPeer]
    links: list[Link]

    def take(self, n: int) -> "Topology":
        """The first `n` peers and the links among them. Raises `ConfigError` if there are fewer."""
        if not 1 <= n <= len(self.peers):
            raise ConfigError(f"the topology has {len(self.peers)} peers, not {n}; ask for fewer or use a larger one")
        names = list(self.peers)[:n]
        ends = {*names, COORDINATOR}
        links = [link for link in self.links if link.src in ends and link.dst in ends]
        return Topology({name: self.peers[name] for name in names}, links)

    def link(self, src: str, dst: str) -> Link:
        """That direction's delay, and its rate while nothing else uses its ends."""
        rate = min(self.up_bytes_per_s(src), self.down_bytes_per_s(dst))
        return self._by_ends.get((src, dst)) or Link(src, dst, rate, 0.0)

    def up_bytes_per_s(self, name: str) -> float:
        """What all links from a peer share."""
        return self.peers[name].up_bytes_per_s if name in self.peers else math.inf

    def down_bytes_per_s(self, name: str) -> float:
        """What all links to a peer share."""
        return self.peers[name].down_bytes_per_s if name in self.peers else math.inf

    @cached_property
    def _by_ends(self) -> dict[tuple[str, str], Link]:
        return {(link.src, link.dst): link for link in self.links}


def parse(text: str, source: str = "the topology") -> Topology:
    """The topology in a TOML text; `source` names it in errors. Raises `ConfigError`, one line."""
    tables = parse_tables(_Tables, text, source, None)
    if not tables.peer:
        raise ConfigError(f"{source}: it describes no peer; write a [[peer]] table, with a name, for each")
    _refuse_twice(source, "peer", [peer.name for peer in tables.peer])
    _refuse_twice(source, "link", [f"{link.src} to {link.dst}" for link in tables.link])
    peers = {peer.name: _peer(peer) for peer in tables.peer}
    for link in tables.link:
        for end in (link.src, link.dst):
            if end not in peers and end != COORDINATOR:
                raise ConfigError(f"{source}: a link names {end!r}; add a [[peer]] of that name or correct the link")
        if link.src == link.dst:
            raise ConfigError(f"{source}: a link from {link.src} to itself; remove it")
    if COORDINATOR in peers:
        raise ConfigError(f"{source}: {COORDINATOR!r} is not a peer's name; choose another")
    return Topology(peers, [_link(link, peers) for link in tables.link])


def to_toml(peers: Sequence[Peer], links: Sequence[Link]) -> str:
    """The text that describes these; `parse` reads it."""
    lines: list[str] = []
    for peer in peers:
        rates = {"up_mbit_per_s": peer.up_bytes_per_s, "down_mbit_per_s": peer.down_bytes_per_s}
        lines += ["[[peer]]", f'name = "{peer.name}"', *([f'region = "{peer.region}"'] if peer.region else [])]
        lines += [f"flops = {peer.flops_per_s:.4g}", f"memory_gib = {peer.memory_bytes / 2**30:.4f}"]
        lines += [f"{key} = {rate / _BYTES_PER_MBIT:.4f}" for key, rate in rates.items() if math.isfinite(rate)]
        lines.append("")
    for link in links:
        lines += ["[[link]]", f'src = "{link.src}"', f'dst = "{link.dst}"']
        if math.isfinite(link.rate_bytes_per_s):
            lines.append(f"mbit_per_s = {link.rate_bytes_per_s / _BYTES_PER_MBIT:.4f}")
        lines += [f"latency_ms = {link.latency_s * 1e3:.4f}", ""]
    return "\n".join(lines)


def _link(table: _LinkTable, peers: dict[str, TopologyPeer]) -> Link:
    """With the rate that it can have: no link outruns its ends."""
    rates = [_bytes_per_s(table.mbit_per_s)]
    if table.src in peers:
        rates.append(peers[table.src].up_bytes_per_s)
    if table.dst in peers:
        rates.append(peers[table.dst].down_bytes_per_s)
    return Link(table.src, table.dst, min(rates), table.latency_ms / 1e3)


def _peer(table: _PeerTable) -> TopologyPeer:
    memory = None if table.memory_gib is None else int(table.memory_gib * 2**30)
    up, down = _bytes_per_s(table.up_mbit_per_s), _bytes_per_s(table.down_mbit_per_s)
    return TopologyPeer(table.flops, memory, up, down, table.region, table.duty)


def _bytes_per_s(mbit_per_s: float | None) -> float:
    return math.inf if mbit_per_s is None else mbit_per_s * _BYTES_PER_MBIT


def _refuse_twice(source: str, what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{source}: {what} {name!r} is there twice; remove one")
