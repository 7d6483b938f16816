"""Overview of a ring for an observer: what each rank is doing, and which rank the others wait for.

docs/wire.md (Observe) has the details of a rank. A rank without any has a text, the reason.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from hostopt.errors import cut
from hostopt.process.error_report import cause_of
from hostopt.transport.base import Transport
from hostopt.versions import local_versions

Details = dict[str, Any]
_MAX_TEXT_BYTES = 600  # as JSON
_MAX_MISSING = 8
_SHOWN_CHARACTERS = 120
# A wait that is shorter is part of every step.
_NOTABLE_S = 1.0


def details_of(transport: Transport, missing: Collection[int]) -> Details:
    """Describes this rank, in limited size; `missing` is empty after the rendezvous."""
    status, error = transport.status(), transport.error
    wait, send = (next(iter(status[name]), None) for name in ("waits", "sends"))
    last = status["last"]
    return {
        "step": transport.training_step,
        "memory_bytes": _resident_bytes(),
        "versions": local_versions(),
        "missing": sorted(missing)[:_MAX_MISSING],
        "wait": wait and {**_with_short_text(wait), "peer": wait["peer"], "for_s": wait["for_s"]},
        "send": send,
        "last": last and {**last, **_with_short_text(last)},
        "error": error and cut(cause_of(error), _MAX_TEXT_BYTES),
    }


def find_blamed(ranks: Sequence[Details | str]) -> dict[int, list[int]]:
    """Finds the ranks that others have waited for, for a second or more, directly or not.

    Returns:
      The waiting ranks by the rank that they wait for, which itself waits for no rank. If ranks
      wait for each other, the waiting ranks by the first of them; if one of two sends to the
      other, by the sender, as the link is slow.
    """
    blamed: dict[int, list[int]] = {}
    for rank in range(len(ranks)):
        path = [rank]
        while (wait := awaits(ranks[path[-1]])) is not None and wait["peer"] not in path:
            path.append(wait["peer"])
        end = path[-1] if wait is None else _first(ranks, path[path.index(wait["peer"]) :])
        if end != rank:
            blamed.setdefault(end, []).append(rank)
    return blamed


def awaits(details: Details | str) -> dict[str, Any] | None:
    """Returns the longest wait or send of a rank, if it lasts for a second or more."""
    if isinstance(details, str):
        return None
    waits = [each for each in (details["wait"], details["send"]) if each]
    longest: dict[str, Any] | None = max(waits, key=lambda each: each["for_s"], default=None)
    return longest if longest and longest["for_s"] >= _NOTABLE_S else None


def is_send(wait: dict[str, Any]) -> bool:
    """Returns True if a result of `awaits` is a send."""
    return "what" not in wait


def printable(text: str) -> str:
    """Returns a text in one short line, with ? for characters that could control a terminal."""
    shown = "".join(each if each.isprintable() else "?" for each in text)
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}..."


def _first(ranks: Sequence[Details | str], cycle: Sequence[int]) -> int:
    """Returns the rank to name among ranks that wait for each other."""
    senders = [rank for rank in cycle if (wait := awaits(ranks[rank])) and is_send(wait)]
    return senders[0] if len(cycle) == 2 and len(senders) == 1 else min(cycle)


def _with_short_text(entry: dict[str, Any]) -> dict[str, Any]:
    return {"what": cut(entry["what"], _MAX_TEXT_BYTES)}


def _resident_bytes() -> int | None:
    with contextlib.suppress(OSError):  # no descriptor is left
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return None
