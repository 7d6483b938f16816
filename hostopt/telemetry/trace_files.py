"""Reads trace files, merges those of several ranks by the clock of rank 0, and draws a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostopt.errors import ConfigError
from hostopt.options import shown
from hostopt.shapes import has_shape
from hostopt.telemetry.timeline import Event, write_trace

_TRACE = {"otherData": {"hostopt": {"size": int}}, "traceEvents": list}
_SINGLE_RANK = {"rank": int, "clock_offset_us": float}
_EVENT = {"ph": str, "name": str, "pid": int, "tid": int, "args": dict}
_SPAN = {**_EVENT, "cat": str, "ts": float, "dur": float}


@dataclass(frozen=True)
class Trace:
    """The content of a trace file that a timeline or `merge` has written."""

    path: str
    attributes: dict[str, Any]
    events: list[Event]  # in the Trace Event Format; times in us

    @property
    def spans(self) -> list[Event]:
        """The events that are spans, sorted by start."""
        return [event for event in self.events if event["ph"] == "X"]


def read(path: str) -> Trace:
    """Reads a trace."""
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. Give the path of a readable file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _no_trace(path, f"{type(error).__name__}: {error}") from error
    if not has_shape(content, _TRACE):
        raise _no_trace(path, "its content differs")
    for number, event in enumerate(content["traceEvents"]):
        if not _is_event(event):
            raise _no_trace(path, f"event {number} is {shown(event)}")
    return Trace(path, content["otherData"]["hostopt"], content["traceEvents"])


def _is_event(event: Any) -> bool:
    if not has_shape(event, _EVENT):
        return False
    if event["ph"] == "M":
        return event["name"] != "thread_name" or has_shape(event["args"], {"name": str})
    wanted = {"bucket": int} if event.get("cat") == "launch" else {}
    is_span = event["ph"] == "X" and has_shape(event, _SPAN) and has_shape(event["args"], wanted)
    return is_span and has_shape(event["args"].get("step", 0), int)


def _no_trace(path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a trace of hostopt ({reason}). Give files that a run with "
        "HOSTOPT_TIMELINE has written"
    )


def merge(paths: Sequence[str], output: str) -> None:
    """Merges the traces of several ranks. The earliest span starts at 0."""
    traces = [read(path) for path in paths]
    by_rank: dict[int, Trace] = {}
    for trace in traces:
        if not has_shape(trace.attributes, _SINGLE_RANK):
            raise ConfigError(
                f"{trace.path} has the attributes {shown(trace.attributes)}, expected the trace "
                "of one rank. Give the files of the ranks"
            )
        other = by_rank.setdefault(trace.attributes["rank"], trace)
        if other is not trace:
            raise ConfigError(
                f"{other.path} and {trace.path} are both of rank {trace.attributes['rank']}. "
                "Give one file for each rank"
            )
        if trace.attributes["size"] != traces[0].attributes["size"]:
            raise ConfigError(
                f"{traces[0].path} is of a ring of {traces[0].attributes['size']} ranks and "
                f"{trace.path} of {trace.attributes['size']}. Give files of one run"
            )
    attributes = {"ranks": sorted(by_rank), "size": traces[0].attributes["size"]}
    try:
        write_trace(
            Path(output), _aligned([by_rank[rank] for rank in sorted(by_rank)]), attributes
        )
    except (OSError, ValueError) as error:  # ValueError: a path without a name, such as "/"
        raise ConfigError(f"{output} cannot be written: {error}. Give another file") from error


def _aligned(traces: Sequence[Trace]) -> list[Event]:
    named = [event for trace in traces for event in trace.events if event["ph"] == "M"]
    spans = [
        {**event, "ts": event["ts"] + trace.attributes["clock_offset_us"]}
        for trace in traces
        for event in trace.spans
    ]
    spans.sort(key=lambda event: float(event["ts"]))
    begin_us = spans[0]["ts"] if spans else 0.0
    return named + [{**event, "ts": round(event["ts"] - begin_us, 3)} for event in spans]


# tracks whose "step" counts training steps
_STEP_TRACKS = ("backward", "launch", "wait", "apply")


def draw(path: str, output: str, step: int | None = None) -> None:
    """Draws a step; the last applied one if `step` is None."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib: pip install 'hostopt[draw]'") from error
    trace = read(path)
    begin_us, end_us = _window(trace, step)
    shown = [s for s in trace.spans if s["ts"] < end_us and s["ts"] + s["dur"] > begin_us]
    buckets = {s["name"]: f"C{s['args']['bucket'] % 10}" for s in shown if s["cat"] == "launch"}
    busy = {(s["pid"], s["tid"]) for s in shown}
    rows = {  # rows for overlapping spans, such as "launch (2)", only if they are in use
        (e["pid"], e["tid"]): f"rank {e['pid']}  {e['args']['name']}"
        for e in trace.events
        if e["name"] == "thread_name"
        and ("(" not in e["args"]["name"] or (e["pid"], e["tid"]) in busy)
    }
    figure = Figure(figsize=(12, 1 + 0.3 * len(rows)), layout="constrained")
    axes = figure.add_subplot(xlim=(0, (end_us - begin_us) / 1e3), xlabel="ms")
    for height, row in enumerate(rows):
        for span in (s for s in shown if (s["pid"], s["tid"]) == row):
            bar = (span["ts"] - begin_us) / 1e3, span["dur"] / 1e3
            color = buckets.get(span["name"], "silver")
            axes.broken_barh([bar], (height - 0.4, 0.8), color=color)
    axes.set_yticks(range(len(rows)), list(rows.values()))
    axes.invert_yaxis()
    for name, color in sorted(buckets.items(), key=lambda item: item[1]):
        axes.barh(0, 0, color=color, label=name)
    if buckets:
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:  # ValueError: an unknown suffix
        raise ConfigError(f"{output} cannot be written: {error}. Give another file") from error


def _window(trace: Trace, step: int | None) -> tuple[float, float]:
    def step_of(span: Event) -> int:
        return int(span["args"].get("step", -1))

    if step is None:
        step = max((step_of(span) for span in trace.spans if span["cat"] == "apply"), default=-1)
    spans = [s for s in trace.spans if step_of(s) == step and s["cat"] in _STEP_TRACKS]
    if not spans:
        raise ConfigError(f"{trace.path} has no step {step}. Give another one as --step")
    return min(s["ts"] for s in spans), max(s["ts"] + s["dur"] for s in spans)
