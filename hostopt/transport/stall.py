"""Who keeps a rank waiting: follows the waits from rank to rank, to the one that waits for nobody.

In a ring a rank that stops makes all others wait, each of them for its predecessor:

    rank 2  waits for  rank 1  waits for  rank 0, which is in no collective

A rank that only named whom it waits for would accuse the wrong one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hostopt.errors import error_from_dict, error_to_dict

if TYPE_CHECKING:
    from hostopt.transport.base import Transport

__all__: list[str] = []


class Culprit(NamedTuple):
    """Who keeps the others waiting.

    Args:
      rank: the rank.
      text: how the waits lead to it, and what it does.
    """

    rank: int
    text: str


def status_of(transport: Transport) -> dict[str, Any]:
    """What this rank does, as JSON can hold it.

    Args:
      transport: its transport.

    Returns:
      The waits and the blocked sends, longest first, the last event, and the error that has ended
      its ring.
    """
    now_s = time.monotonic()
    waits = [
        {
            "peer": wait.peer,
            "what": wait.what,
            "tag": list(wait.tag),
            "for_s": now_s - wait.since_s,
        }
        for wait in transport.mailbox.waits()
    ]
    sends = [
        {"peer": peer, "for_s": now_s - since_s}
        for peer, since_s in transport.blocked_sends().items()
    ]
    last = transport.recorder.last
    error = transport.error
    return {
        "error": error and error_to_dict(error),
        "waits": sorted(waits, key=_longest_first),
        "sends": sorted(sends, key=_longest_first),
        "last": last and {"what": last.what, "step": last.tag.step, "ago_s": now_s - last.time_s},
    }


async def find_culprit(transport: Transport, peer: int, tag: Sequence[int]) -> Culprit:
    """Follow the waits, beginning with a peer that this rank waits for.

    Args:
      transport: this rank's transport, which asks others.
      peer: whom this rank waits for.
      tag: the message that it waits for.

    Returns:
      The rank at the end of the waits.

    Raises:
      HostOptError: a rank on the way has found out earlier, and ended the ring.
    """
    path, text = [transport.rank], ""
    while True:
        path.append(peer)
        name = f"rank {peer} ({transport.cluster.ring[peer]})"
        status = await transport.ask(peer, path[-2], tag)
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
            following, tag, what = wait["peer"], wait["tag"], f" in {wait['what'] or 'a call'}"
        elif sends:
            following, what = sends[0], ""
        else:
            return Culprit(peer, f"{text}{name} is in no collective; {_last(status)}")
        if following in path:
            text += f"rank {peer} waits for rank {following}{what}"
            return Culprit(peer, f"{text}: they wait for each other, in different collectives")
        text += f"rank {peer} waits for rank {following}{what}, "
        peer = following


def _longest_first(entry: dict[str, Any]) -> float:
    return -float(entry["for_s"])


def _last(status: dict[str, Any]) -> str:
    last = status["last"]
    if last is None:
        return "it has taken part in none so far"
    return (
        f"its last was {last['what'] or 'one'} at step {last['step']}, {last['ago_s']:.1f} s ago"
    )
