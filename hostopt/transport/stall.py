"""Waits for messages: when each is due for a warning or its end, and which rank causes it.

A waiting rank asks its peer for its status, then the peer that this one waits for, and so on to
the rank that waits for nobody. That rank is to blame, not the direct predecessor.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any, Callable, NamedTuple, Optional

from hostopt.cluster.cluster import Cluster
from hostopt.errors import HostOptError, error_from_dict, error_to_dict
from hostopt.options import Options
from hostopt.telemetry.flight_recorder import Event
from hostopt.transport.message import Tag

Status = dict[str, Any]
# The arguments are those of `Transport.request_status`.
RequestStatus = Callable[[int, int, Sequence[int]], Awaitable[Optional[Status]]]


# Time to find the reason for a timeout before the wait ends without one.
_DIAGNOSIS_S = 5.0
# A rank compares its call with its peer's after this time, and again after each doubling of it.
_COMPARE_AFTER_S = 0.25


class Wait(NamedTuple):
    """A wait for a message of a peer."""

    peer: int
    tag: Tag
    name: str
    since_s: float  # on the monotonic clock


def schedule(
    wait: Wait,
    options: Options,
    on_stall: Callable[[Wait, bool], object],
    on_long_wait: Callable[[Wait], object],
) -> Iterator[float]:
    """Does what a wait is due for: comparisons of calls, warnings, its timeout.

    Yields the seconds until the next of them, at which it is to be resumed; ends with the wait.
    """
    warn_after_s, compare_after_s = options.stall_warning_s, _COMPARE_AFTER_S
    timeout_s, has_timed_out = options.collective_timeout_s, False
    while (waited_s := time.monotonic() - wait.since_s) < timeout_s + _DIAGNOSIS_S:
        if waited_s >= timeout_s:
            if not has_timed_out:
                has_timed_out = True
                on_stall(wait, True)
            yield timeout_s + _DIAGNOSIS_S - waited_s
            continue
        if waited_s >= warn_after_s:
            on_stall(wait, False)
            while waited_s >= warn_after_s:
                warn_after_s *= 2
        if waited_s >= compare_after_s:
            on_long_wait(wait)
            while waited_s >= compare_after_s:
                compare_after_s *= 2
        yield min(warn_after_s, compare_after_s, timeout_s) - waited_s


class Culprit(NamedTuple):
    """The rank that keeps the others waiting, and the chain of waits that leads to it, as text."""

    rank: int
    text: str


def build_status(
    waits: Sequence[Wait],
    blocked_sends: dict[int, float],
    last: Event | None,
    error: HostOptError | None,
) -> Status:
    """Describes what a rank is doing, in types that JSON supports, the longest waits first."""
    now_s = time.monotonic()
    longest_first = sorted(waits, key=lambda wait: wait.since_s)
    sends = sorted(blocked_sends.items(), key=lambda send: send[1])
    return {
        "error": error and error_to_dict(error),
        "waits": [
            {"peer": peer, "what": name, "tag": list(tag), "for_s": now_s - since_s}
            for peer, tag, name, since_s in longest_first
        ],
        "sends": [{"peer": peer, "for_s": now_s - since_s} for peer, since_s in sends],
        "last": last and {"what": last.name, "step": last.tag.step, "ago_s": now_s - last.time_s},
    }


async def find_culprit(
    cluster: Cluster, peer: int, tag: Sequence[int], request_status: RequestStatus
) -> Culprit:
    """Follows the waits from a peer that this rank waits for to the rank that causes them."""
    assert cluster.rank is not None
    path, text, call = [cluster.rank], "", list(tag[:3])
    places = "in the same collective, and the network makes no progress"
    while True:
        path.append(peer)
        name = cluster.describe(peer)
        status = await request_status(peer, path[-2], tag)
        if status is None:
            return Culprit(
                peer, f"{text}{name} does not answer: it is frozen, or cannot run Python"
            )
        if status["error"]:
            raise error_from_dict(status["error"])
        sends = [send["peer"] for send in status["sends"]]
        if path[-2] in sends or status["sent"]:
            link = f"the link from rank {peer} to rank {path[-2]} is slow"
            return Culprit(peer, f"{text}{name} is sending it: {link}")
        if status["waits"]:
            wait = status["waits"][0]
            next_peer, tag = wait["peer"], wait["tag"]
            if list(tag[:3]) != call:
                places = "in different collectives"
            description = f" in {wait['what'] or 'a call'}"
        elif sends:
            next_peer, description = sends[0], ""
        else:
            return Culprit(peer, f"{text}{name} is in no collective; {_last_event(status)}")
        text += f"rank {peer} waits for rank {next_peer}{description}"
        if next_peer in path:
            return Culprit(peer, f"{text}: they wait for each other, {places}")
        text += ", "
        peer = next_peer


def _last_event(status: Status) -> str:
    last = status["last"]
    if last is None:
        return "it has taken part in none so far"
    return (
        f"its last was {last['what'] or 'one'} at step {last['step']}, {last['ago_s']:.1f} s ago"
    )
