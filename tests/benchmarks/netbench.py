"""geotrain's runs in a world, as benchmarks time them. I/O (root)."""

import statistics
from pathlib import Path
from typing import NamedTuple

from tests import netswarm
from tests.wan import Wan, lacking

from .tables import Unavailable
from .worlds import PEERS, World


class Run(NamedTuple):
    """`seconds`: median of a step. `sent_bytes`: by all peers, a step, frames of all kinds. `start_s`: from the command
    to the end of the first step. `losses`: of the steps. `held_out`: (seconds from the command, loss) by steps done.
    `note`: the last plan."""

    seconds: float
    sent_bytes: float
    start_s: float
    losses: list[float]
    held_out: dict[int, tuple[float, float]]
    note: str


def need_networks() -> None:
    """Raises `Unavailable`."""
    if reason := lacking():
        raise Unavailable(reason)


def geotrain_run(
    wan: Wan, world: World, folder: Path, *, steps: int, warmup: int, evaluate_every: int = 0, stages: bool = True
) -> Run:
    """So many steps, of which the first `warmup` do not count."""
    until = netswarm.evaluated(steps) if evaluate_every else netswarm.committed(steps)
    # one step more than is waited for: after the last one a run hands its weights over, which is not timed
    job = world.job(steps if evaluate_every else steps + 1, evaluate_every, stages=stages)
    seen = netswarm.run(wan, job, folder, peers=PEERS[: len(world.homes)], until=until, timeout_s=1200)
    done = netswarm.steps(seen)
    timed = done[warmup:]
    held_out = {
        s.event["step"]: (s.at_s, s.event["loss"]) for s in seen if s.event["event"] == "Evaluated" and s.event["step"]
    }
    plans = [s.event["plan"] for s in seen if s.event["event"] == "Planned"]
    stages = " | ".join(f"{s['peer']} {s['codec_forward']}/{s['codec_backward']}" for s in plans[-1]["stages"])
    return Run(
        statistics.median(step.event["seconds"] for step in timed),
        (sum(timed[-1].sent) - sum(done[warmup - 1].sent)) / len(timed),
        done[0].at_s,
        [step.event["loss"] for step in done],
        held_out,
        f"plan {len(plans)}, values/gradients: {stages}",
    )
