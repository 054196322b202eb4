"""geotrain as its users run it in a `Wan`: `geotrain coordinator` in the internet, `geotrain join` at homes. I/O."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .wan import Wan

_ROOT = Path(__file__).parents[1]
_PORT = 7643
_POLL_S = 0.02

Event = dict[str, Any]


class Seen(NamedTuple):
    """An event of the run's log, when it was seen (seconds from the first command), and what every peer's interface
    had sent and received by then."""

    at_s: float
    event: Event
    sent: list[int]
    received: list[int]


def run(
    wan: Wan,
    job: str,
    folder: Path,
    *,
    peers: Sequence[str],
    until: Callable[[Event], bool],
    timeout_s: float = 600.0,
    at_each: Callable[[Event], None] = lambda event: None,
    join: Sequence[str] = (),
) -> list[Seen]:
    """Runs a job until an event of its log is the last that was wanted; then everything is killed.

    Args:
        job: TOML, whose run is called "run" and lives in the run folder that `[run] dir` is set to here.
        peers: names, by home.
        at_each: is told each event, and may change the network.
        join: further words for `geotrain join`.

    Raises `RuntimeError` with the last lines of what was printed, if a process ends or the time is up before.
    """  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / "job.toml", folder / "runs" / "run" / "events.jsonl"
    path.write_text(f'[run]\nname = "run"\ndir = "{folder / "runs"}"\n{job}')
    start = time.monotonic()
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for home, name in enumerate(peers):
            words = ["join", "-", "--name", name, "--threads", 1, "--device", "cpu", *join]
            processes[name] = _geotrain(wan, home, words, folder / f"{name}.log")
        words = ["coordinator", path, "--port", _PORT, "--advertise", f"{wan.ip(None)}:{_PORT}"]
        processes["coordinator"] = _geotrain(wan, None, words, folder / "coordinator.log")

        def wait(what: Callable[[], bool]) -> None:
            while not what():
                ended = [name for name, process in processes.items() if process.poll() is not None]
                if ended or time.monotonic() - start > timeout_s:
                    raise RuntimeError(_failure(folder, ended or list(processes)))
                time.sleep(_POLL_S)

        wait(lambda: _ticket(folder) is not None)
        for name in peers:
            stdin = processes[name].stdin
            assert stdin is not None
            stdin.write(f"{_ticket(folder)}\n".encode())
            stdin.flush()
        wait(log.exists)
        seen: list[Seen] = []
        with log.open() as lines:
            line = ""
            while True:
                line += lines.readline()
                if not line.endswith("\n"):
                    wait(lambda: log.stat().st_size > lines.tell())
                    continue
                event, line = json.loads(line), ""
                seen.append(Seen(time.monotonic() - start, event, *wan.bytes()))
                at_each(event)
                if until(event):
                    return seen
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


def steps(seen: Sequence[Seen]) -> list[Seen]:
    """The committed steps."""
    return [s for s in seen if s.event["event"] == "StepCommitted"]


def committed(step: int) -> Callable[[Event], bool]:
    """Until so many steps are committed."""
    return lambda event: event["event"] == "StepCommitted" and event["step"] >= step


def evaluated(step: int) -> Callable[[Event], bool]:
    """Until the weights after so many steps are evaluated."""
    return lambda event: event["event"] == "Evaluated" and event["step"] >= step


def environment(**more: str) -> dict[str, str]:
    """Of a process that imports our modules, with one thread."""
    return {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", **more}


def _geotrain(wan: Wan, home: int | None, words: Sequence[object], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as output:
        return wan.popen(
            home, [sys.executable, "-u", "-m", "geotrain", *words],
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment(),
        )  # fmt: skip


def _ticket(folder: Path) -> str | None:
    for line in (folder / "coordinator.log").read_text(errors="replace").splitlines():
        if line.startswith("geotrain join "):
            return line.split()[2]
    return None


def _failure(folder: Path, names: Sequence[str]) -> str:
    lines = [f"{name}: {line}" for name in names
             for line in (folder / f"{name}.log").read_text(errors="replace").strip().splitlines()[-5:]]  # fmt: skip
    return "the run did not go on\n" + "\n".join(lines)
