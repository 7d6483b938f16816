"""Finds the rank that keeps the others waiting.

In a ring, one rank that stops makes all others wait, each of them for its predecessor:

    rank 2  waits for  rank 1  waits for  rank 0, which is in no collective

So a waiting rank asks its peer for its status, then the peer that this one waits for, and so on
to the rank that waits for nobody. That rank is to blame, not the direct predecessor.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from typing import Any, Callable, NamedTuple, Optional

from hostopt.cluster.cluster import Cluster
from hostopt.errors import HostOptError, error_from_dict, error_to_dict
from hostopt.telemetry.flight_recorder import Event
from hostopt.transport.wait import Wait

Status = dict[str, Any]
# The arguments are those of `Transport.request_status`.
RequestStatus = Callable[[int, int, Sequence[int]], Awaitable[Optional[Status]]]


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
    received = [
        {"peer": peer, "what": name, "tag": list(tag), "for_s": now_s - since_s}
        for peer, tag, name, since_s in waits
    ]
    sends = [{"peer": peer, "for_s": now_s - since_s} for peer, since_s in blocked_sends.items()]
    return {
        "error": error and error_to_dict(error),
        "waits": sorted(received, key=_longest_first),
        "sends": sorted(sends, key=_longest_first),
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


def _longest_first(entry: dict[str, Any]) -> float:
    return -float(entry["for_s"])


def _last_event(status: Status) -> str:
    last = status["last"]
    if last is None:
        return "it has taken part in none so far"
    return (
        f"its last was {last['what'] or 'one'} at step {last['step']}, {last['ago_s']:.1f} s ago"
    )
