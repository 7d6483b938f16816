"""The timelines of all ranks joined into one trace, by the clock of rank 0."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostopt.errors import ConfigError
from hostopt.options import shown
from hostopt.shapes import has_shape
from hostopt.timeline import Event, write_trace

__all__: list[str] = []

_WHOLE = {"otherData": {"hostopt": {"size": int}}, "traceEvents": list}
_OF_ONE_RANK = {"rank": int, "clock_offset_us": float}
_OF_ALL = {"ph": str, "name": str, "pid": int, "tid": int, "args": dict}
_SPAN = {**_OF_ALL, "cat": str, "ts": float, "dur": float}


@dataclass(frozen=True)
class Trace:
    """The content of a file that a timeline or `merge` has written.

    Args:
      path: the file.
      facts: what hostopt noted about it.
      events: of the Trace Event Format; times in us.
    """

    path: str
    facts: dict[str, Any]
    events: list[Event]

    @property
    def spans(self) -> list[Event]:
        """The events that show work, in the order of their beginning."""
        return [event for event in self.events if event["ph"] == "X"]


def read(path: str) -> Trace:
    """Read a trace.

    Args:
      path: the file.

    Returns:
      Its content.

    Raises:
      ConfigError: it cannot be read, or hostopt has not written it.
    """
    try:
        whole = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. Name a file that is there and may be read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _no_trace(path, f"{type(error).__name__}: {error}") from error
    if not has_shape(whole, _WHOLE):
        raise _no_trace(path, "it has other contents")
    for number, event in enumerate(whole["traceEvents"]):
        if not _is_event(event):
            raise _no_trace(path, f"event {number} is {shown(event)}")
    return Trace(path, whole["otherData"]["hostopt"], whole["traceEvents"])


def _is_event(event: Any) -> bool:
    if not has_shape(event, _OF_ALL):
        return False
    if event["ph"] == "M":
        return event["name"] != "thread_name" or has_shape(event["args"], {"name": str})
    wanted = {"bucket": int} if event.get("cat") == "launch" else {}
    is_span = event["ph"] == "X" and has_shape(event, _SPAN) and has_shape(event["args"], wanted)
    return is_span and has_shape(event["args"].get("step", 0), int)


def _no_trace(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is no trace of hostopt ({why}). Name files that a run with HOSTOPT_TIMELINE has "
        "written"
    )


def merge(paths: Sequence[str], output: str) -> None:
    """Join the files of several ranks; the earliest span begins at 0.

    Args:
      paths: one file a rank, in any order.
      output: the file to write.

    Raises:
      ConfigError: a file is no trace of one rank, there are two of one rank, they come from rings
        of different sizes, or `output` cannot be written.
    """
    traces = [read(path) for path in paths]
    by_rank: dict[int, Trace] = {}
    for trace in traces:
        if not has_shape(trace.facts, _OF_ONE_RANK):
            raise ConfigError(
                f"{trace.path} holds {shown(trace.facts)}, wanted the trace of one rank. Name the "
                "files of the ranks"
            )
        other = by_rank.setdefault(trace.facts["rank"], trace)
        if other is not trace:
            raise ConfigError(
                f"{other.path} and {trace.path} are both of rank {trace.facts['rank']}. Name one "
                "file for each rank"
            )
        if trace.facts["size"] != traces[0].facts["size"]:
            raise ConfigError(
                f"{traces[0].path} is of a ring of {traces[0].facts['size']} ranks and "
                f"{trace.path} of {trace.facts['size']}. Name files of one run"
            )
    facts = {"ranks": sorted(by_rank), "size": traces[0].facts["size"]}
    try:
        write_trace(Path(output), _aligned([by_rank[rank] for rank in sorted(by_rank)]), facts)
    except (OSError, ValueError) as error:  # ValueError: a path without a name, such as "/"
        raise ConfigError(f"{output} cannot be written: {error}. Name another file") from error


def _aligned(traces: Sequence[Trace]) -> list[Event]:
    named = [event for trace in traces for event in trace.events if event["ph"] == "M"]
    spans = [
        {**event, "ts": event["ts"] + trace.facts["clock_offset_us"]}
        for trace in traces
        for event in trace.spans
    ]
    spans.sort(key=lambda event: float(event["ts"]))
    begin_us = spans[0]["ts"] if spans else 0.0
    return named + [{**event, "ts": round(event["ts"] - begin_us, 3)} for event in spans]
