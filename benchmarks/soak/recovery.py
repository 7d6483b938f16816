"""Recovery from a fault, derived from the events of all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_Note = Mapping[str, Any]


def recovery(fault_time_s: float, notes: Sequence[_Note]) -> dict[str, Any]:
    """Derives the recovery from a fault.

    Args:
      fault_time_s: time of the fault.
      notes: events of all processes, in the order of their times, including a step before the
        fault.

    Returns:
      If a rank reported an error: `error`, its `text`, and `detected_s`, seconds since the fault.
      If the training was restarted: `last_step` before, `first_step` after, and `again`, the
      number of repeated steps. If there was a new step: `recovered_s`, seconds since the fault.
    """
    row: dict[str, Any] = {}
    steps = of_kind(notes, "step")
    old_pid = [note["pid"] for note in steps if note["time"] <= fault_time_s][-1]
    restarted = _steps_after_restart(steps, old_pid)
    end = restarted[0]["time"] if restarted else float("inf")
    for note in of_kind(notes, "error"):
        if fault_time_s < note["time"] < end:
            row.update(
                error=note["error"], text=note["text"], detected_s=note["time"] - fault_time_s
            )
            break
    if restarted:
        first = restarted[0]["step"]
        # a chief with a fault may have saved a step and not reported it
        last = max(first - 1, *(note["step"] for note in steps if note["time"] < end))
        row.update(last_step=last, first_step=first, again=last - first + 1)
        beyond = [note["time"] for note in restarted if note["step"] > last]
        if beyond:
            row["recovered_s"] = beyond[0] - fault_time_s
    return row


def has_settled(since: float, old_pid: int, restarted: bool, notes: Sequence[_Note]) -> bool:
    """Returns True if the training has saved a checkpoint with new steps.

    Args:
      since: time of the end of the fault.
      old_pid: process of the chief at the start of the fault.
      restarted: True if the training must have been restarted.
      notes: events, as for `recovery`.
    """
    steps = of_kind(notes, "step")
    saved = [note for note in of_kind(notes, "saved") if note["time"] > since]
    later = _steps_after_restart(steps, old_pid)
    if restarted or later:
        # a restored step is reported as well, before the first step
        first = later[0]["time"] if later else float("inf")
        last = max(note["step"] for note in steps if note["pid"] == old_pid)
        saved = [note for note in saved if note["time"] > first and note["step"] > last]
    return bool(saved)


def _steps_after_restart(steps: Sequence[_Note], old_pid: int) -> list[_Note]:
    """Returns the steps of the latest chief, unless it is the process `old_pid`."""
    pid = steps[-1]["pid"]
    return [note for note in steps if note["pid"] == pid != old_pid]


def of_kind(notes: Sequence[_Note], kind: str) -> list[_Note]:
    """Returns the events of one kind."""
    return [note for note in notes if note["kind"] == kind]


def steps_by_process(steps: Sequence[_Note], start: float) -> dict[int, list[list[float]]]:
    """Returns points to draw: seconds since `start` and step, about one per second by process."""
    processes: dict[int, list[list[float]]] = {}
    for note in steps:
        point = [round(note["time"] - start, 2), note["step"]]
        points = processes.setdefault(note["pid"], [point])
        if point[0] - points[-1][0] >= 1.0:
            points.append(point)
    return processes
