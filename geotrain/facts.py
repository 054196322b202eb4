"""What a run did, gathered from its events, as plain numbers and texts: the report and `--json` show these. Pure.

Where a second of a stage went: `compute`; `rest`, which the duty cap asks for; `sending`, the last part of a wait,
while what it waits for is on the link; `waiting`, the part before that, while another peer still computes; `commit`,
from this stage's last gradient to the next step: the other stages' gradients, the optimizer, evaluations; `other`,
what is left. They add up to the step's seconds. How long one microbatch is on a link is taken as the seconds the link
was busy, divided by the microbatches of the step.
"""

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from . import events
from .base import COORDINATOR, CodecUse, Plan, StageReport

ACTIVITIES: tuple[str, ...] = ("compute", "rest", "sending", "waiting", "commit", "other")

_KEPT_STEPS = 5
"""So many newest steps keep their timeline; the one of median length is drawn."""


@dataclass(slots=True)
class _PeerFacts:
    flops_per_s: float
    memory_bytes: int
    duty: float
    memory_used_bytes: int = 0
    base_bytes: int = 0
    shared_bytes: int = 0
    state_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACTIVITIES, 0.0))
    gone: str | None = None


@dataclass(slots=True)
class _LinkFacts:
    nbytes: int = 0
    timed_bytes: int = 0
    busy_s: float = 0.0
    codecs: dict[str, CodecUse] = field(default_factory=dict[str, CodecUse])
    """What its sender's codecs did to what crossed it, by codec."""


class Recorder:
    """Takes a run's events; `facts` says what they come to."""

    def __init__(self) -> None:
        self.ended: events.Ended | None = None
        self._steps: dict[int, events.StepCommitted] = {}  # without their stages
        self._recent: deque[events.StepCommitted] = deque(maxlen=_KEPT_STEPS)
        self._planned: events.Planned | None = None
        self._plans = 0
        self._held_out: dict[int, float] = {}
        self._peers: dict[str, _PeerFacts] = {}
        self._links: dict[tuple[str, str], _LinkFacts] = {}
        self._log: list[str] = []
        self._texts: list[dict[str, str]] = []
        self._checkpoint: str | None = None
        self._checkpoint_step = 0
        self._checkpoints: list[int] = []
        """Bytes of each."""

    @property
    def joined(self) -> set[str]:
        """Names of all peers that have ever joined."""
        return set(self._peers)

    def __call__(self, event: events.RunEvent) -> None:
        match event:
            case events.PeerJoined(name, flops_per_s, memory_bytes, duty):
                self._peers[name] = _PeerFacts(flops_per_s, memory_bytes, duty)
            case events.Planned():
                self._planned = event
                self._plans += 1
                if event.reason:
                    self._log.append(f"another plan after step {max(self._steps, default=0)}: {event.reason}")
            case events.Tried(step, error, _, cost, budget):
                self._log.append(
                    f"codecs on trial at step {step}: gradient error {error:.2g}, {cost:.2%} more steps of {budget:.2%}"
                )
            case events.Considered(step, reason):
                self._log.append(f"the plan stays after step {step}: {reason}")
            case events.Prepared(_, step):
                self._steps = {done: row for done, row in self._steps.items() if done <= step}
                self._recent.clear()
                self._log.append(f"plan {self._plans} starts at step {step}")
            case events.StepCommitted():
                self._committed(event)
            case events.Evaluated(step, loss):
                self._held_out[step] = loss
            case events.Checkpointed(step, path, nbytes):
                self._checkpoint, self._checkpoint_step = str(path), step
                self._checkpoints.append(nbytes)
            case events.Fetched(name, base_bytes, state_bytes, shared_bytes) if name in self._peers:
                self._peers[name].base_bytes += base_bytes
                self._peers[name].shared_bytes += shared_bytes
                self._peers[name].state_bytes += state_bytes
            case events.Continued(prompt, text):
                self._texts.append({"prompt": prompt, "text": text})
            case events.PeerGone(name, reason):
                if name in self._peers:
                    self._peers[name].gone = reason
                self._log.append(f"{name} left: {reason}" if reason != "left" else f"{name} left")
            case events.Ended(step, reason):
                self.ended = event
                self._log.append(f"the run ended after {step} steps: {reason}")
            case _:
                pass

    def _committed(self, event: events.StepCommitted) -> None:
        self._recent.append(event)
        self._steps[event.step] = replace(event, stages=())
        plan = self._planned.plan if self._planned else None
        for report in event.stages:
            for use in report.links:
                link = self._links.setdefault((use.src, use.dst), _LinkFacts())
                link.nbytes += use.nbytes
                link.timed_bytes += use.timed_bytes
                link.busy_s += use.busy_s
            if plan is None:
                continue
            for use in report.codecs:
                self._encoded(report, use, plan)
            if report.peer in self._peers:
                peer = self._peers[report.peer]
                peer.memory_used_bytes = max(peer.memory_used_bytes, report.memory_bytes)
                for activity, seconds in account(report, event, plan).items():
                    peer.seconds[activity] += seconds

    def _encoded(self, report: StageReport, use: CodecUse, plan: Plan) -> None:
        pair = link_of(report, use, plan)
        if pair is not None:
            codecs = self._links.setdefault(pair, _LinkFacts()).codecs
            codecs[use.codec] = codecs.get(use.codec, CodecUse(use.direction, use.codec)).plus(use)

    def facts(self, **more: Any) -> dict[str, Any]:
        """Everything as JSON-able values; `more` is added, such as paths and the machine."""
        rows = [self._steps[step] for step in sorted(self._steps)]
        steady = rows[1:] or rows  # the first step also warms up
        held_out = sorted(self._held_out.items())
        seconds = sum(row.seconds for row in steady)
        plan = self._planned.plan if self._planned else None
        return {
            "reason": self.ended.reason if self.ended else "unknown",
            "seconds": self.ended.seconds if self.ended else sum(row.seconds for row in rows),
            "steps": rows[-1].steps if rows else 0,
            "first_step": rows[0].step if rows else 0,
            "parameters": self._planned.parameters if self._planned else 0,
            "held_out_loss_before": held_out[0][1] if held_out else None,
            "held_out_loss_after": held_out[-1][1] if len(held_out) > 1 else None,
            "held_out_losses": [list(pair) for pair in held_out],
            "losses": [row.loss for row in rows],
            "step_seconds": [row.seconds for row in rows],
            "median_step_seconds": statistics.median(row.seconds for row in steady) if steady else None,
            "tokens_per_step": rows[-1].tokens if rows else 0,
            "tokens_per_second": sum(row.tokens for row in steady) / seconds if seconds > 0 else 0.0,
            "grad_norms": [row.grad_norm for row in rows],
            "learning_rates": [row.lr for row in rows],
            "skipped_steps": [row.step for row in rows if row.skipped],
            "schedule": plan.schedule if plan else None,
            "microbatches": plan.microbatches if plan else 0,
            "predicted_step_seconds": self._planned.predicted_s or self._planned.plan.step_seconds
            if self._planned
            else None,
            "bottleneck": self._planned.bottleneck if self._planned else "",
            "plan_notes": list(plan.notes) if plan else [],
            "stages": self._stage_facts(),
            "peers": self._peer_facts(),
            "links": self._link_facts(len(rows)),
            "bytes": self._bytes_by_class(),
            "seconds_by_activity": self._seconds_by_activity(),
            "timeline": self._timeline(),
            "log": self._log,
            "texts": self._texts,
            "checkpoint": self._checkpoint,
            "checkpoint_step": self._checkpoint_step,
            **more,
        }

    def _stage_facts(self) -> list[dict[str, Any]]:
        if self._planned is None:
            return []
        rows: list[dict[str, Any]] = []
        for index, stage in enumerate(self._planned.plan.stages):
            measured = [_busy_seconds(r) for s in self._recent for r in s.stages if r.stage == index]
            rows.append(
                {
                    "stage": index, "peer": stage.peer, "first_op": stage.first_op, "end_op": stage.end_op,
                    "ops": self._planned.stage_ops[index], "blocks": self._planned.stage_blocks[index],
                    "window": stage.window,
                    "predicted_busy_seconds": stage.compute_seconds * self._planned.plan.microbatches,
                    "measured_busy_seconds": statistics.median(measured) if measured else None,
                    "predicted_memory_bytes": stage.memory_bytes,
                }
            )  # fmt: skip
        return rows

    def _peer_facts(self) -> list[dict[str, Any]]:
        stage_of = {row["peer"]: row for row in self._stage_facts()}
        rows: list[dict[str, Any]] = []
        for name, peer in self._peers.items():
            total = sum(peer.seconds.values())
            stage = stage_of.get(name)
            rows.append(
                {
                    "name": name, "stage": stage["stage"] if stage else None, "ops": stage["ops"] if stage else 0,
                    "blocks": stage["blocks"] if stage else "", "flops_per_second": peer.flops_per_s,
                    "duty": peer.duty, "memory_bytes": peer.memory_bytes, "memory_used_bytes": peer.memory_used_bytes,
                    "busy_share": peer.seconds["compute"] / total if total > 0 else 0.0,
                    "seconds_by_activity": dict(peer.seconds), "gone": peer.gone,
                }
            )  # fmt: skip
        return sorted(rows, key=lambda row: (row["stage"] is None, row["stage"], row["name"]))

    def _link_facts(self, steps: int) -> list[dict[str, Any]]:
        total = sum(row.seconds for row in self._steps.values())
        predicted = {(load.src, load.dst): load.busy_s for load in self._planned.loads} if self._planned else {}
        shares = budget_shares(self._planned) if self._planned else {}
        return [
            {
                "from": src, "to": dst, "bytes": link.nbytes, "busy_seconds": link.busy_s,
                "bytes_per_step": link.nbytes / max(steps, 1),
                "bytes_per_second": link.timed_bytes / link.busy_s if link.busy_s > 0 else None,
                "busy_share": link.busy_s / total if total > 0 else 0.0,
                "predicted_busy_seconds": predicted.get((src, dst)),
                "measured_busy_seconds": link.busy_s / max(steps, 1),
                "codecs": [_codec_facts(use) for use in link.codecs.values()],
                "budget_share": shares.get((src, dst), 0.0),
            }
            for (src, dst), link in sorted(self._links.items())
            if link.nbytes
        ]  # fmt: skip

    def _bytes_by_class(self) -> dict[str, Any]:
        """What crossed the links, by what it was: in all; of what no step changes, from the coordinator and from other
        peers, and of the rest, by peer."""
        uses = [use for link in self._links.values() for use in link.codecs.values()]
        return {
            "values": sum(use.wire_bytes for use in uses if use.direction == "F"),
            "gradients": sum(use.wire_bytes for use in uses if use.direction == "B"),
            "base": {name: peer.base_bytes for name, peer in self._peers.items()},
            "shared": {name: peer.shared_bytes for name, peer in self._peers.items()},
            "state": {name: peer.state_bytes for name, peer in self._peers.items()},
            "checkpoints": self._checkpoints,
        }

    def _seconds_by_activity(self) -> dict[str, float]:
        """Seconds of the whole run, as the mean over the peers that worked."""
        workers = [peer.seconds for peer in self._peers.values() if sum(peer.seconds.values()) > 0]
        return {a: sum(seconds[a] for seconds in workers) / max(len(workers), 1) for a in ACTIVITIES}

    def _timeline(self) -> dict[str, Any] | None:
        """The step of median length among the newest."""
        if not self._recent:
            return None
        step = sorted(self._recent, key=lambda s: s.seconds)[len(self._recent) // 2]
        stages = sorted(step.stages, key=lambda report: report.stage)
        return {
            "step": step.step,
            "seconds": step.seconds,
            "stages": [
                {"stage": r.stage, "peer": r.peer, "seconds": r.seconds, "spans": [asdict(s) for s in r.spans]}
                for r in stages
            ],
        }


def link_of(report: StageReport, use: CodecUse, plan: Plan) -> tuple[str, str] | None:
    """A codec's work belongs to the link to the neighbor in its direction."""
    neighbor = report.stage + {"F": 1, "B": -1}.get(use.direction, len(plan.stages))
    return (report.peer, plan.stages[neighbor].peer) if 0 <= neighbor < len(plan.stages) else None


def budget_shares(planned: events.Planned) -> dict[tuple[str, str], float]:
    """By link, how much of the loss budget the codec of a plan takes there."""
    found: dict[tuple[str, str], float] = {}
    stages = zip(planned.plan.stages, planned.budget_shares, strict=False)
    for (a, (forward, _)), (b, (_, backward)) in pairwise(stages):
        found |= {(a.peer, b.peer): forward, (b.peer, a.peer): backward}
    return found


def _codec_facts(use: CodecUse) -> dict[str, Any]:
    """`factor`: how many times fewer bytes; `error` |x - y|^2 / |x|^2 and `bias` <x, y> / <x, x> - 1, of samples;
    `not_finite`: messages with a NaN or an infinity."""
    return {
        "codec": use.codec, "raw_bytes": use.raw_bytes, "wire_bytes": use.wire_bytes,
        "factor": use.raw_bytes / use.wire_bytes if use.wire_bytes else 1.0,
        "encode_seconds": use.encode_s, "samples": use.samples,
        "error": use.error / use.samples if use.samples else None,
        "bias": use.gain / use.samples - 1 if use.samples else None, "not_finite": use.not_finite,
    }  # fmt: skip


def account(report: StageReport, step: events.StepCommitted, plan: Plan) -> dict[str, float]:
    """Where this stage's seconds of a step went, by activity; they add up to the step's seconds."""
    transfer_s = _transfer_seconds(step, plan.microbatches)
    seconds = dict.fromkeys(ACTIVITIES, 0.0)
    for span in report.spans:
        length = span.end_s - span.start_s
        if span.activity == "wait":
            on_link = min(length, transfer_s.get((_source(span.label, plan), report.peer), 0.0))
            seconds["sending"] += on_link
            seconds["waiting"] += length - on_link
        else:
            seconds[span.activity if span.activity in ("compute", "rest") else "other"] += length
    seconds["other"] += max(0.0, report.seconds - sum(seconds.values()))
    seconds["commit"] = max(0.0, step.seconds - sum(seconds.values()))
    return seconds


def _transfer_seconds(step: events.StepCommitted, microbatches: int) -> Mapping[tuple[str, str], float]:
    uses = [use for report in step.stages for use in report.links]
    return {(use.src, use.dst): use.busy_s / microbatches for use in uses}


def _source(label: str, plan: Plan) -> str:
    """The peer that a wait's label ends in: `h_3 from stage 1`."""
    where = label.rpartition(" from ")[2]
    number = where.removeprefix("stage ")
    if number.isdigit() and int(number) < len(plan.stages):
        return plan.stages[int(number)].peer
    return where or COORDINATOR


def _busy_seconds(report: StageReport) -> float:
    """Computing and resting by the duty cap, for a planner counts a capped peer as a slower one."""
    return sum(span.end_s - span.start_s for span in report.spans if span.activity in ("compute", "rest"))
