"""The timeline of one rank, written as a trace that chrome://tracing and Perfetto can open."""

from __future__ import annotations

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
from typing import Any

from hostopt.cluster.cluster import Cluster
from hostopt.errors import ConfigError
from hostopt.process import descriptors
from hostopt.process.child_process import call_at_exit, cancel_at_exit

_log = logging.getLogger(__name__)

MAX_SPANS = 100_000  # older ones are dropped and counted in the file
REWRITE_EVERY_S = 10.0
# The maximum share of the time that is spent on writing the file.
_WRITING_SHARE = 0.05
# Overlapping spans of a track are shown in separate rows; the last row takes all further ones.
_ROWS_PER_TRACK = 16

Event = dict[str, Any]


class Track(enum.IntEnum):
    """The rows of a rank in the viewer, from top to bottom."""

    COPY = 0
    BACKWARD = 1
    LAUNCH = 2
    RING_SEND = 3
    RING_RECEIVE = 4
    WAIT = 5
    APPLY = 6

    @property
    def title(self) -> str:
        """The name of the row in the viewer, such as "ring send"."""
        return self.name.lower().replace("_", " ")


@dataclass
class Span:
    """A piece of work."""

    track: Track
    name: str
    begin_s: float  # on this rank's monotonic clock
    end_s: float
    args: dict[str, Any]  # details that the viewer shows, such as step, bucket and bytes


def path_of_rank(path: str | os.PathLike[str], rank: int) -> Path:
    """Returns the trace file of a rank: "trace.json" becomes "trace.rank0.json"."""
    common = Path(path)
    return common.with_name(f"{common.stem}.rank{rank}{common.suffix}")


class Timeline:
    """Records the spans of one rank and writes them to its trace file.

    A thread rewrites the file at intervals, and `close` does so at the end. At any time the file
    is a complete trace of the spans so far. Any thread may record spans.
    """

    def __init__(self, path: str | os.PathLike[str], cluster: Cluster) -> None:
        self.rank = cluster.rank or 0
        self.path = path_of_rank(path, self.rank)
        self.clock_offset_s = 0.0
        self._cluster = cluster
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._recorded = 0
        self._growing: dict[tuple[Track, int, int], tuple[tuple[int, ...], Span]] = {}
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
        call_at_exit(self.close)

    def span(self, track: Track, name: str, begin_s: float, end_s: float, **args: Any) -> Span:
        """Records a piece of work, which the caller may extend; for the arguments see `Span`."""
        span = Span(track, name, begin_s, end_s, args)
        with self._lock:
            self._spans.append(span)
            self._recorded += 1
        return span

    def message(
        self, track: Track, tag: Any, name: str, begin_s: float, end_s: float, payload_bytes: int
    ) -> None:
        """Records a message; a thread's messages of one round of a call become one span.

        The tag is a `Tag` of `hostopt.transport.message`.
        """
        key = track, tag.channel, threading.get_ident()
        round_ = (tag.step, tag.bucket, tag.round)
        last_round, span = self._growing.get(key, (None, None))
        if span is not None and last_round == round_:
            span.end_s = end_s
            span.args["bytes"] += payload_bytes
            return
        args = {"step": tag.step, "bucket": tag.bucket, "round": tag.round}
        span = self.span(track, name or "data", begin_s, end_s, **args, bytes=payload_bytes)
        self._growing[key] = round_, span

    def write(self) -> None:
        """Replaces the file. An error leaves the old file unchanged."""
        with self._writing:
            with self._lock:
                spans, dropped = list(self._spans), self._recorded - len(self._spans)
            attributes = {
                "rank": self.rank,
                "size": self._cluster.size,
                "clock_offset_us": 1e6 * self.clock_offset_s,
                "dropped_spans": dropped,
            }
            process = f"rank {self.rank} ({self._cluster.ring[self.rank].name})"
            write_trace(self.path, events_of(spans, self.rank, process), attributes)

    def close(self) -> None:
        """Writes the file for the last time."""
        if self._closed.is_set():
            return
        self._closed.set()
        cancel_at_exit(self.close)
        self._thread.join()
        self._write_or_warn()

    def _run(self) -> None:
        pause_s = REWRITE_EVERY_S
        while not self._closed.wait(pause_s):
            begin_s = time.monotonic()
            self._write_or_warn()
            pause_s = max(REWRITE_EVERY_S, (time.monotonic() - begin_s) / _WRITING_SHARE)

    def _write_or_warn(self) -> None:
        try:
            self.write()
        except OSError as error:  # a full disk must not abort the training
            _log.warning("the timeline file %s is not up to date: %s", self.path, error)


def events_of(spans: Iterable[Span], rank: int, process: str) -> list[Event]:
    """Converts spans to events of the Trace Event Format."""
    titles = {track * _ROWS_PER_TRACK: track.title for track in Track}
    busy_until_s: dict[int, float] = {}
    shown: list[Event] = []
    for span in sorted(spans, key=lambda span: span.begin_s):
        first = span.track * _ROWS_PER_TRACK
        rows = range(first, first + _ROWS_PER_TRACK)
        # spans of a row must not overlap
        free = (row for row in rows if busy_until_s.get(row, span.begin_s) <= span.begin_s)
        row = next(free, rows[-1])
        titles.setdefault(row, f"{span.track.title} ({row - first + 1})")
        busy_until_s[row] = span.end_s
        event = {"ph": "X", "name": span.name, "cat": span.track.title, "pid": rank, "tid": row}
        begin_us, duration_us = 1e6 * span.begin_s, 1e6 * (span.end_s - span.begin_s)
        times = {"ts": round(begin_us, 3), "dur": round(duration_us, 3)}
        shown.append({**event, **times, "args": span.args})
    named: list[Event] = [
        _named("process_name", rank, 0, name=process),
        _named("process_sort_index", rank, 0, sort_index=rank),
    ]
    for row in sorted(titles):
        named.append(_named("thread_name", rank, row, name=titles[row]))
        named.append(_named("thread_sort_index", rank, row, sort_index=row))
    return named + shown


def write_trace(path: Path, events: Iterable[Event], attributes: dict[str, Any]) -> None:
    """Writes a trace to a temporary file, then moves it to its path."""
    # unique, as two rings of one process may have the same path
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with unfinished.open("w") as file:
            file.write(f'{{"otherData": {json.dumps({"hostopt": attributes})},\n"traceEvents": [')
            # one by one, as a long call of json.dumps would block all other threads
            for number, event in enumerate(events):
                file.write((",\n" if number else "\n") + json.dumps(event))
            file.write("\n]}\n")
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _named(kind: str, rank: int, row: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": args}
