"""A child's line to the process that started it: the ticket arrives on standard input, whose end is ours too. I/O.

It imports nothing heavy, so that a child heeds it before torch is loaded, which may take many seconds.
"""

import contextlib
import os
import queue
import threading


class Parent:
    """Watches standard input from a thread from now on; when it closes, this process ends, whatever it does."""

    def __init__(self) -> None:
        self._tickets: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="parent", daemon=True).start()

    def ticket(self) -> str:
        """Waits for the first line."""
        return self._tickets.get()

    def _watch(self) -> None:
        line = b""
        with contextlib.suppress(OSError):
            while chunk := os.read(0, 4096):  # not sys.stdin, whose lock would be held when the interpreter ends
                if b"\n" not in line:
                    line += chunk
                    if b"\n" in line:
                        self._tickets.put(line.decode(errors="replace"))
        os._exit(1)
