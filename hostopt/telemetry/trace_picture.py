"""Draws one step of a trace: one row per track of each rank, one bar per span."""

from __future__ import annotations

from hostopt.errors import ConfigError
from hostopt.telemetry.timeline import Event
from hostopt.telemetry.trace_files import Trace, read

# tracks whose "step" counts training steps
_STEP_TRACKS = ("backward", "launch", "wait", "apply")


def draw(path: str, output: str, step: int | None = None) -> None:
    """Draws a step.

    Args:
      path: a trace, merged or of one rank.
      output: the picture; its suffix selects the format, such as .png or .svg.
      step: number of the step, from 0; the last applied step if None.

    Raises:
      ConfigError: the trace has no such step, `output` cannot be written, or matplotlib is not
        installed.
    """
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
