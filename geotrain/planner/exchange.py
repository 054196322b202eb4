"""What it takes those who hold the same piece of the model to exchange it: gradients, or weights. Pure.

All to all, each of R holders sums an R-th part of all and gives it back: to and from every other holder two messages of
1/R of the bytes, and their latencies, one after the other (Yuan et al. 2022, arXiv:2206.01288, eq. 1).

In two levels, only sums leave a group of holders that are near each other (a hierarchical all-reduce): each of its s
members sums an s-th part of what the group has; of that part, holders in different groups exchange what both have, all
to all; then the members give each other their parts. Of n bytes, n/s go between two members of a group, and each way
1/G of the part that both have between members of two of G groups. With groups of one it is the exchange above.
"""

from itertools import pairwise

import numpy as np

from .problem import Floats, Ints, Problem

LEVELS = 2
"""So many ways to group are tried, beside none."""

LEAST_GAP = 1.5
"""Links within a group are at least so many times as fast as those between groups."""

_ROUNDING = 1e-9


def groupings(rate: Floats) -> list[Ints]:
    """Groups of near peers, as a number for each: every peer by itself; then those that are left when the slower links
    are taken away, where the rates of a spanning tree of fast links have the largest gaps.

    Args:
        rate: (N, N) bytes/s.

    >>> groupings(np.array([[9.0, 8, 1], [8, 9, 2], [1, 2, 9]]))
    [array([0, 1, 2]), array([0, 0, 2])]
    """
    near = np.minimum(rate, rate.T)
    size = len(near)
    reach, source, left = near[0].copy(), np.zeros(size, np.intp), set(range(1, size))
    tree: list[tuple[float, int, int]] = []
    while left:
        peer = max(left, key=lambda j: (reach[j], -j))
        left.remove(peer)
        tree.append((float(reach[peer]), int(source[peer]), peer))
        closer = near[peer] > reach
        reach[closer], source[closer] = near[peer][closer], peer
    tree.sort(key=lambda edge: -edge[0])
    gaps = sorted((after[0] / before[0], k) for k, (before, after) in enumerate(pairwise(tree), 1))
    found = [np.arange(size)]
    for gap, count in gaps[:LEVELS]:
        if gap * LEAST_GAP <= 1:
            labels = np.arange(size)
            for _, a, b in tree[:count]:
                labels[labels == max(labels[a], labels[b])] = min(labels[a], labels[b])
            found.append(labels)
    return found


def messages(labels: Ints) -> tuple[Floats, Floats]:
    """What each holder sends to each other one, as parts of the piece: within groups, and between them. The same comes
    back.

    Args:
        labels: (..., R) the groups of the holders.

    Returns:
        (..., R, R), by sender and receiver.
    """
    count = labels.shape[-1]
    same = labels[..., :, None] == labels[..., None, :]
    size = same.sum(axis=-1)
    rank = (same & np.tri(count, k=-1, dtype=bool)).sum(axis=-1)  # members before it
    first, end = rank / size, (rank + 1) / size
    both = np.minimum(end[..., :, None], end[..., None, :]) - np.maximum(first[..., :, None], first[..., None, :])
    groups = (1 / size).sum(axis=-1)[..., None, None]
    within = np.where(same & ~np.eye(count, dtype=bool), 1 / size[..., None], 0.0)
    between = np.where(~same & (both > _ROUNDING), both / groups, 0.0)
    return within, between


class Exchange:
    """Prices exchanges between the peers of a problem: all to all, or `grouped` where that is faster.

    `rate` and `latency` are (N, N), in bytes/s and seconds; from a peer to itself nothing takes time. `groupings`: the
    ways to group that are tried, the first of which has each peer by itself.
    """

    def __init__(self, problem: Problem, *, grouped: bool = True) -> None:
        ids = np.arange(problem.size)
        self.rate = problem.network.rates(ids[:, None], ids)
        self.latency = problem.network.latencies(ids[:, None], ids)
        np.fill_diagonal(self.rate, np.inf)
        np.fill_diagonal(self.latency, 0.0)
        self.groupings = groupings(self.rate) if grouped else [ids]

    def seconds(self, nbytes: Floats, holders: Ints) -> Floats:
        """(C,): one exchange of each candidate, in the best way, where a peer holds one piece.

        Args:
            nbytes: (C, K) of each piece.
            holders: (C, K, R) peers.
        """
        src, dst = holders[..., :, None], holders[..., None, :]
        each_s, byte_s = self.latency[src, dst], nbytes[..., None, None] / self.rate[src, dst]
        best = np.full(len(holders), np.inf)
        for labels in self.groupings:
            levels = messages(labels[holders])
            sent_s = [np.where(part > 0, each_s + byte_s * part, 0.0).sum(axis=-1).max(axis=(1, 2)) for part in levels]
            best = np.minimum(best, 2 * (sent_s[0] + sent_s[1]))
        return best

    def total_seconds(self, nbytes: Floats, holders: Ints) -> float:
        """One exchange, in the best way, where a peer may hold several pieces.

        Args:
            nbytes: (K,) of each piece.
            holders: (K, R) peers.
        """
        best = np.inf
        for labels in self.groupings:
            seconds = 0.0
            for part in messages(labels[holders]):
                sent = np.zeros_like(self.rate)
                np.add.at(sent, (holders[:, :, None], holders[:, None, :]), nbytes[:, None, None] * part)
                sent_s = np.where(sent > 0, self.latency + sent / self.rate, 0.0)
                seconds += 2 * float(sent_s.sum(axis=1).max())
            best = min(best, seconds)
        return best
