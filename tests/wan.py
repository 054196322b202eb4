"""A wide-area network on one Linux machine: peers in network namespaces, links shaped by the kernel. I/O (root).

    with Wan([Home(up=10, down=50), Home(up=20, nat=True)], delay_ms=20) as wan:
        wan.popen(0, ["geotrain", "join", ticket])

A peer is a namespace with the address 10.77.0.<i + 1> on `eth0`, whose cable ends in a namespace that stands for the
internet. A token bucket on the peer's end caps what it sends, one on the far end what it receives; they count whole
Ethernet frames, so that TCP carries at most 1448/1514 of a rate. Without a delay the cables end in a bridge; with one,
a process of ours (`tests/relay.py`) carries each frame on after its delay. The internet itself has an address too,
`Wan.ip(None)`: what runs there is not shaped but by the peers' own rates.

Everything is gone when the block ends, with all that still runs in it; what a killed process left behind is removed by
the next one that builds a network.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_PREFIX = "geotrain"
_RELAY = Path(__file__).with_name("relay.py")
_NET = "10.77.0"
_INTERNET = 254
_MTU = 1500
_QUEUE_MS = 100
"""What waits longer at a bottleneck is dropped."""
_FIREWALL = """
table inet home {
  chain into { type filter hook input priority 0; policy drop; iif lo accept; ct state established,related accept; }
}
"""
_NAT = """
table ip nat {
  chain out { type nat hook postrouting priority 100; oifname "eth0" masquerade; }
}
table inet router {
  chain through { type filter hook forward priority 0; policy drop; iifname "lan" accept;
                  ct state established,related accept; }
}
"""


def lacking() -> str:
    """Why this machine cannot build networks; empty if it can."""
    if os.geteuid() != 0:
        return "networks are built of namespaces, which needs root"
    absent = [package for tool, package in (("ip", "iproute2"), ("nft", "nftables")) if shutil.which(tool) is None]
    return f"networks are built of namespaces, which needs {' and '.join(absent)}: install them" if absent else ""


@dataclass(frozen=True)
class Home:
    """One peer's connection: Mbit/s up and down (None: no limit; down is up's by default). `firewall`: nobody can dial
    it. `nat`: that, and it has a private address behind a router that masquerades it. Both need `nft`."""

    up: float | None = None
    down: float | None = None
    firewall: bool = False
    nat: bool = False


class Wan:
    """The network; `with` builds it. Raises `RuntimeError` with the command that the kernel refuses.

    Args:
        delay_ms: one way, between any two peers, and between a peer and the internet.
    """

    def __init__(self, homes: Sequence[Home], *, delay_ms: float = 0.0) -> None:
        self.homes, self.delay_ms = tuple(homes), delay_ms
        self._name = f"{_PREFIX}{os.getpid()}"
        self._hub = f"{self._name}-internet"
        self._relay: subprocess.Popen[str] | None = None

    def namespace(self, peer: int | None) -> str:
        """Where a peer runs; None: the internet."""
        return self._hub if peer is None else f"{self._name}-peer{peer}"

    def ip(self, peer: int | None) -> str:
        """The address of its `eth0`, which others cannot dial if it is behind NAT."""
        if peer is not None and self.homes[peer].nat:
            return f"10.78.{peer}.2"
        return f"{_NET}.{_INTERNET if peer is None else peer + 1}"

    def popen(self, peer: int | None, command: Sequence[object], **options: Any) -> "subprocess.Popen[Any]":
        """Starts a command in a peer's namespace; options are those of `subprocess.Popen`."""
        return subprocess.Popen(["ip", "netns", "exec", self.namespace(peer), *map(str, command)], **options)

    def bytes(self) -> tuple[list[int], list[int]]:
        """What each peer has sent and received until now: whole frames, counted at the far ends of the cables."""
        links = json.loads(_run("ip", "-n", self._hub, "-s", "-j", "link", "show"))
        counters = {link["ifname"]: link["stats64"] for link in links}
        cables = [counters[f"cable{peer}"] for peer in range(len(self.homes))]
        return [cable["rx"]["bytes"] for cable in cables], [cable["tx"]["bytes"] for cable in cables]

    def _edge(self, peer: int) -> str:
        """The namespace that holds the home's end of its cable."""
        return f"{self._name}-router{peer}" if self.homes[peer].nat else self.namespace(peer)

    def reshape(self, peer: int, home: Home) -> None:
        """Its connection has other rates from now on."""
        self.homes = (*self.homes[:peer], home, *self.homes[peer + 1 :])
        self._shape(peer, "replace")

    def __enter__(self) -> Self:
        self._remove()
        try:
            self._add(self._hub)
            for peer in range(len(self.homes)):
                self._connect(peer)
            self._join_cables()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _add(self, namespace: str) -> None:
        _run("ip", "netns", "add", namespace)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")

    def _connect(self, peer: int) -> None:
        home, edge = self.homes[peer], self._edge(peer)
        self._add(self.namespace(peer))
        if home.nat:
            self._add(edge)
        self._cable(f"cable{peer}", edge, f"{_NET}.{peer + 1}")
        self._shape(peer, "add")
        if home.nat:
            _run("ip", "-n", edge, "link", "add", "lan", "type", "veth", "peer", "name", "eth0", "netns",
                 self.namespace(peer))  # fmt: skip
            for namespace, device, last in ((edge, "lan", 1), (self.namespace(peer), "eth0", 2)):
                _run("ip", "-n", namespace, "addr", "add", f"10.78.{peer}.{last}/24", "dev", device)
                _run("ip", "-n", namespace, "link", "set", device, "up")
            _run("ip", "-n", self.namespace(peer), "route", "add", "default", "via", f"10.78.{peer}.1")
            _run("ip", "netns", "exec", edge, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            _run("ip", "netns", "exec", edge, "nft", "-f", "-", text=_NAT)
        elif home.firewall:
            _run("ip", "netns", "exec", edge, "nft", "-f", "-", text=_FIREWALL)

    def _cable(self, far_end: str, namespace: str, address: str) -> None:
        """From the internet to `eth0` of a namespace."""
        _run("ip", "-n", self._hub, "link", "add", far_end, "mtu", _MTU, "type", "veth", "peer", "name", "eth0", "mtu",
             _MTU, "netns", namespace)  # fmt: skip
        _run("ip", "-n", self._hub, "link", "set", far_end, "up")
        _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        _run("ip", "-n", namespace, "link", "set", "eth0", "up")

    def _shape(self, peer: int, verb: str) -> None:
        home = self.homes[peer]
        down = home.up if home.down is None else home.down
        for namespace, device, rate in ((self._edge(peer), "eth0", home.up), (self._hub, f"cable{peer}", down)):
            if rate is not None:  # a burst of 1 ms, but never less than the kernel's own granularity takes
                burst = max(16384, int(rate * 125))
                _run("tc", "-n", namespace, "qdisc", verb, "dev", device, "root", "tbf", "rate", f"{rate}mbit",
                     "burst", burst, "latency", f"{_QUEUE_MS}ms")  # fmt: skip

    def _join_cables(self) -> None:
        cables = [f"cable{peer}" for peer in range(len(self.homes))]
        if not self.delay_ms:
            _run("ip", "-n", self._hub, "link", "add", "eth0", "mtu", _MTU, "type", "bridge")
            for cable in cables:
                _run("ip", "-n", self._hub, "link", "set", cable, "master", "eth0")
            _run("ip", "-n", self._hub, "addr", "add", f"{self.ip(None)}/24", "dev", "eth0")
            _run("ip", "-n", self._hub, "link", "set", "eth0", "up")
            return
        self._cable("cable", self._hub, self.ip(None))
        self._relay = self.popen(
            None, [sys.executable, _RELAY, self.delay_ms, *cables, "cable"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if self._relay.stdout is None or self._relay.stdout.readline() != "ready\n":
            raise RuntimeError(f"the relay did not start: code {self._relay.wait()}")

    def _remove(self) -> None:
        if self._relay is not None:
            self._relay.communicate()  # it ends with its standard input
            self._relay = None
        _remove_namespaces(lambda owner: owner == os.getpid() or not Path(f"/proc/{owner}").exists())


def _remove_namespaces(of: Callable[[int], bool]) -> None:
    """Those of the processes that `of` says, and whatever runs in them."""
    for line in _run("ip", "netns", "list").splitlines():
        namespace = line.split()[0]
        owner = re.match(rf"{_PREFIX}(\d+)-", namespace)
        if owner is not None and of(int(owner[1])):
            for pid in _run("ip", "netns", "pids", namespace).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _run("ip", "netns", "del", namespace)


def _run(*command: object, text: str | None = None) -> str:
    done = subprocess.run(list(map(str, command)), input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
