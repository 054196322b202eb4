"""The network that the other tests rely on: its rates, its delay, who can dial whom, and that nothing of it stays."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.wan import Home, Wan, lacking

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(lacking()), reason=lacking())]

GOODPUT = 1448 / 1514
"""What TCP carries of a rate that counts whole Ethernet frames."""
SERVE = """
import json, socket, sys, time
with socket.create_server((sys.argv[1], 5201)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    buffer, marks, total = bytearray(1 << 20), [], 0
    while count := connection.recv_into(buffer):
        if buffer[0] == 1:
            connection.sendall(b"!")
        total += count
        marks.append((time.monotonic(), total))
first, last = marks[len(marks) // 3], marks[-1]
print((last[1] - first[1]) * 8e-6 / max(1e-9, last[0] - first[0]))
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5201), timeout=3) as connection:
    end, data = time.monotonic() + float(sys.argv[2]), bytes(1 << 16)
    while time.monotonic() < end:
        connection.sendall(data)
"""
ECHO = """
import socket, statistics, sys, time
with socket.create_connection((sys.argv[1], 5201), timeout=3) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times = []
    for _ in range(20):
        start = time.monotonic()
        connection.sendall(bytes([1]))
        connection.recv(1)
        times.append(time.monotonic() - start)
    print(statistics.median(times) * 1e3)
"""


def talk(wan, src, dst, code, *words):
    """What the sender prints or, if that is nothing, what the receiver does; None if the one cannot dial the other."""
    server = wan.popen(dst, [sys.executable, "-c", SERVE, wan.ip(dst)], stdout=subprocess.PIPE, text=True)
    server.stdout.readline()
    client = wan.popen(
        src,
        [sys.executable, "-c", code, wan.ip(dst), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said, error = client.communicate(timeout=30)
    if client.returncode:
        assert "TimeoutError" in error or "unreachable" in error
        server.kill()
    heard = server.communicate(timeout=30)[0]
    return float(said or heard) if not client.returncode else None


def keeps_to(mbit_per_s, goodput):
    """Never more than the rate, and not much less: other work on the machine may hold up a sender."""
    return 0.6 * mbit_per_s * GOODPUT < goodput < 1.08 * mbit_per_s * GOODPUT


@pytest.mark.parametrize("delay_ms", [0, 20])
def test_rates_and_delays(delay_ms):
    with Wan([Home(20), Home(None), Home(100, 50)], delay_ms=delay_ms) as wan:
        for src, dst, mbit in ((0, 1, 20), (1, 2, 50), (2, None, 100)):
            assert keeps_to(mbit, talk(wan, src, dst, SEND, 1.5))
        sent, received = wan.bytes()
        assert sent[0] == pytest.approx(received[1], rel=0.1) and sent[0] > 1e6
        assert 2 * delay_ms <= talk(wan, 0, 2, ECHO) < 2 * delay_ms + 15
        wan.reshape(0, Home(5))
        assert keeps_to(5, talk(wan, 0, 1, SEND, 2))


def test_who_can_dial_whom():
    with Wan([Home(nat=True), Home(firewall=True), Home()]) as wan:
        assert talk(wan, 0, 2, ECHO) is not None
        assert talk(wan, 1, 2, ECHO) is not None
        assert talk(wan, 2, 0, ECHO) is None
        assert talk(wan, 2, 1, ECHO) is None


def namespaces(pid):
    listed = subprocess.run(["ip", "-j", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [entry["name"] for entry in json.loads(listed or "[]") if f"{pid}-" in entry["name"]]


def test_nothing_stays():
    with Wan([Home(10)], delay_ms=5) as wan:
        left_behind = wan.popen(0, ["sleep", "60"])
        assert namespaces(os.getpid())
    assert left_behind.wait(5) == -signal.SIGKILL
    assert namespaces(os.getpid()) == []


def test_what_a_killed_process_left_is_removed():
    code = "import os; from tests.wan import Home, Wan\nwith Wan([Home(10)], delay_ms=5): os.kill(os.getpid(), 9)"
    killed = subprocess.Popen([sys.executable, "-c", code])
    killed.wait(30)
    assert namespaces(killed.pid)
    with Wan([Home(10)]):
        assert namespaces(killed.pid) == []
