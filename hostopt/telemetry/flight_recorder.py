"""The last events of a rank, kept in memory and dumped to files when its ring is aborted.

Modelled on the flight recorder of PyTorch's NCCL process group: a small ring buffer of events
costs almost nothing during training, and shows after an error what each rank was doing.
"""

from __future__ import annotations

import collections
import faulthandler
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

_log = logging.getLogger(__name__)

_CAPACITY = 256  # events
_DUMP_TIMEOUT_S = 1.0


class Event(NamedTuple):
    """One action of a collective."""

    kind: str  # "sent", "received", "in memory", or "begun" over MPI
    peer: int  # the other rank; -1 if the event concerns no single peer
    name: str
    tag: Any  # a `Tag` of `hostopt.transport.message`, of a message or a call
    nbytes: int
    time_s: float  # on the monotonic clock

    def to_dict(self, now_s: float) -> dict[str, Any]:
        """Returns the event as a dump shows it."""
        numbers = self.tag._asdict()
        numbers["layout"] = numbers.pop("signature")
        return {
            "ago_s": round(now_s - self.time_s, 6),
            "kind": self.kind,
            "peer": self.peer,
            "what": self.name,
            "nbytes": self.nbytes,
            **numbers,
        }


class FlightRecorder:
    """Keeps the last 256 events of this rank. Any thread may record events."""

    def __init__(self, rank: int, directory: str | os.PathLike[str] | None) -> None:
        self.directory = directory
        self._rank = rank
        self._events: collections.deque[Event] = collections.deque(maxlen=_CAPACITY)
        self._dumped = threading.Event()

    @property
    def last(self) -> Event | None:
        """The newest event; None if there is none."""
        return self._events[-1] if self._events else None

    def record(self, kind: str, peer: int, name: str, tag: Any, nbytes: int = 0) -> None:
        """Records an event; the arguments are those of `Event`."""
        self._events.append(Event(kind, peer, name, tag, nbytes, time.monotonic()))

    def has_sent(self, peer: int, tag: Sequence[int]) -> bool:
        """Returns True if a message was sent, whatever its signature, the tag's last number."""
        numbers = tuple(tag[:-1])
        return any(
            event.kind == "sent" and event.peer == peer and event.tag[:-1] == numbers
            for event in list(self._events)
        )

    def start_dump(self, details: dict[str, Any]) -> None:
        """Dumps in a thread, as a disk that hangs must not delay the error."""
        name = "hostopt-record"
        try:
            threading.Thread(target=self._dump, args=[details], daemon=True, name=name).start()
        except RuntimeError:  # Python is shutting down and starts no threads
            self._dumped.set()

    def wait_for_dump(self) -> None:
        """Waits for the end of a dump that has started or is about to start, at most a second."""
        self._dumped.wait(_DUMP_TIMEOUT_S)

    def _dump(self, details: dict[str, Any]) -> None:
        """Writes the stacks of all threads and the last events to the directory, if any."""
        try:
            if self.directory is None:
                return
            path = os.path.join(self.directory, f"rank_{self._rank}")
            now_s = time.monotonic()
            events = [event.to_dict(now_s) for event in list(self._events)]
            os.makedirs(self.directory, exist_ok=True)
            with open(f"{path}.stacks.txt", "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            with open(f"{path}.events.json", "w") as file:
                json.dump({**details, "events": events}, file, indent=1, default=str)
            _log.info("rank %d: stacks and last events are in %s.*", self._rank, path)
        except OSError as error:  # must not replace the error that aborted the ring
            _log.warning("rank %d: no stacks and events written: %s", self._rank, error)
        finally:
            self._dumped.set()
