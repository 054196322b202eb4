"""Who has what of the frozen weights, and who should give it to whom. Pure.

A stage that moves, or a peer that joins, needs tensors that others have fetched already. It takes each from the peer
that has it and is linked best, unless the coordinator itself is faster.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median

from .base import Link
from .protocol import Holder, NamedSpec

LEAST_BYTES = 1 << 20
"""What takes less says little of a rate: most of it may still be under way when the last byte is written."""


class Holdings:
    """The tensors of each peer by digest, and how fast the coordinator has served peers."""

    def __init__(self) -> None:
        self._has: dict[str, set[str]] = {}
        self._rates: dict[str, float] = {}

    def has(self, peer: str, digests: Iterable[str]) -> None:
        """A peer has these now."""
        self._has.setdefault(peer, set()).update(digests)

    @property
    def digests(self) -> Mapping[str, Collection[str]]:
        """Of what each peer has, by peer."""
        return self._has

    def served(self, peer: str, nbytes: int, seconds: float) -> None:
        """The coordinator has sent a peer so many bytes."""
        if nbytes >= LEAST_BYTES and seconds > 0:
            self._rates[peer] = nbytes / seconds

    def holders(
        self, peer: str, wanted: Sequence[NamedSpec], addresses: Mapping[str, str], links: Sequence[Link]
    ) -> tuple[Holder, ...]:
        """Which of the tensors with a digest that a peer lacks it should ask for at which of these addresses (by peer).
        The rest, and what it does not get there, is the coordinator's to give."""
        mine = self._has.get(peer, set[str]())
        least = self._rates.get(peer, median(self._rates.values()) if self._rates else 0.0)
        rates = {link.src: link.rate_bytes_per_s for link in links if link.dst == peer}
        sources = [name for name in addresses if name != peer and rates.get(name, 0.0) > least]
        sources.sort(key=lambda name: (-rates[name], name))
        found: dict[str, list[str]] = {}
        for tensor in wanted:
            if tensor.digest and tensor.digest not in mine:
                source = next((name for name in sources if tensor.digest in self._has.get(name, ())), None)
                if source is not None:
                    found.setdefault(source, []).append(tensor.name)
        return tuple(Holder(addresses[source], tuple(names)) for source, names in found.items())
