"""Formats the overview of a ring: a row for each rank, and the ranks that the others wait for.

Texts come from other processes: characters that could control a terminal are replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hostopt.transport.overview import Details, awaits, find_blamed, is_send, printable

_HEADER = ("rank", "task", "address", "step", "memory", "hostopt", "TensorFlow", "Python", "state")
_UNKNOWN = "-"


def format_overview(overview: Mapping[str, Any]) -> str:
    """Returns the lines that show an overview.

    Args:
      overview: as `hostopt.transport.grpc.notes.read_overview` returns it.
    """
    ring, ranks = overview["ring"], overview["ranks"]
    rows: list[Sequence[str]] = [_HEADER]
    rows += [_row(rank, *each) for rank, each in enumerate(zip(ring, ranks))]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for blamed, waiting in find_blamed(ranks).items():
        is_all = len(waiting) == len(ranks) - 1
        who = "all others wait" if is_all else f"{_names(waiting)} {_verb(waiting)}"
        task, address = (printable(ring[blamed][key]) for key in ("task", "address"))
        name = f"rank {blamed} ({task}, {address})"
        lines.append(f"{who} for {name}, which {_reason(ranks[blamed])}")
    return "\n".join(lines)


def _row(rank: int, task: Mapping[str, str], details: Details | str) -> Sequence[str]:
    name = (str(rank), printable(task["task"]), printable(task["address"]))
    if isinstance(details, str):
        return (*name, *[_UNKNOWN] * 5, printable(details))
    versions = [details["versions"][key] for key in ("hostopt", "tensorflow", "python")]
    shown = [printable(version or _UNKNOWN) for version in versions]
    return (*name, _step(details), _memory(details), *shown, _state(details))


def _step(details: Details) -> str:
    if details["step"] is not None:
        return str(details["step"])
    last = details["last"]
    return f"call {last['step']}" if last else _UNKNOWN


def _memory(details: Details) -> str:
    nbytes = details["memory_bytes"]
    return _UNKNOWN if nbytes is None else f"{nbytes / (1 << 20):.0f} MiB"


def _state(details: Details) -> str:
    wait, send = details["wait"], details["send"]
    if details["error"]:
        return f"aborted: {printable(details['error'])}"
    if details["missing"]:
        return f"waits for {_names(details['missing'])} to connect"
    if wait and (not send or wait["for_s"] >= send["for_s"]):
        name = printable(wait["what"]) or "data"
        return f"has waited {wait['for_s']:.1f} s for rank {wait['peer']}: {name}"
    if send:
        return f"rank {send['peer']} has taken no data for {send['for_s']:.1f} s"
    return _idle(details)


def _idle(details: Details) -> str:
    last = details["last"]
    if last is None:
        return "in no collective so far"
    return f"in no collective for {last['ago_s']:.1f} s, after {printable(last['what']) or 'one'}"


def _reason(details: Details | str) -> str:
    """Describes what a rank is doing that others wait for, as the end of a sentence."""
    if isinstance(details, str):
        return "does not answer: it is frozen, cannot run Python, or is gone"
    wait = awaits(details)
    if wait is not None and is_send(wait):
        return f"sends to rank {wait['peer']}: the link between them is slow"
    if wait is not None:
        return f"waits for rank {wait['peer']}: they wait for each other"
    return f"is {_idle(details)}" if not details["wait"] else _state(details)


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _verb(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
