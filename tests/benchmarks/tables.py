"""What a benchmark gives: tables of figures, and the machine that they were measured on. I/O (clock, machine facts)."""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

Cell = str | int | float | None
T = TypeVar("T")


class Unavailable(Exception):
    """This machine cannot run the benchmark; says what it lacks."""


@dataclass(frozen=True)
class Table:
    """One table.

    `ratios`: figures of one run over others of the same run, less is better. They hardly depend on the machine, so CI
    keeps them: `tests/benchmarks/kept.json` has, by "benchmark: name of the ratio", what the short form may reach.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    ratios: Mapping[str, float] = field(default_factory=dict[str, float])

    def print(self, console: Console) -> None:
        table = RichTable(*self.columns, title=self.title, title_justify="left", box=box.SIMPLE)
        for i, column in enumerate(table.columns):
            numbers = all(isinstance(row[i], (int, float)) or row[i] is None for row in self.rows)
            column.justify = "right" if numbers else "left"
        for row in self.rows:
            table.add_row(*map(_text, row))
        console.print(table)
        for note in self.notes:
            console.print(note, highlight=False, markup=False)
        for name, ratio in self.ratios.items():
            console.print(f"{name}: {ratio:.3g}", highlight=False, markup=False)

    def facts(self) -> dict[str, Any]:
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": list(self.notes), "ratios": dict(self.ratios)}


def alternate(rounds: int, runs: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """What each run gave in each round. They take turns, so that other work on the machine weighs on all of them, and
    every other round goes backwards, so that none always follows the same one."""
    given: dict[str, list[T]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in sorted(runs, key=list(runs).index, reverse=number % 2 == 1):
            given[name].append(runs[name]())
    return given


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the rounds' ratios: each round is compared with itself only."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def machine() -> dict[str, Any]:
    """What the figures were measured on, and how busy it was."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": _commit(),
        "when": time.strftime("%Y-%m-%d %H:%M %Z"),
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.4g}" if abs(cell) < 1e4 else f"{cell:,.0f}"
    return str(cell)
