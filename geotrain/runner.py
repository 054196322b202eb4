"""One run in front of a person: the view, Ctrl+C, and at the end the report and what it comes to. I/O."""

import asyncio
import contextlib
import os
import platform
import signal
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from . import events
from .coordinator import Coordinator
from .facts import ACTIVITIES, Recorder
from .identity import Ticket
from .live import open_view
from .report import write_json, write_report
from .results import Result
from .runfolder import PLAN
from .words import duration

DRAIN_S = 5.0
"""After Ctrl+C a step has so long to finish and be saved; who started us may want us gone in 10 s."""


class Runner:
    """Shows a run between `with` and its end; `on_event` is for its coordinator."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self.title = title
        self.console = console or Console()
        self.recorder = Recorder()
        self._view = open_view(title, self.console)

    def on_event(self, event: events.RunEvent) -> None:
        self.recorder(event)
        self._view(event)

    def say(self, doing: str) -> None:
        self._view(events.Waiting(doing))

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl+C ended the run."""
        return self.recorder.ended is not None and self.recorder.ended.reason == "interrupted"

    def print(self, line: str) -> None:
        """A line that stays, above what is drawn again and again."""
        print_line(self.console, line)

    def __enter__(self) -> Self:
        self._view.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._view.__exit__(kind, error, trace)

    async def train(self, coordinator: Coordinator, drive: Callable[[Ticket], Awaitable[Result]]) -> Result:
        """Opens the coordinator's doors and awaits `drive`. Ctrl+C ends the run after the step at hand, a second
        one at once. Raises what the coordinator raises, `KeyboardInterrupt` for an end at once."""
        ticket = await coordinator.start()
        running = asyncio.ensure_future(drive(ticket))
        loop = asyncio.get_running_loop()
        interrupted = False

        def interrupt() -> None:
            nonlocal interrupted
            if interrupted:
                running.cancel()
                return
            interrupted = True
            self.say("Ctrl+C: the step is finished and saved, then the run ends (again: at once)")
            coordinator.stop()
            loop.call_later(DRAIN_S, running.cancel)

        signals = (signal.SIGINT, signal.SIGTERM)
        with contextlib.suppress(NotImplementedError):  # Windows
            for number in signals:
                loop.add_signal_handler(number, interrupt)
        try:
            return await running
        except asyncio.CancelledError:
            if not interrupted:
                raise
            raise KeyboardInterrupt from None
        finally:
            with contextlib.suppress(NotImplementedError):
                for number in signals:
                    loop.remove_signal_handler(number)

    def finish(self, run_dir: Path, *, json_path: Path | None = None, **more: Any) -> int:
        """Writes report and JSON, prints what the run came to, and returns the exit code."""
        report, plan = run_dir / "report.html", run_dir / PLAN
        facts = self.recorder.facts(
            run=self.title,
            run_dir=str(run_dir),
            plan=str(plan) if plan.exists() else None,
            report=str(report),
            machine=machine_facts(),
            **more,
        )
        write_report(report, facts)
        if json_path is not None:
            write_json(json_path, facts)
        print_summary(self.console, facts)
        return 130 if self.interrupted else 0


def machine_facts() -> dict[str, Any]:
    """What the coordinator runs on."""
    return {
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("geotrain", "torch", "grpcio")},
    }


def print_line(console: Console, line: str) -> None:
    """A line as it is: unwrapped, so that it can be pasted."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_summary(console: Console, facts: dict[str, Any]) -> None:
    """The end of a run, in a few lines and a table."""

    def say(line: str) -> None:
        print_line(console, line)

    before, after = facts["held_out_loss_before"], facts["held_out_loss_after"]
    if before is not None and after is not None:
        say(f"\nheld-out loss  {before:.4f} before, {after:.4f} after ({after / before - 1:+.0%})")
    if facts["losses"]:
        step_s = duration(facts["median_step_seconds"])
        say(f"speed          {facts['tokens_per_second']:,.0f} tokens/s, {step_s} a step")
        say("\nWhere the seconds of a step went (sending and waiting: for a link, for a peer; rest: the duty cap):")
        console.print(_seconds_table(facts))
        say("")
    for row in facts["texts"]:
        say(f"{row['prompt']}\n{row['text'].strip()}\n")
    if facts.get("sample"):
        say(f"The model writes:\n{facts['sample']}\n")
    for what in ("checkpoint", "plan", "report"):
        if facts[what]:
            say(f"{what:<11}{facts[what]}")


def _seconds_table(facts: dict[str, Any]) -> Table:
    steps = len(facts["losses"])
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    used = [a for a in ACTIVITIES if facts["seconds_by_activity"][a] > 0]
    table.add_column("stage: peer", no_wrap=True)
    for activity in used:
        table.add_column(activity, justify="right", no_wrap=True)
    for peer in facts["peers"]:
        if sum(peer["seconds_by_activity"].values()) > 0:
            cells = [f"{peer['seconds_by_activity'][a] / steps:.2f} s" for a in used]
            stage = "gone" if peer["stage"] is None else str(peer["stage"])
            table.add_row(f"{stage}: {peer['name']}", *cells)
    return table
