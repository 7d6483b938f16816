"""Standard output and standard error of the launcher, which never block on a slow reader.

If the output of a rank were not read, the rank would block in the middle of a step, and all other
ranks with it. So output is queued in memory until it is read. Ranks block only if the queue is
full. If the reader then makes no progress for `READER_TIMEOUT_S`, lines are dropped.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque

MAX_QUEUED_BYTES = 16 << 20
READER_TIMEOUT_S = 10.0  # without progress of the reader, before lines are dropped
_FLUSH_TIMEOUT_S = 5.0  # without progress of the reader, at the end
_CHUNK_BYTES = 64 << 10  # of one write: the capacity of a pipe
_COLUMNS = 80  # of a terminal of unknown size
_CLEAR = b"\r\x1b[K"  # erases the line of a terminal


class QueuedWriter:
    """Writes lines to a file descriptor from a separate thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._queued_bytes = 0  # of the queued lines and of the line being written
        self._dropped = 0
        self._progress_s = 0.0  # `time.monotonic` of the last write, or of the first queued line
        self._thread: threading.Thread | None = None
        self._live = b""  # the line that stays below all others, on a terminal

    def draw(self, text: str) -> None:
        """Replaces the line that stays below all others; an empty text removes it."""
        with self._changed:
            if text and self._queued_bytes:  # a reader that is slow sees fewer states
                return
            erased = _CLEAR if self._live else b""
            self._live = text[: self._columns() - 1].encode()
            self.write(b"" if text else erased)

    def _columns(self) -> int:
        with contextlib.suppress(OSError):  # it is no terminal
            return os.get_terminal_size(self._fd).columns or _COLUMNS
        return _COLUMNS

    def write(self, line: bytes) -> None:
        """Queues a line; blocks while the queue is full; drops the line if the reader stalls."""
        with self._changed:
            while self._queued_bytes + len(line) > MAX_QUEUED_BYTES:
                left_s = self._progress_s + READER_TIMEOUT_S - time.monotonic()
                if left_s <= 0:
                    self._dropped += 1
                    return
                self._changed.wait(left_s)
            if self._dropped:
                line = b"hostopt: %d lines dropped: nobody read them\n%b" % (self._dropped, line)
                self._dropped = 0
            if self._live:
                line = _CLEAR + line + self._live
            if not self._queued_bytes:
                self._progress_s = time.monotonic()
            self._lines.append(line)
            self._queued_bytes += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Waits until the queue is empty, or the reader makes no progress for `timeout_s`."""
        self.write(b"")
        with self._changed:
            while self._queued_bytes:
                left_s = self._progress_s + timeout_s - time.monotonic()
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
                self._queued_bytes -= len(line)
                self._changed.notify_all()

    def _write(self, line: bytes) -> None:
        data = memoryview(line)
        with contextlib.suppress(OSError):  # the reader has closed its end
            while data:
                try:
                    data = data[os.write(self._fd, data[:_CHUNK_BYTES]) :]
                except BlockingIOError:
                    select.select([], [self._fd], [])
                self._progress_s = time.monotonic()


OUT, ERR = QueuedWriter(1), QueuedWriter(2)


class LogStream:
    """Standard error, for `logging`."""

    @staticmethod
    def write(text: str) -> None:
        """Queues a text."""
        ERR.write(text.encode(errors="backslashreplace"))


def flush() -> None:
    """Waits until standard output and standard error are written, unless their reader stalls."""
    OUT.flush(_FLUSH_TIMEOUT_S)
    ERR.flush(_FLUSH_TIMEOUT_S)


def print_error(error: Exception) -> None:
    """Prints an error on standard error."""
    LogStream.write(f"hostopt: {error}\n")
