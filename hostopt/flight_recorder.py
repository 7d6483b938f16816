"""The last events of a rank, kept in memory, and what is written of it when its ring is aborted.

After the flight recorder of PyTorch's NCCL process group: a short ring of events costs nothing
while all goes well, and tells afterwards which rank stood where.
"""

from __future__ import annotations

import collections
import faulthandler
import json
import logging
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__: list[str] = []

_log = logging.getLogger(__name__)

_LAST_EVENTS = 256


class Event(NamedTuple):
    """Something that a collective has done.

    Args:
      kind: such as "sent".
      peer: the other rank, or -1 where there is none in particular.
      what: what was reduced.
      tag: numbers of the message or the call, such as step and bucket.
      nbytes: bytes of data.
      time_s: on this process's monotonic clock.
    """

    kind: str
    peer: int
    what: str
    tag: Any
    nbytes: int
    time_s: float


class FlightRecorder:
    """Keeps the last 256 events of this rank; may be fed from any thread.

    Args:
      rank: this rank.
      directory: where to write, or None.
    """

    def __init__(self, rank: int, directory: str | None) -> None:
        self.directory = directory
        self._rank = rank
        self._events: collections.deque[Event] = collections.deque(maxlen=_LAST_EVENTS)

    @property
    def last(self) -> Event | None:
        """The newest event."""
        return self._events[-1] if self._events else None

    def note(self, kind: str, peer: int, what: str, tag: Any, nbytes: int = 0) -> None:
        """Keep an event; the arguments are those of `Event`."""
        self._events.append(Event(kind, peer, what, tag, nbytes, time.monotonic()))

    def has_sent(self, peer: int, tag: Sequence[int]) -> bool:
        """Whether a message to a peer is among the events.

        Args:
          peer: to whom.
          tag: which message; the last number, its layout, does not count.
        """
        wanted = tuple(tag[:-1])
        return any(
            event.kind == "sent" and event.peer == peer and event.tag[:-1] == wanted
            for event in list(self._events)
        )

    def write(self, facts: dict[str, Any]) -> None:
        """Write the stacks of all threads and the last events into the directory, if there is one.

        Args:
          facts: what else the events' file shows, as JSON can hold it.
        """
        if self.directory is None:
            return
        path = os.path.join(self.directory, f"rank_{self._rank}")
        now_s = time.monotonic()
        events = [
            {
                "ago_s": round(now_s - event.time_s, 6),
                **{k: v for k, v in event._asdict().items() if k not in ("tag", "time_s")},
                **event.tag._asdict(),
            }
            for event in list(self._events)
        ]
        try:
            os.makedirs(self.directory, exist_ok=True)
            with open(f"{path}.stacks.txt", "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            with open(f"{path}.events.json", "w") as file:
                json.dump({**facts, "events": events}, file, indent=1, default=str)
        except OSError as error:  # the error that ends the ring is the one to report
            _log.warning("rank %d: no stacks and events written: %s", self._rank, error)
        else:
            _log.info("rank %d: stacks and last events are in %s.*", self._rank, path)
