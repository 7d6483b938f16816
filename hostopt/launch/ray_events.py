"""Events of a task on a node of Ray, which the launcher asks for."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

# Kinds of events. The data of a code is the number as text, that of an end is empty.
OUT, ERR, PROGRESS, REPORT, CODE, END = "out", "err", "progress", "report", "code", "end"
_MAX_QUEUED_BYTES = 4 << 20
_MAX_BATCH_BYTES = 80 << 10  # Ray sends results of up to 100 KiB with the answer itself


class Event(NamedTuple):
    """An event of a task.

    Args:
      kind: one of the kinds above.
      data: output, content of a file, or exit code.
    """

    kind: str
    data: bytes


class EventQueue:
    """Events until the launcher has confirmed them.

    A call whose answer is lost is repeated, so an event is kept until a later call confirms it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._first = 0  # number of the first event in the queue
        self._queued_bytes = 0

    def put(self, kind: str, data: bytes = b"") -> None:
        """Appends an event; blocks while the launcher does not keep up."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued_bytes < _MAX_QUEUED_BYTES)
            self._events.append(Event(kind, data))
            self._queued_bytes += len(data)
            self._changed.notify_all()

    def get(self, seen: int, timeout_s: float) -> list[Event]:
        """Returns the events after the first `seen`, which are dropped.

        Args:
          seen: number of events that the launcher has seen.
          timeout_s: longest time to wait for an event.

        Returns:
          The next events, not all of them if they are large; none after the timeout.
        """
        with self._changed:
            while self._events and self._first < seen:
                self._queued_bytes -= len(self._events.popleft().data)
                self._first += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._events, timeout_s)
            result: list[Event] = []
            nbytes = 0
            for event in self._events:
                nbytes += len(event.data)
                if result and nbytes > _MAX_BATCH_BYTES:
                    break
                result.append(event)
            return result
