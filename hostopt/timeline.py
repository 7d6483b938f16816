"""What one rank does when, as a file that chrome://tracing and Perfetto open."""

from __future__ import annotations

import atexit
import enum
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hostopt import descriptors
from hostopt.cluster import Cluster
from hostopt.errors import ConfigError

if TYPE_CHECKING:
    from hostopt.transport.base import Tag

__all__: list[str] = []

_log = logging.getLogger(__name__)

MAX_SPANS = 100_000
_REWRITE_EVERY_S = 10.0
# Writing a long file may take a while: it gets this part of the time at most.
_WRITING_SHARE = 0.05
# Spans of one track that overlap get rows of their own; the last one takes what is left.
_ROWS_PER_TRACK = 16

Event = dict[str, Any]


class Track(enum.IntEnum):
    """Rows of a rank, from the top: what the spans in it show."""

    BACKWARD = 0
    LAUNCH = 1
    RING_SEND = 2
    RING_RECEIVE = 3
    WAIT = 4
    APPLY = 5

    @property
    def title(self) -> str:
        """The name of the row, such as "ring send"."""
        return self.name.lower().replace("_", " ")


@dataclass
class Span:
    """A piece of work.

    Args:
      track: the row in which it is shown.
      name: what it is about.
      begin_s: when it began, on this rank's clock (`time.monotonic`).
      end_s: when it ended.
      args: facts that a viewer shows, such as step, bucket and bytes.
    """

    track: Track
    name: str
    begin_s: float
    end_s: float
    args: dict[str, Any]


def path_of_rank(path: str, rank: int) -> Path:
    """Where one rank writes: "trace.json" becomes "trace.rank0.json".

    Args:
      path: what `Options.timeline` says, the same on all ranks.
      rank: the rank.

    Returns:
      The file of that rank.
    """
    whole = Path(path)
    return whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix}")


class Timeline:
    """Records the spans of one rank; the file always holds a whole trace of what came so far.

    The file is written again from time to time, and at `close`. Spans may come from any thread.

    Args:
      path: what `Options.timeline` says.
      cluster: the ring and this rank's place in it.
      max_spans: how many spans are kept; older ones are dropped, and counted in the file.
      rewrite_every_s: how often the file is written, or less often where it takes long.

    Raises:
      ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        path: str,
        cluster: Cluster,
        max_spans: int = MAX_SPANS,
        rewrite_every_s: float = _REWRITE_EVERY_S,
    ) -> None:
        self.rank = cluster.rank or 0
        self.path = path_of_rank(path, self.rank)
        self.clock_offset_s = 0.0
        self._cluster = cluster
        self._rewrite_every_s = rewrite_every_s
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._recorded = 0
        self._growing: dict[tuple[Track, int], tuple[Tag, Span]] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._closed = threading.Event()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.write()
        except OSError as error:
            descriptors.check(error)
            raise ConfigError(
                f"the timeline file {self.path} cannot be written: {error}. Give another file as "
                "HOSTOPT_TIMELINE or RunConfig.timeline"
            ) from error
        self._thread = threading.Thread(target=self._run, daemon=True, name="hostopt-timeline")
        self._thread.start()
        atexit.register(self.close)

    def span(self, track: Track, name: str, begin_s: float, end_s: float, **args: Any) -> Span:
        """Record a piece of work.

        Args:
          track: the row in which it is shown.
          name: what it is about.
          begin_s: when it began, by `time.monotonic`.
          end_s: when it ended.
          **args: facts that a viewer shows, such as step, bucket and bytes.

        Returns:
          What is recorded.
        """
        span = Span(track, name, begin_s, end_s, args)
        with self._lock:
            self._spans.append(span)
            self._recorded += 1
        return span

    def message(
        self, track: Track, tag: Tag, what: str, begin_s: float, end_s: float, payload_bytes: int
    ) -> None:
        """Record one message; the messages of one round of a collective become one span.

        Args:
          track: `RING_SEND` or `RING_RECEIVE`.
          tag: which message.
          what: what the message is a part of.
          begin_s: when this rank began to send it or to wait for it.
          end_s: when it was handed over or had come.
          payload_bytes: its size.
        """
        tag = tag._replace(chunk=0, segment=0)
        previous, span = self._growing.get((track, tag.channel), (None, None))
        if span is not None and previous == tag:
            span.end_s = end_s
            span.args["bytes"] += payload_bytes
            return
        facts = {"step": tag.step, "bucket": tag.bucket, "round": tag.round}
        span = self.span(track, what or "data", begin_s, end_s, **facts, bytes=payload_bytes)
        self._growing[track, tag.channel] = tag, span

    def write(self) -> None:
        """Write the file anew: all of it, or none of it.

        Raises:
          OSError: it cannot be written.
        """
        with self._writing:
            with self._lock:
                spans, dropped = list(self._spans), self._recorded - len(self._spans)
            facts = {
                "rank": self.rank,
                "size": self._cluster.size,
                "clock_offset_us": 1e6 * self.clock_offset_s,
                "dropped_spans": dropped,
            }
            process = f"rank {self.rank} ({self._cluster.ring[self.rank].name})"
            write_trace(self.path, events_of(spans, self.rank, process), facts)

    def close(self) -> None:
        """Write the file for the last time."""
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self.close)
        self._thread.join()
        self._write_or_warn()

    def _run(self) -> None:
        pause_s = self._rewrite_every_s
        while not self._closed.wait(pause_s):
            begin_s = time.monotonic()
            self._write_or_warn()
            pause_s = max(self._rewrite_every_s, (time.monotonic() - begin_s) / _WRITING_SHARE)

    def _write_or_warn(self) -> None:
        try:
            self.write()
        except OSError as error:  # a full disk must not end the training
            _log.warning("the timeline file %s is not up to date: %s", self.path, error)


def events_of(spans: Iterable[Span], rank: int, process: str) -> list[Event]:
    """Turn spans into the events of the Trace Event Format.

    Args:
      spans: in any order.
      rank: becomes the pid.
      process: name of the rank.

    Returns:
      Names of the process and of its rows, then the spans in the order of their beginning.
    """
    titles = {track * _ROWS_PER_TRACK: track.title for track in Track}
    busy_until_s: dict[int, float] = {}
    shown: list[Event] = []
    for span in sorted(spans, key=lambda span: span.begin_s):
        first = span.track * _ROWS_PER_TRACK
        rows = range(first, first + _ROWS_PER_TRACK)
        # a viewer wants no overlap in a row
        free = (row for row in rows if busy_until_s.get(row, span.begin_s) <= span.begin_s)
        row = next(free, rows[-1])
        titles.setdefault(row, f"{span.track.title} ({row - first + 1})")
        busy_until_s[row] = span.end_s
        shown.append(_complete_event(span, rank, row))
    named: list[Event] = [
        _named("process_name", rank, 0, name=process),
        _named("process_sort_index", rank, 0, sort_index=rank),
    ]
    for row in sorted(titles):
        named.append(_named("thread_name", rank, row, name=titles[row]))
        named.append(_named("thread_sort_index", rank, row, sort_index=row))
    return named + shown


def write_trace(path: Path, events: Iterable[Event], facts: dict[str, Any]) -> None:
    """Write a trace beside its place, then put it there.

    Args:
      path: the file.
      events: of the Trace Event Format.
      facts: what hostopt notes about the file.

    Raises:
      OSError: it cannot be written.
    """
    # two rings of one process may share a path: each write has a file of its own
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with unfinished.open("w") as file:
            file.write(f'{{"otherData": {json.dumps({"hostopt": facts})},\n"traceEvents": [')
            # one at a time: a single long call of json.dumps would hold up all other threads
            for number, event in enumerate(events):
                file.write((",\n" if number else "\n") + json.dumps(event))
            file.write("\n]}\n")
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _complete_event(span: Span, rank: int, row: int) -> Event:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.track.title,
        "pid": rank,
        "tid": row,
        "ts": round(1e6 * span.begin_s, 3),
        "dur": round(1e6 * (span.end_s - span.begin_s), 3),
        "args": span.args,
    }


def _named(kind: str, rank: int, row: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": args}
