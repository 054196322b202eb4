"""How many microbatches each stage holds, so that none starves. Pure.

Actions run in a fixed order: a stage of window W has W microbatches before its first backward, then backward and
forward take turns. So it is not the round trip to the end of the pipeline that counts, but the loop between neighbors:
forward here, the way, forward and backward there, the way back, backward here. W_k - W_(k+1) + 1 microbatches go round
it, and must last for one loop: W_k = W_(k+1) + ceil(loop_k / T) - 1, with the period T. A larger window than that
accounts for only makes the stage wait for forwards that cannot come yet.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from .simulator import Workload, simulate

_ROUNDS = 4
_MOST_EVENTS = 1_000_000
"""Of all simulations together: seconds of one core."""

_SLACK = 1e-9


def fitted(workload: Workload, limits: Sequence[int]) -> tuple[int, ...]:
    """The windows of the shortest step found, at most `limits` (what memory allows), by stage.

    The rule above, with a microbatch more where it gains, and what `workload` has, each tried in the simulator.
    """
    most = [max(1, min(limit, workload.microbatches)) for limit in limits]
    best = _within([stage.window for stage in workload.stages], most)
    best_s = _step_s(workload, best)
    for spare in (0, 1):
        windows = _within(_by_rule(workload, spare), most)
        seconds = _step_s(workload, windows)
        if seconds < best_s * (1 - _SLACK):
            best, best_s = windows, seconds
    each = 2 * len(best) * simulate(workload).events
    for _ in range(min(_ROUNDS, _MOST_EVENTS // each)):
        before = best
        for s in range(len(best)):
            for change in (1, -1):
                # all stages before this one with it: their differences stay
                windows = _within([w + change * (i <= s) for i, w in enumerate(best)], most)
                seconds = _step_s(workload, windows)
                if seconds < best_s * (1 - _SLACK):
                    best, best_s = windows, seconds
        if best == before:
            break
    return best


def _step_s(workload: Workload, windows: Sequence[int]) -> float:
    stages = tuple(replace(stage, window=w) for stage, w in zip(workload.stages, windows, strict=True))
    return simulate(replace(workload, stages=stages)).step_seconds


def _within(windows: Sequence[int], most: Sequence[int]) -> tuple[int, ...]:
    return tuple(max(1, min(window, limit)) for window, limit in zip(windows, most, strict=True))


def _by_rule(workload: Workload, spare: int) -> list[int]:
    count = len(workload.stages)
    seconds = [(stage.forward_s + stage.backward_s) / stage.duty for stage in workload.stages]
    links = {(link.src, link.dst): link for link in workload.links}
    out, into = dict[str, float](), dict[str, float]()
    busy, ways = dict[tuple[str, str], float](), [0.0] * count
    """Seconds that a link needs for a microbatch; the slowest way from or to the next stage, by stage."""
    for message in workload.messages:
        if message.src is None or message.once:
            continue
        src = workload.stages[message.src].peer
        for stage in message.to:
            dst = workload.stages[stage].peer
            link = links.get((src, dst))
            carry_s = 0.0 if link is None else message.nbytes / link.rate_bytes_per_s
            busy[src, dst] = busy.get((src, dst), 0.0) + carry_s
            out[src], into[dst] = out.get(src, 0.0) + message.nbytes, into.get(dst, 0.0) + message.nbytes
            if abs(stage - message.src) == 1:
                latency_s = 0.0 if link is None else link.latency_s
                ways[min(stage, message.src)] += carry_s + latency_s + message.encode_s + message.decode_s
    ends = [out.get(peer, 0.0) / rate for peer, rate in workload.up.items()]
    ends += [into.get(peer, 0.0) / rate for peer, rate in workload.down.items()]
    period = max(*seconds, *busy.values(), *ends, 1e-12)
    windows = [1]
    for k in reversed(range(count - 1)):
        loop = seconds[k] + seconds[k + 1] + ways[k]
        windows.insert(0, windows[0] + max(0, math.ceil(loop / period - 1e-9) - 1 + spare))
    return windows
