"""Carries Ethernet frames between network interfaces, each after a delay: what the kernel lacks here. I/O (root).

    relay.py DELAY_MS INTERFACE ...

A hub that learns: a frame goes to the interface that its destination was seen on, or to all others. The kernel hands
over what a sender wrote in one go (segments not yet cut, checksums not yet made: `PACKET_VNET_HDR`), which keeps it
cheap. Ends with its standard input.
"""

import ctypes
import os
import selectors
import socket
import sys
import time
from collections import deque

_ETH_P_ALL = 3
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE = 33, 32
_VNET_HEADER = 10
_PR_SET_TIMERSLACK = 29
_LARGEST = 1 << 17
_BATCH = 32
_BUFFER = 32 << 20


def port(interface: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    opened.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    opened.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for option in (_SO_RCVBUFFORCE, _SO_SNDBUFFORCE):
        opened.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    opened.bind((interface, _ETH_P_ALL))
    opened.setblocking(False)
    return opened


def relay(delay_s: float, interfaces: list[str]) -> None:
    ports = [port(interface) for interface in interfaces]
    seen: dict[bytes, int] = {}
    late: deque[tuple[float, int, bytes]] = deque()  # one delay for all, so first in is first out
    select = selectors.DefaultSelector()
    for number, opened in enumerate(ports):
        select.register(opened, selectors.EVENT_READ, number)
    select.register(0, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        ready = select.select(max(0.0, late[0][0] - time.monotonic()) if late else None)
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, came_from, frame = late.popleft()
            goes_to = seen.get(frame[_VNET_HEADER : _VNET_HEADER + 6])
            for number in range(len(ports)) if goes_to is None else (goes_to,):
                if number != came_from:
                    try:
                        ports[number].send(frame)
                    except OSError:  # the queue is full: the frame is lost, as on a real link
                        pass
        for key, _ in ready:
            if key.data is None:
                return
            for _ in range(_BATCH):
                try:
                    frame = key.fileobj.recv(_LARGEST)
                except OSError:
                    break
                seen[frame[_VNET_HEADER + 6 : _VNET_HEADER + 12]] = key.data
                late.append((time.monotonic() + delay_s, key.data, frame))


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # ns
    try:  # frames must move while the peers keep every core busy
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except OSError:
        pass
    relay(float(sys.argv[1]) / 1e3, sys.argv[2:])
