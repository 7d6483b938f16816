"""Standard output and standard error of the launcher, which never have to wait for a reader.

A rank whose output nobody reads would stop in the middle of a step, and all others with it. So
what ranks print waits in memory until it is read. When that is full they wait, and when nobody has
read anything for a while lines are dropped.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
import time
from collections import deque

__all__: list[str] = []

MAX_WAITING_BYTES = 16 << 20
PATIENCE_S = 10.0  # with a reader that takes nothing
_FLUSH_S = 5.0  # with a reader that takes nothing, in the end
_PIECE_BYTES = 64 << 10  # of a line: as much as a pipe holds


class Outlet:
    """A file descriptor that a thread writes to.

    Args:
      fd: the descriptor.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0  # of the lines, and of the one that is being written
        self._dropped = 0
        self._moved_s = 0.0  # when something was written or began to wait, by `time.monotonic`
        self._thread: threading.Thread | None = None

    def write(self, line: bytes) -> None:
        """Have a line written; wait if too much waits already, and drop it if nobody reads."""
        with self._changed:
            while self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
                left_s = self._moved_s + PATIENCE_S - time.monotonic()
                if left_s <= 0:
                    self._dropped += 1
                    return
                self._changed.wait(left_s)
            if self._dropped:
                line = b"hostopt: %d lines dropped: nobody read them\n%b" % (self._dropped, line)
                self._dropped = 0
            if not self._waiting_bytes:
                self._moved_s = time.monotonic()
            self._lines.append(line)
            self._waiting_bytes += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Wait until all is written, or nobody has read anything for some seconds."""
        self.write(b"")
        with self._changed:
            while self._waiting_bytes:
                left_s = self._moved_s + timeout_s - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(left_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
            self._write(line)
            with self._changed:
                self._waiting_bytes -= len(line)
                self._changed.notify_all()

    def _write(self, line: bytes) -> None:
        data = memoryview(line)
        with contextlib.suppress(OSError):  # whoever read it has ended
            while data:
                try:
                    data = data[os.write(self._fd, data[:_PIECE_BYTES]) :]
                except BlockingIOError:
                    select.select([], [self._fd], [])
                self._moved_s = time.monotonic()


class LogStream(io.TextIOBase):
    """An outlet as a text file, for `logging`.

    Args:
      outlet: where the text goes.
    """

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet

    def write(self, text: str) -> int:
        """Have a text written."""
        self._outlet.write(text.encode(errors="backslashreplace"))
        return len(text)


OUT, ERR = Outlet(1), Outlet(2)


def flush() -> None:
    """Wait until both outlets have written all, but no longer than somebody reads."""
    OUT.flush(_FLUSH_S)
    ERR.flush(_FLUSH_S)


def open_closed_descriptors() -> None:
    """Open /dev/null as each of the descriptors 0 to 2 that is closed.

    Otherwise the next socket or pipe would get the number, and whatever is printed would go there.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, so it is fd
        if getattr(sys, name) is None:  # the number may be another file's by now
            file = open(os.devnull, "w" if fd else "r")  # noqa: SIM115  for good
            setattr(sys, name, file)
