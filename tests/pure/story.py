"""A made-up run as events: two peers, 1F1B, four microbatches."""

from pathlib import Path

from geotrain import events
from geotrain.base import CodecUse, LinkUse, Plan, Span, Stage, StageReport

MICROBATCHES = 4
PEERS = ("attic", "cellar")


def plan() -> Plan:
    stages = tuple(
        Stage(peer, 20 * i, 20 * (i + 1), 2 - i, 0.5, 60 << 20, codec_forward="tcu-001", codec_backward="tcm-05")
        for i, peer in enumerate(PEERS)
    )
    return Plan("0" * 16, "1f1b", MICROBATCHES, stages, step_seconds=2.1, notes=("attic is the slower one",))


def report(step: int, stage: int) -> StageReport:
    """A second of compute, half a second of rest, half a second of waiting of which 0.2 s is on the link."""
    other = 1 - stage
    what = "the gradient of h" if stage == 0 else "h"
    spans: list[Span] = []
    at = 0.0
    for i in range(MICROBATCHES):
        for kind in "FB":
            spans.append(Span("compute", f"{stage}{kind}{i}", at, at + 0.125))
            spans.append(Span("rest", f"{stage}{kind}{i}", at + 0.125, at + 0.1875))
            at += 0.1875
        spans.append(Span("wait", f"{what} from stage {other}", at, at + 0.125))
        at += 0.125
    link = LinkUse(PEERS[other], PEERS[stage], 1_000_000, 1_000_000, 0.2, 0.01)
    losses = [3.0] * MICROBATCHES if stage else []
    direction, codec, broken = ("B", "tcm-05", 0) if stage else ("F", "tcu-001", int(step == 3))
    use = CodecUse(direction, codec, 1000, 4000, 250, samples=2, error=0.004, gain=1.998, not_finite=broken)
    return StageReport(step - 1, stage, PEERS[stage], True, {}, losses, 2.1, tuple(spans), (link,), 50 << 20, (use,))


def committed(step: int, steps: int = 10, loss: float = 3.0, skipped: bool = False) -> events.StepCommitted:
    reports = tuple(report(step, stage) for stage in range(2))
    losses = (loss,) * MICROBATCHES
    return events.StepCommitted(step, steps, loss, losses, 2.5, 512, 1.0, 1e-3, skipped, reports)


def run(steps: int = 10) -> list[events.RunEvent]:
    return [
        events.Waiting("0 of 2 peers have joined"),
        events.PeerJoined("attic", 2e9, 4 << 30, 0.5),
        events.PeerJoined("cellar", 4e9, 8 << 30, 1.0),
        events.Planned(
            plan(), (20, 20), ("embed - blocks.1", "blocks.2 - <loss>"), 3_300_000,
            budget_shares=((0.25, 0.0), (0.0, 0.4)),
        ),
        events.Prepared(1, 0),
        events.Evaluated(0, 5.5),
        *(committed(step, steps, 5.5 - 2.0 * step / steps) for step in range(1, steps + 1)),
        events.Evaluated(steps, 3.4),
        events.Checkpointed(steps, Path("runs/x/checkpoints/step-00000010"), 5 << 20),
        events.Ended(steps, "done", 27.0),
    ]  # fmt: skip
