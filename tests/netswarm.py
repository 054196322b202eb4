"""geotrain as its users run it: a coordinator and peers, in the homes of a `Wan` or on loopback. I/O."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .wan import Wan

_ROOT = Path(__file__).parents[1]
_PORT = 7643
_POLL_S = 0.02
_IMPORTED_S = 20.0

Event = dict[str, Any]


class Seen(NamedTuple):
    """An event of the run's log, when it was seen (seconds from the first command), and what every peer's interface
    had sent and received by then."""

    at_s: float
    event: Event
    sent: list[int]
    received: list[int]


def run(
    wan: Wan | None,
    job: str,
    folder: Path,
    *,
    peers: Sequence[str],
    until: Callable[[Event], bool],
    timeout_s: float = 600.0,
    at_each: Callable[[Event], None] = lambda event: None,
    join: Literal["at once", "pasted", "imported"] = "at once",
) -> list[Seen]:
    """Runs a job until an event of its log is the last that was wanted; then everything is killed.

    Args:
        wan: the coordinator runs in its internet, each peer at the home of its number; None: loopback.
        job: TOML without [run].
        peers: names.
        at_each: is told each event, and may change the network.
        join: when peers start. "at once": with the coordinator. "pasted": when the ticket is printed. "imported": with
            the coordinator, and they get the ticket when all has surely been imported. An event "Ticket" tells when
            they were given it.

    Raises `RuntimeError` with the last lines of what was printed, if a process ends or the time is up before.
    """  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / "job.toml", folder / "runs" / "run" / "events.jsonl"
    path.write_text(f'[run]\nname = "run"\ndir = "{folder / "runs"}"\n{job}')
    start = time.monotonic()
    processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_peers() -> None:
        for home, name in enumerate(peers):
            words = ["join", "-", "--name", name, "--threads", 1, "--device", "cpu"]
            words += [] if wan is not None else ["--host", "127.0.0.1"]
            processes[name] = _geotrain(wan, home, words, folder / f"{name}.log")

    def saw(event: Event) -> Seen:
        return Seen(time.monotonic() - start, event, *(wan.bytes() if wan is not None else ([], [])))

    try:
        words = ["coordinator", path]
        words += ["--host", "127.0.0.1", "--port", 0] if wan is None else [
            "--port", _PORT, "--advertise", f"{wan.ip(None)}:{_PORT}"]  # fmt: skip
        processes["coordinator"] = _geotrain(wan, None, words, folder / "coordinator.log")
        if join != "pasted":
            start_peers()

        def wait(what: Callable[[], bool]) -> None:
            while not what():
                ended = [name for name, process in processes.items() if process.poll() is not None]
                if ended or time.monotonic() - start > timeout_s:
                    raise RuntimeError(_failure(folder, ended or list(processes)))
                time.sleep(_POLL_S)

        wait(lambda: _ticket(folder) is not None)
        seen = [saw({"event": "Ticket"})]
        if join == "pasted":
            start_peers()
        if join == "imported":
            time.sleep(max(0.0, start + _IMPORTED_S - time.monotonic()))
            seen = [saw({"event": "Ticket"})]
        for name in peers:
            stdin = processes[name].stdin
            assert stdin is not None
            stdin.write(f"{_ticket(folder)}\n".encode())
            stdin.flush()
        wait(log.exists)
        with log.open() as lines:
            line = ""
            while True:
                line += lines.readline()
                if not line.endswith("\n"):
                    wait(lambda: log.stat().st_size > lines.tell())
                    continue
                event, line = json.loads(line), ""
                seen.append(saw(event))
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


def _geotrain(wan: Wan | None, home: int | None, words: Sequence[object], log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-u", "-m", "geotrain", *map(str, words)]
    with log.open("wb") as output:
        options: dict[str, Any] = {
            "stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT, "env": environment(),
        }  # fmt: skip
        return subprocess.Popen(command, **options) if wan is None else wan.popen(home, command, **options)


def _ticket(folder: Path) -> str | None:
    for line in (folder / "coordinator.log").read_text(errors="replace").splitlines():
        if line.startswith("geotrain join "):
            return line.split()[2]
    return None


def _failure(folder: Path, names: Sequence[str]) -> str:
    lines = [f"{name}: {line}" for name in names
             for line in (folder / f"{name}.log").read_text(errors="replace").strip().splitlines()[-5:]]  # fmt: skip
    return "the run did not go on\n" + "\n".join(lines)
