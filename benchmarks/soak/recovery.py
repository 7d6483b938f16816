"""What followed a fault, as the notes of all processes tell it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_Note = Mapping[str, Any]


def recovery(struck: float, notes: Sequence[_Note]) -> dict[str, Any]:
    """Find out what followed a fault.

    Args:
      struck: when it happened.
      notes: of all processes, in the order of their times; a step before the fault among them.

    Returns:
      `error`, its `text`, and `detected_s` after the fault, if a rank reported one; if the
      training was started again, `last_step` before, `first_step` after, and the number of steps
      made `again`; `recovered_s` after the fault, if there was a step beyond.
    """
    row: dict[str, Any] = {}
    steps = of_kind(notes, "step")
    lived = [note["pid"] for note in steps if note["time"] <= struck][-1]
    restarted = _last_life(steps, lived)
    end = restarted[0]["time"] if restarted else float("inf")
    for note in of_kind(notes, "error"):
        if struck < note["time"] < end:
            row.update(error=note["error"], text=note["text"], detected_s=note["time"] - struck)
            break
    if restarted:
        first = restarted[0]["step"]
        # a chief that is struck may have saved a step and not noted it
        last = max(first - 1, *(note["step"] for note in steps if note["time"] < end))
        row.update(last_step=last, first_step=first, again=last - first + 1)
        beyond = [note["time"] for note in restarted if note["step"] > last]
        if beyond:
            row["recovered_s"] = beyond[0] - struck
    return row


def has_settled(since: float, lived: int, restarted: bool, notes: Sequence[_Note]) -> bool:
    """Whether the training has saved a checkpoint of steps that it had not made before.

    Args:
      since: when the fault was over.
      lived: process of the chief when it began.
      restarted: whether the training must have been started again; it may have been, anyway.
      notes: as `recovery` takes them.

    Returns:
      True once it has.
    """
    steps = of_kind(notes, "step")
    saved = [note for note in of_kind(notes, "saved") if note["time"] > since]
    life = _last_life(steps, lived)
    if restarted or life:
        # one that is restored is noted as well, before the first step
        first = life[0]["time"] if life else float("inf")
        last = max(note["step"] for note in steps if note["pid"] == lived)
        saved = [note for note in saved if note["time"] > first and note["step"] > last]
    return bool(saved)


def _last_life(steps: Sequence[_Note], lived: int) -> list[_Note]:
    """The steps of the chief that was started last, if that is not the one that `lived`."""
    pid = steps[-1]["pid"]
    return [note for note in steps if note["pid"] == pid != lived]


def of_kind(notes: Sequence[_Note], kind: str) -> list[_Note]:
    """The notes of one kind."""
    return [note for note in notes if note["kind"] == kind]


def lives_of(steps: Sequence[_Note], begun: float) -> dict[int, list[list[float]]]:
    """Seconds since `begun` and step, of each process one in a second, which is enough to draw."""
    lives: dict[int, list[list[float]]] = {}
    for note in steps:
        point = [round(note["time"] - begun, 2), note["step"]]
        life = lives.setdefault(note["pid"], [point])
        if point[0] - life[-1][0] >= 1.0:
            life.append(point)
    return lives
