"""The clocks of all ranks against that of rank 0, by round trips of small messages."""

from __future__ import annotations

import struct
import time
from typing import Callable, NamedTuple

from hostopt.communicator import Communicator
from hostopt.transport import event_loop
from hostopt.transport.base import Tag

__all__: list[str] = []

_TRIPS = 16
_QUESTION, _ANSWER = 0, 1  # rounds of a tag
_SECONDS = struct.Struct("<d")


class ClockOffset(NamedTuple):
    """How this rank's clock differs from rank 0's.

    Args:
      offset_s: what to add to a time of this rank to get that of rank 0, in seconds.
      round_trip_s: duration of the trip that told; the offset is wrong by half of it at most.
    """

    offset_s: float
    round_trip_s: float


def measure_offset(
    communicator: Communicator, now: Callable[[], float] = time.monotonic, trips: int = _TRIPS
) -> ClockOffset:
    """Compare the clocks; all ranks call this together.

    Rank 0 answers one rank after the other. Of several trips the shortest counts: the two ways of
    a slow one may differ much in how long they take.

    Args:
      communicator: a communicator of its own (a `duplicate`).
      now: this rank's clock, in seconds.
      trips: number of round trips of each rank, 1 or more.

    Returns:
      The offset of this rank; 0 on rank 0.

    Raises:
      HostOptError: a rank failed, left or timed out.
    """
    if communicator.rank == 0:
        for peer in range(1, communicator.size):
            for trip in range(trips):
                event_loop.run(_answer(communicator, peer, trip, now))
        return ClockOffset(0.0, 0.0)
    found = [event_loop.run(_ask(communicator, trip, now)) for trip in range(trips)]
    return min(found, key=lambda offset: offset.round_trip_s)


async def _answer(
    communicator: Communicator, peer: int, trip: int, now: Callable[[], float]
) -> None:
    transport, what = communicator.transport, f"the clock of rank {peer}"
    await transport.recv(peer, Tag(communicator.channel, peer, trip, _QUESTION), what)
    tag = Tag(communicator.channel, peer, trip, _ANSWER)
    await transport.send(peer, tag, _SECONDS.pack(now()), what)


async def _ask(communicator: Communicator, trip: int, now: Callable[[], float]) -> ClockOffset:
    transport, what = communicator.transport, "the clock of rank 0"
    begin_s = now()
    tag = Tag(communicator.channel, communicator.rank, trip, _QUESTION)
    await transport.send(0, tag, b"", what)
    (theirs_s,) = _SECONDS.unpack(await transport.recv(0, tag._replace(round=_ANSWER), what))
    end_s = now()
    return ClockOffset(theirs_s - (begin_s + end_s) / 2, end_s - begin_s)
