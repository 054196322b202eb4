"""What the network is like, from what was seen of it: rates, delays, shared ends, clocks, and what to probe. Pure.

    book = LinkBook()
    book.saw(uses, start_s, end_s)      # every step's `LinkUse`s of all receivers, and those of each survey
    links = book.links(names, now_s)    # for the planner and the simulator, with `up, down = book.caps()`
    book.probes(names, now_s, suspects) # pairs worth a test frame now, within 1% of what the run has sent
    book.doubtful(names, since_s)       # pairs that a plan which would use them should try first, with `book.test`

A link's rate is one over the mean seconds per byte, older steps fading: that is what a step pays for. What was too
short to fill a link says only that it is at least so fast: the largest of the last few counts, and only where nothing
better is known or it is newer and higher; it counts like the others once a full one follows it. Samples that differ by
more than `SHIFT` for `SHIFT_SAMPLES` times in a row are a change and not noise: the older ones are dropped.

When everything that leaves a peer at the same time is slower than each alone, they share its uplink: its capacity is
what they reach together, and each one's own rate stays what it was. So it is with downlinks.

Clocks differ. A message's delay by both ends' clocks is the true one plus their offset; the least one each way counts,
since a queue only adds. The sum of both ways is free of offsets; a way is taken as half of it.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import fmean, median, stdev

from .base import Link, LinkUse

FADE = 0.3
"""Weight of the newest sample against all before it."""

SHIFT = 0.25
SHIFT_SAMPLES = 3

WINDOW = 20
"""Samples kept for the spread and the low percentile."""

DELAY_SAMPLES = 12

FULL = 4.0
"""A sample of fewer bandwidth-delay products than this may not have filled the link."""

SHARED = 0.85
"""Flows that all get less than this part of what each gets alone share something."""

OVERLAP = 0.2
"""Flows that are busy together for less than this part of the time do not tell what they share."""

STALE_S = 60.0
"""A pair not measured for so long is worth a probe."""

FORGET_S = 120.0
"""What was last seen so long ago has no weight against a new sample."""

LEAST_PROBE, MOST_PROBE = 64 << 10, 512 << 10
_PROBE_S = 0.1

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A directed link as it is believed to be. `low_bytes_per_s`: nine of ten recent samples were faster. `spread`: the
    standard deviation of the rate, as a part of it. `guessed`: never measured, but from other links of both ends."""

    src: str
    dst: str
    rate_bytes_per_s: float
    low_bytes_per_s: float
    spread: float
    latency_s: float
    age_s: float
    guessed: bool = False

    @property
    def link(self) -> Link:
        return Link(self.src, self.dst, self.rate_bytes_per_s, self.latency_s)


@dataclass(frozen=True, slots=True)
class Probe:
    """A test frame of so many bytes that is worth sending."""

    src: str
    dst: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Rate:
    """What is kept of a rate: the faded mean of seconds per byte over full samples, recent full rates, and those of
    limited samples since the last full one."""

    seconds_per_byte: float = math.inf
    recent: tuple[float, ...] = ()
    limited: tuple[float, ...] = ()
    seen_s: float = -math.inf

    @property
    def bytes_per_s(self) -> float:
        """0 where nothing is known."""
        return max((1 / self.seconds_per_byte, *self.limited))

    @property
    def settled(self) -> bool:
        """Whether the last full sample is what is believed. Without one, a single sample is not: a first short frame
        says little of a fast link, and the next one is as long as that tells it to be."""
        if not self.recent:
            return len(self.limited) > 1
        return 1 / (1 + SHIFT) < self.recent[-1] * self.seconds_per_byte < 1 + SHIFT

    @property
    def low(self) -> float:
        """The tenth percentile of recent samples."""
        known = sorted(self.recent or self.limited)
        return known[len(known) // 10] if known else 0.0

    @property
    def spread(self) -> float:
        return stdev(self.recent) / fmean(self.recent) if len(self.recent) > 1 else 0.0


def with_sample(rate: Rate, bytes_per_s: float, at_s: float, limited: bool = False) -> Rate:
    """A rate after one more sample.

    >>> rate = with_sample(with_sample(Rate(), 1000.0, at_s=0.0), 500.0, at_s=1.0)
    >>> round(rate.bytes_per_s)  # 1 / (0.7 / 1000 + 0.3 / 500)
    769
    >>> round(with_sample(rate, 900.0, at_s=2.0, limited=True).bytes_per_s)
    900
    """
    if at_s - rate.seen_s > FORGET_S:
        rate = Rate()
    known = 1 / rate.seconds_per_byte
    if limited:
        last = (*rate.limited, bytes_per_s)[-SHIFT_SAMPLES:]
        slower = len(last) == SHIFT_SAMPLES and max(last) < known * (1 - SHIFT)
        return Rate(math.inf, (), last, at_s) if slower else replace(rate, limited=last, seen_s=at_s)
    faster = tuple(sample for sample in rate.limited if rate.recent and sample > known * (1 + SHIFT))
    recent = (*rate.recent, *faster, bytes_per_s)[-WINDOW:]
    older, last = recent[:-SHIFT_SAMPLES], recent[-SHIFT_SAMPLES:]
    if older and (max(last) < fmean(older) * (1 - SHIFT) or min(last) > fmean(older) * (1 + SHIFT)):
        return Rate(fmean(1 / sample for sample in last), last, (), at_s)
    mean = 1 / bytes_per_s if known == 0 else (1 - FADE) * rate.seconds_per_byte + FADE / bytes_per_s
    return Rate(mean, recent, (), at_s)


class LinkBook:
    """All that was seen of one network. Times are seconds on one clock, the coordinator's."""

    def __init__(self) -> None:
        self._rates: dict[Pair, Rate] = {}
        self._caps: dict[tuple[str, str], Rate] = {}
        self._delays: dict[Pair, deque[float]] = {}
        self._sent = self._probed = 0

    def saw(self, uses: Iterable[LinkUse], start_s: float, end_s: float, *, probe: bool = False) -> None:
        """What all receivers saw between two moments: in a step, or (`probe`) in a survey or of a test frame."""
        known = list(uses)
        for use in known:
            self._sent += 0 if probe else use.nbytes
            if use.delay_s is not None:
                self._delays.setdefault((use.src, use.dst), deque(maxlen=DELAY_SAMPLES)).append(use.delay_s)
        timed = [use for use in known if use.timed_bytes > 0 and use.busy_s > 0]
        span_s = max(end_s - start_s, *(use.busy_s for use in timed), 1e-9) if timed else 0.0
        together: set[Pair] = set()
        held: set[Pair] = set()
        for end in ("up", "down"):
            for peer, flows in _by_end(timed, end).items():
                overlapping = _union_s(flows, span_s) * (1 + OVERLAP) < sum(use.busy_s for use in flows)
                if len(flows) > 1 and overlapping:
                    together |= {(use.src, use.dst) for use in flows}
                    if self._shared(end, peer, flows, span_s, end_s):
                        held |= {(use.src, use.dst) for use in flows}
        for use in timed:
            pair = use.src, use.dst
            before, rate = self._rates.get(pair, Rate()), use.timed_bytes / use.busy_s
            if pair in held:
                self._rates[pair] = replace(before, seen_s=end_s)
                continue
            unfilled = use.timed_bytes < FULL * rate * 2 * (self._latency(pair) or 0.0)
            alone_unknown = pair in together and not before.recent
            self._rates[pair] = with_sample(before, rate, end_s, unfilled or alone_unknown)

    def estimates(self, names: Collection[str], now_s: float) -> list[Estimate]:
        """All pairs of `names`. What nothing is known of is missing."""
        rates = {pair: rate.bytes_per_s for pair, rate in self._rates.items()}
        delays = [delay for pair in rates if (delay := self._latency(pair)) is not None]
        found: list[Estimate] = []
        for pair in permutations(names, 2):
            src, dst = pair
            latency_s = self._latency(pair)
            if latency_s is None:
                latency_s = median(delays) if delays else 0.0
            rate = self._rates.get(pair)
            if rate is not None:
                age_s = now_s - rate.seen_s
                found.append(
                    Estimate(src, dst, rate.bytes_per_s, rate.low, rate.spread, latency_s, age_s),
                )
            elif rates:
                ups = [r for (a, _), r in rates.items() if a == src] or list(rates.values())
                downs = [r for (_, b), r in rates.items() if b == dst] or list(rates.values())
                guess = min(max(ups), max(downs))
                found.append(Estimate(src, dst, guess, min(*ups, *downs), 0.0, latency_s, math.inf, guessed=True))
        return found

    def links(self, names: Collection[str], now_s: float) -> list[Link]:
        return [estimate.link for estimate in self.estimates(names, now_s)]

    def caps(self) -> tuple[dict[str, float], dict[str, float]]:
        """Bytes per second that all links from (first) and to (second) a peer share, of those that showed it."""
        up, down = ({p: rate.bytes_per_s for (e, p), rate in self._caps.items() if e == end} for end in ("up", "down"))
        return up, down

    def offsets(self, names: Sequence[str]) -> dict[str, float]:
        """How far each peer's clock is ahead of the first one's, in seconds: along the pairs with the shortest round
        trips, each halved. Wrong by no more than half those round trips. Peers without a way to the first are missing.
        """
        found = {name: 0.0 for name in names[:1]}
        ways = [(self._round_trip(pair), pair) for pair in permutations(names, 2)]
        while True:
            nearest = min(
                ((trip, pair) for trip, pair in ways if trip is not None and pair[0] in found and pair[1] not in found),
                default=None,
            )
            if nearest is None:
                return found
            src, dst = nearest[1]
            found[dst] = found[src] + (min(self._delays[src, dst]) - min(self._delays[dst, src])) / 2

    def probes(
        self, names: Collection[str], now_s: float, suspects: Collection[Pair] = (), share: float = 0.01
    ) -> list[Probe]:
        """Test frames for `suspects`, which may have changed, then for pairs that were not measured for `STALE_S`, the
        oldest first. All test frames that were asked for stay within `share` of what the run sends otherwise."""
        budget = share * self._sent - self._probed
        chosen: list[Probe] = []
        for pair in sorted(permutations(names, 2), key=lambda pair: (pair not in suspects, self.seen_s(pair), pair)):
            due = pair in suspects or now_s - self.seen_s(pair) >= STALE_S
            if due and self._probe_bytes(pair) <= budget:
                chosen.append(self.test(pair))
                budget -= chosen[-1].nbytes
        return chosen

    def test(self, pair: Pair) -> Probe:
        """A test frame for a pair, whatever it costs."""
        probe = Probe(*pair, self._probe_bytes(pair))
        self._probed += probe.nbytes
        return probe

    def _probe_bytes(self, pair: Pair) -> int:
        rate = self._rates.get(pair, Rate()).bytes_per_s
        return int(min(MOST_PROBE, max(LEAST_PROBE, rate * _PROBE_S)))

    def seen_s(self, pair: Pair) -> float:
        """When a pair was measured last."""
        return self._rates.get(pair, Rate()).seen_s

    def doubtful(self, names: Collection[str], since_s: float) -> frozenset[Pair]:
        """Pairs that were not measured since then, or whose last measurement is not what is believed."""
        known = {pair for pair, rate in self._rates.items() if rate.seen_s >= since_s and rate.settled}
        return frozenset(permutations(names, 2)) - known

    def _shared(self, end: str, peer: str, flows: Sequence[LinkUse], span_s: float, at_s: float) -> bool:
        """Whether flows that overlap hold each other back at one end; keeps account of what it carries."""
        before = self._caps.get((end, peer))
        total = sum(use.timed_bytes for use in flows) / _union_s(flows, span_s)
        alone = [self._rates.get((use.src, use.dst), Rate()).bytes_per_s for use in flows]
        slower = all(use.timed_bytes / use.busy_s < SHARED * rate for use, rate in zip(flows, alone, strict=True))
        if slower:
            self._caps[end, peer] = with_sample(before or Rate(), total, at_s)
        elif before is not None and total > (1 + SHIFT) * before.bytes_per_s:
            del self._caps[end, peer]
        return slower

    def _round_trip(self, pair: Pair) -> float | None:
        there, back = self._delays.get(pair), self._delays.get((pair[1], pair[0]))
        return max(0.0, min(there) + min(back)) if there and back else None

    def _latency(self, pair: Pair) -> float | None:
        trip = self._round_trip(pair)
        return None if trip is None else trip / 2


def _by_end(uses: Iterable[LinkUse], end: str) -> dict[str, list[LinkUse]]:
    found: dict[str, list[LinkUse]] = {}
    for use in uses:
        found.setdefault(use.src if end == "up" else use.dst, []).append(use)
    return found


def _union_s(flows: Iterable[LinkUse], span_s: float) -> float:
    """How long at least one of them is busy, if they do not know of each other."""
    return span_s * (1 - math.prod(1 - use.busy_s / span_s for use in flows))
