"""What a run looks like while it runs: a live table in a terminal, plain lines anywhere else. I/O."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from . import events
from .base import Plan, StageReport
from .facts import budget_shares, link_of
from .words import count, duration, number_of, size, sparkline

RECENT_STEPS = 10
"""Speed and time left are means over so many steps: long enough to be steady, short enough to follow."""

LINKS_SHOWN = 8

QUIET_S = 8.0
"""Plain lines: after so long without news, say what is waited for. A CI log then moves at least each 10 s."""

STEP_LINES_S = 1.0
"""Plain lines: at most one line about steps in this time."""


@dataclass(slots=True)
class PeerStatus:
    """A row of the table of peers. Rates are those of the last step."""

    name: str
    duty: float
    allowed_bytes: int
    stage: int | None = None
    ops: int = 0
    blocks: str = ""
    memory_bytes: int = 0
    busy: float = 0.0
    sent_bytes_per_s: float = 0.0
    doing: str = "joined"


@dataclass(slots=True)
class LinkStatus:
    """A link of the plan: seconds a step, as predicted and as measured in the last one."""

    predicted_s: float = 0.0
    busy_s: float = 0.0
    nbytes: int = 0
    rate_bytes_per_s: float = 0.0
    codec: str = ""
    factor: float = 0.0
    """How many times fewer bytes the codec made of it; 0: nothing was compressed."""
    error: float | None = None
    """|x - y|^2 / |x|^2 of the newest sample."""
    budget_share: float = 0.0


@dataclass(slots=True)
class Status:
    """The newest facts of a run, by events. Pure."""

    title: str
    step: int = 0
    steps: int = 0
    parameters: int = 0
    loss: float | None = None
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    skipped: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    peers: dict[str, PeerStatus] = field(default_factory=dict)
    message: str = "starting"
    plans: int = 0
    predicted_s: float = 0.0
    bottleneck: str = ""
    links: dict[tuple[str, str], LinkStatus] = field(default_factory=dict[tuple[str, str], LinkStatus])
    decisions: list[str] = field(default_factory=list[str])
    plan: Plan | None = None

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / sum(self.seconds) if sum(self.seconds) > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step is done, at the present speed."""
        if not self.seconds:
            return None
        return (self.steps - self.step) * sum(self.seconds) / len(self.seconds)

    def apply(self, event: events.RunEvent) -> None:
        match event:
            case events.PeerJoined(name, _, memory_bytes, duty):
                self.peers[name] = PeerStatus(name, duty, memory_bytes)
            case events.Waiting(reason):
                self.message = f"waiting: {reason}"
            case events.Planned():
                self._planned(event)
            case events.Considered(_, reason):
                self.decisions.append(f"the plan stays: {reason}")
            case events.Prepared(_, step):
                self.step, self.message = step, "training"
            case events.StepCommitted():
                self._committed(event)
            case events.Evaluated(step, loss):
                self.held_out.append((step, loss))
            case events.Checkpointed(step, path):
                self.message = f"checkpoint of step {step} written to {path}"
            case events.PeerProgress(name, _, state) if name in self.peers:
                self.peers[name].doing = state
            case events.PeerGone(name, reason):
                self.peers.pop(name, None)
                self.message = f"{name} is gone: {reason}"
            case events.Ended(_, reason):
                self.message = f"ended: {reason}"
                for peer in self.peers.values():
                    peer.doing = ""
            case _:
                pass

    def _planned(self, event: events.Planned) -> None:
        self.plans += 1
        self.parameters, self.message = event.parameters, "peers load their weights"
        self.predicted_s, self.bottleneck = event.predicted_s, event.bottleneck
        if event.reason:
            self.decisions.append(f"plan changed: {event.reason}")
        self.links = {(load.src, load.dst): LinkStatus(predicted_s=load.busy_s) for load in event.loads if load.nbytes}
        for a, b in pairwise(event.plan.stages):
            for src, dst, codec in ((a, b, a.codec_forward), (b, a, b.codec_backward)):
                self.links.setdefault((src.peer, dst.peer), LinkStatus()).codec = codec
        for pair, share in budget_shares(event).items():
            self.links[pair].budget_share = share
        self.plan = event.plan
        for peer in self.peers.values():
            peer.stage, peer.ops, peer.blocks, peer.doing = None, 0, "", "spare"
        for index, stage in enumerate(event.plan.stages):
            peer = self.peers.setdefault(stage.peer, PeerStatus(stage.peer, 1.0, 0))
            peer.stage, peer.memory_bytes, peer.doing = index, stage.memory_bytes, "loads"
            peer.ops, peer.blocks = event.stage_ops[index], event.stage_blocks[index]

    def _committed(self, event: events.StepCommitted) -> None:
        self.step, self.steps, self.message = event.step, event.steps, "training"
        self.skipped += event.skipped
        self.seconds.append(event.seconds)
        self.tokens.append(event.tokens)
        self.loss = event.loss
        self.losses.append(event.loss)
        for report in event.stages:
            for use in report.links:
                if (use.src, use.dst) in self.links and use.timed_bytes:
                    link = self.links[use.src, use.dst]
                    link.busy_s, link.nbytes = use.busy_s, use.nbytes
                    link.rate_bytes_per_s = use.timed_bytes / max(use.busy_s, 1e-9)
            if self.plan is not None:
                self._encoded(event.step, report, self.plan)
            if report.peer in self.peers and event.seconds > 0:
                peer = self.peers[report.peer]
                peer.memory_bytes = report.memory_bytes
                peer.busy = busy_seconds(report) / event.seconds
                peer.sent_bytes_per_s = sum(use.nbytes for use in report.links) / event.seconds

    def _encoded(self, step: int, report: StageReport, plan: Plan) -> None:
        for use in report.codecs:
            if use.not_finite:
                what = number_of("message", use.not_finite)
                self.decisions.append(f"step {step}: {what} of {report.peer} held NaN or infinity")
            pair = link_of(report, use, plan)
            link = self.links.get(pair) if pair is not None else None
            if link is not None and use.codec == link.codec and use.wire_bytes:
                link.factor = use.raw_bytes / use.wire_bytes
                link.error = use.error / use.samples if use.samples else link.error


def busy_seconds(report: StageReport) -> float:
    """Seconds of a step in which the peer computed."""
    return sum(s.end_s - s.start_s for s in report.spans if s.activity == "compute")


def render(status: Status) -> RenderableType:
    """The whole live view."""
    head = Table.grid(padding=(0, 2))
    done = f"step {status.step}/{status.steps}" if status.steps else "step 0"
    head.add_row(
        Text(status.title, style="bold"),
        Text(done),
        ProgressBar(total=max(status.steps, 1), completed=status.step, width=24),
        Text("" if not status.left_s else f"{duration(status.left_s)} left", style="dim"),
    )
    facts = Table.grid(padding=(0, 2))
    loss = "loss -" if status.loss is None else f"loss {status.loss:.4f}"
    held_out = " → ".join(f"{value:.3f}" for _, value in [*status.held_out[:1], *status.held_out[1:][-1:]])
    facts.add_row(
        Text(loss, style="bold cyan"),
        Text(sparkline(status.losses, 20), style="cyan"),
        Text(f"{status.tokens_per_s:,.0f} tokens/s"),
        Text(f"held out {held_out}" if held_out else ""),
        Text(f"{status.skipped} skipped" if status.skipped else "", style="yellow"),
    )
    parts: list[RenderableType] = [head, facts, _peer_table(status)]
    if status.links:
        parts.append(_link_table(status))
    if status.bottleneck:
        parts.append(Text(_step_words(status), style="dim", overflow="ellipsis", no_wrap=True))
    parts += [Text(decision, style="yellow") for decision in status.decisions[-2:]]
    return Group(*parts, Text(status.message, style="dim"))


def _step_words(status: Status) -> str:
    measured = f"a step takes {duration(status.seconds[-1])}, " if status.seconds else "a step takes "
    return f"{measured}{duration(status.predicted_s)} predicted; {status.bottleneck}"


def _link_table(status: Status) -> Table:
    """The busiest links first."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for name in ("link", "codec", "error", "budget", "Mbit/s", "MB/step", "busy", "planned"):
        table.add_column(name, justify="left" if name in ("link", "codec") else "right", no_wrap=True)
    rows = sorted(status.links.items(), key=lambda row: -max(row[1].busy_s, row[1].predicted_s))
    for (src, dst), link in rows[:LINKS_SHOWN]:
        table.add_row(
            f"{src} → {dst}", f"{link.codec} {link.factor:.1f}x" if link.factor else link.codec,
            "" if link.error is None else f"{link.error:.1g}", f"{link.budget_share:.0%}" if link.budget_share else "",
            f"{8e-6 * link.rate_bytes_per_s:.1f}", f"{link.nbytes / 1e6:.2f}", duration(link.busy_s),
            duration(link.predicted_s),
        )  # fmt: skip
    return table


def _peer_table(status: Status) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("peer", no_wrap=True)
    table.add_column("duty", justify="right")
    table.add_column("stage", no_wrap=True)
    table.add_column("ops", justify="right")
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("busy", justify="right")
    table.add_column("MB/s out", justify="right")
    table.add_column("now", no_wrap=True, overflow="ellipsis")
    rows = sorted(status.peers.values(), key=lambda p: (p.stage is None, p.stage or 0, p.name))
    for peer in rows:
        stage = "spare" if peer.stage is None else f"{peer.stage}: {peer.blocks}"
        color = "green" if peer.busy > 0.6 else "yellow" if peer.busy > 0.25 else "dim"
        table.add_row(
            peer.name, f"{peer.duty:.0%}", stage, str(peer.ops or ""), size(peer.memory_bytes),
            Text(f"{peer.busy:.0%}", style=color), f"{peer.sent_bytes_per_s / 1e6:.2f}", peer.doing,
        )  # fmt: skip
    return table


class LiveView:
    """A table that is drawn again four times a second, by a thread of Rich."""

    def __init__(self, title: str, console: Console) -> None:
        self._status = Status(title)
        self._lock = threading.Lock()
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4)

    def __call__(self, event: events.RunEvent) -> None:
        with self._lock:
            self._status.apply(event)

    def _draw(self) -> RenderableType:
        with self._lock:
            return render(self._status)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


class PlainView:
    """Lines for a log: what happens, and when nothing does, what is waited for."""

    def __init__(self, title: str, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._status = Status(title)
        self._write = write
        self._clock = clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="plain-view", daemon=True)
        self._spoke_s = self._step_line_s = clock()

    def __call__(self, event: events.RunEvent) -> None:
        with self._lock:
            self._status.apply(event)
            line = self._line(event)
            if line is not None:
                self._say(line)

    def remind(self) -> None:
        """Says what is waited for, if nothing was said for a while."""
        with self._lock:
            if self._clock() - self._spoke_s < QUIET_S:
                return
            peers = "; ".join(f"{peer.name} {peer.doing}" for peer in self._status.peers.values() if peer.doing)
            self._say(f"{self._status.message}" + (f" ({peers})" if peers else ""))

    def _watch(self) -> None:
        while not self._stop.wait(QUIET_S / 8):
            self.remind()

    def _say(self, line: str) -> None:
        self._spoke_s = self._clock()
        self._write(line)

    def _line(self, event: events.RunEvent) -> str | None:
        status = self._status
        match event:
            case events.PeerJoined(name, flops_per_s, memory_bytes, duty):
                speed = f"{flops_per_s / 1e9:.3g} GFLOP/s"
                return f"{name} joined: {speed} at duty {duty:.0%}, {size(memory_bytes)} of memory"
            case events.Waiting() | events.PeerGone() | events.Checkpointed() | events.Ended():
                return status.message
            case events.Tried(_, error, change, cost, budget):
                words = f"gradient error {error:.2g}, loss {change:+.4f}"
                return f"codecs on trial: {words}; they cost {cost:.2%} more steps and may cost {budget:.2%}"
            case events.Considered():
                return status.decisions[-1]
            case events.Planned(plan, stage_ops, stage_blocks, parameters, reason):
                stages = "; ".join(
                    f"stage {i} on {stage.peer}: {ops} ops ({blocks})"
                    for i, (stage, ops, blocks) in enumerate(zip(plan.stages, stage_ops, stage_blocks, strict=True))
                )
                why = f"; because {reason}" if reason else ""
                step = f"; a step should take {duration(event.predicted_s)}" if event.predicted_s else ""
                return f"plan {status.plans} for {count(parameters)} parameters: {stages}{step}{why}"
            case events.Prepared(_, step):
                return f"training starts at step {step} with plan {status.plans}"
            case events.StepCommitted():
                return self._step_line(event)
            case events.Continued(prompt, text):
                return f"{prompt!r} is continued: {text!r}"
            case events.Evaluated(step, loss):
                return f"held-out loss after {step} steps: {loss:.4f}"
            case _:
                return None

    def _step_line(self, event: events.StepCommitted) -> str | None:
        now = self._clock()
        if now - self._step_line_s < STEP_LINES_S and event.step not in (1, event.steps) and not event.skipped:
            return None
        self._step_line_s = now
        left = self._status.left_s
        return (
            f"step {event.step}/{event.steps}  loss {event.loss:.4f}  {duration(event.seconds)}"
            f"  {self._status.tokens_per_s:,.0f} tokens/s"
            + (f"  {duration(left)} left" if left else "")
            + ("  SKIPPED: a gradient was not finite" if event.skipped else "")
        )

    def __enter__(self) -> Self:
        self._say(self._status.title)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


View = LiveView | PlainView
"""Takes a run's events and shows them between `with` and its end."""


def open_view(title: str, console: Console | None = None) -> View:
    """The view that suits the console: live in a terminal, plain lines elsewhere."""
    out = console or Console()
    if out.is_terminal and not out.is_dumb_terminal:
        return LiveView(title, out)
    return PlainView(title, lambda line: out.print(line, markup=False, highlight=False, soft_wrap=True))
