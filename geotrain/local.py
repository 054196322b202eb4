"""A whole swarm on this machine: peers as processes that never outlive this one. I/O.

Each peer is `python -m geotrain join -`: it reads its ticket from standard input, which this process holds open, and
dies when that closes, however this process ends. So the ticket is in no process list, and a `kill -9` leaves no
orphan.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from . import topology
from .coordinator import Coordinator
from .disk import disk_errors
from .errors import ConfigError, LocalError
from .facts import Recorder
from .identity import Ticket
from .results import Result
from .topology import Topology

_WATCH_S = 0.25
_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class LocalPeer:
    """What one peer of the swarm gives."""

    name: str
    duty: float = 1.0
    memory_gib: float | None = None
    threads: int | None = 1
    device: str = "auto"

    def arguments(self, topology_file: Path | None) -> list[str]:
        words = ["--name", self.name, "--duty", str(self.duty), "--device", self.device, "--host", "127.0.0.1"]
        if self.memory_gib is not None:
            words += ["--memory", str(self.memory_gib)]
        if self.threads is not None:
            words += ["--threads", str(self.threads)]
        return words + (["--topology", str(topology_file)] if topology_file is not None else [])


class LocalPeers:
    """Peer processes. They start on `with`, wait for `give`, and are gone when the block ends.

    Args:
        logs: folder for what they print, a file a peer.
        topology_file: a topology file that shapes their links.
        program: what Python runs as `geotrain`.
    """

    def __init__(
        self,
        peers: Sequence[LocalPeer],
        logs: Path,
        topology_file: Path | None = None,
        program: Sequence[str] = ("-m", "geotrain"),
    ) -> None:
        self._peers, self._logs, self._topology, self._program = tuple(peers), logs, topology_file, tuple(program)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        with disk_errors(self._logs, "the peers' logs"):
            self._logs.mkdir(parents=True, exist_ok=True)
        try:
            for peer in self._peers:
                self._start(peer)
        except BaseException:
            self.close(0.0)
            raise
        return self

    def _start(self, peer: LocalPeer) -> None:
        path = os.pathsep.join(p for p in (str(_PACKAGE), os.environ.get("PYTHONPATH", "")) if p)
        with open(self.log(peer.name), "wb") as output:
            self.processes[peer.name] = subprocess.Popen(
                [sys.executable, "-u", *self._program, "join", "-", *peer.arguments(self._topology)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl+C in the terminal is for us; we tell them
            )

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def give(self, ticket: object) -> None:
        """Let them join."""
        for process in self.processes.values():
            with contextlib.suppress(OSError):  # it is dead; `failure` tells
                stdin = _stdin(process)
                stdin.write(f"{ticket}\n".encode())
                stdin.flush()

    def failure(self, joined: Collection[str]) -> str | None:
        """A peer that ended before it joined, and the last thing that it said."""
        for name, process in self.processes.items():
            if name not in joined and process.poll() is not None:
                lines = self.log(name).read_text(errors="replace").strip().splitlines()
                return f"peer {name} ended with code {process.returncode}: {lines[-1] if lines else 'it said nothing'}"
        return None

    def close(self, grace_s: float) -> None:
        """Wait for those that leave by themselves, then close their standard input, then kill."""
        self._wait(grace_s)
        for process in self.processes.values():
            with contextlib.suppress(OSError):
                _stdin(process).close()
        self._wait(2.0)
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(2.0 if kind is None else 0.0)


def train_with(
    coordinator: Coordinator, peers: LocalPeers, recorder: Recorder
) -> Callable[[Ticket], Coroutine[None, None, Result]]:
    """What to do once the coordinator's doors are open: let the peers join, train to the end.

    It raises `LocalError` if a peer cannot even join, and what `Coordinator.run` raises.

    Args:
        recorder: hears the coordinator's events.
    """

    async def drive(ticket: Ticket) -> Result:
        running = asyncio.create_task(coordinator.run())
        peers.give(ticket)
        try:
            while not running.done():
                await asyncio.wait([running], timeout=_WATCH_S)
                failure = peers.failure(recorder.joined)
                if failure is not None and not running.done():
                    raise LocalError(failure)
            return await running
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait([running])

    return drive


def read_topology(path: Path) -> Topology:
    """The network in a TOML file. Raises `ConfigError` with what is wrong in it."""
    try:
        return topology.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the topology: {error}; check the path") from None


class TopologyFile:
    """A network to act out, from a file that may change meanwhile. Raises `ConfigError` as `read_topology` does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.topology = read_topology(path)
        self._text = path.read_bytes()

    def changed(self) -> Topology | None:
        """The network in the file, if it is another one than last time. One that makes no sense is passed over."""
        with contextlib.suppress(OSError, ConfigError):
            text = self._path.read_bytes()
            if text != self._text:
                self._text, self.topology = text, read_topology(self._path)
                return self.topology
        return None


def _stdin(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None  # it was asked for
    return process.stdin
