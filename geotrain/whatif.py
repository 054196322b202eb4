"""What if a machine or a line were another: peers and links changed by a phrase. Pure.

    peer attic up 100          its uplink, Mbit/s          peer attic speed x2        twice as fast
    peer attic down 200        its downlink                link attic shed 50 [12]    Mbit/s [milliseconds one way]
    peer attic memory 16       GiB                         remove attic

Several phrases are separated by semicolons.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from .base import Link, Peer
from .errors import ConfigError

_BYTES_PER_MBIT = 1e6 / 8
_SAY = (
    'say "peer NAME up 100", "peer NAME down 100", "peer NAME speed x2", "peer NAME memory 16", "link A B 50" or '
    '"remove NAME"'
)


def what_if(text: str, peers: Sequence[Peer], links: Sequence[Link]) -> tuple[list[Peer], list[Link]]:
    """The network after the changes. A faster uplink or downlink also lifts the links that it alone held back.

    Raises:
        ConfigError: a phrase is not understood, or names an unknown peer.
    """
    now = {peer.name: peer for peer in peers}
    lines = {(link.src, link.dst): link for link in links}
    for phrase in (part.split() for part in text.split(";") if part.strip()):
        match phrase:
            case ["peer", name, ("up" | "down") as end, rate]:
                _change_end(now, lines, name, end, _positive(rate, text) * _BYTES_PER_MBIT)
            case ["peer", name, "speed", factor] if factor.startswith("x"):
                peer = _known(now, name)
                now[name] = replace(peer, flops_per_s=peer.flops_per_s * _positive(factor[1:], text))
            case ["peer", name, "memory", gib]:
                now[name] = replace(_known(now, name), memory_bytes=int(_positive(gib, text) * 2**30))
            case ["link", src, dst, rate, *rest] if len(rest) < 2 and src != dst:
                most = min(_known(now, src).up_bytes_per_s, _known(now, dst).down_bytes_per_s)
                old = lines.get((src, dst), Link(src, dst, most, 0.0))
                latency_s = _positive(rest[0], text) / 1e3 if rest else old.latency_s
                pace = min(_positive(rate, text) * _BYTES_PER_MBIT, most)
                lines[src, dst] = Link(src, dst, pace, latency_s)
            case ["remove", name]:
                del now[_known(now, name).name]
                lines = {ends: link for ends, link in lines.items() if name not in ends}
            case _:
                raise ConfigError(f"--what-if: {' '.join(phrase)!r} is not understood; {_SAY}")
    return list(now.values()), list(lines.values())


def _change_end(
    now: dict[str, Peer], lines: dict[tuple[str, str], Link], name: str, end: str, rate_bytes_per_s: float
) -> None:
    peer = _known(now, name)
    before = peer.up_bytes_per_s if end == "up" else peer.down_bytes_per_s
    changes = {f"{end}_bytes_per_s": rate_bytes_per_s}
    now[name] = replace(peer, **changes)
    for ends, link in lines.items():
        if name != ends[end == "down"]:
            continue
        held = math.isclose(link.rate_bytes_per_s, before, rel_tol=1e-6)
        other = now.get(ends[end == "up"])
        most = math.inf if other is None else other.down_bytes_per_s if end == "up" else other.up_bytes_per_s
        rate = min(most, rate_bytes_per_s) if held else min(link.rate_bytes_per_s, rate_bytes_per_s)
        lines[ends] = replace(link, rate_bytes_per_s=rate)


def _known(peers: dict[str, Peer], name: str) -> Peer:
    if name not in peers:
        raise ConfigError(f"--what-if: there is no peer {name!r}; there are {', '.join(peers)}")
    return peers[name]


def _positive(word: str, text: str) -> float:
    if re.fullmatch(r"\d+(\.\d*)?|\.\d+", word) and 0 < float(word) < math.inf:
        return float(word)
    raise ConfigError(f"--what-if: {word!r} in {text!r} is no number above 0; {_SAY}")
