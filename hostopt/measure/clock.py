"""Offsets between the clocks of the ranks, measured by round trips of small messages."""

from __future__ import annotations

import struct
import time
from typing import Callable, NamedTuple

from hostopt.collectives.communicator import Communicator
from hostopt.transport import event_loop
from hostopt.transport.message import Tag

_TRIPS = 16
_REQUEST, _RESPONSE = 0, 1  # rounds of a tag
_SECONDS = struct.Struct("<d")


class ClockOffset(NamedTuple):
    """The difference between the clocks of rank 0 and of this rank."""

    offset_s: float  # to add to a time of this rank to get the time of rank 0
    round_trip_s: float  # of the measuring trip; half of it bounds the error of the offset


def measure_offset(
    communicator: Communicator, now: Callable[[], float] = time.monotonic, trips: int = _TRIPS
) -> ClockOffset:
    """Measures the offset of this rank's clock. Collective: all ranks must call it.

    Rank 0 answers one rank after the other. Only the shortest of several trips counts, as the two
    directions of a slow trip may take very different times. The communicator is a duplicate that
    is used for nothing else.
    """
    if communicator.rank == 0:
        for peer in range(1, communicator.size):
            for trip in range(trips):
                event_loop.run(_respond(communicator, peer, trip, now))
        return ClockOffset(0.0, 0.0)
    offsets = [event_loop.run(_measure(communicator, trip, now)) for trip in range(trips)]
    return min(offsets, key=lambda offset: offset.round_trip_s)


async def _respond(
    communicator: Communicator, peer: int, trip: int, now: Callable[[], float]
) -> None:
    transport, name = communicator.transport, f"the clock of rank {peer}"
    await transport.recv(peer, Tag(communicator.channel, peer, trip, _REQUEST), name)
    tag = Tag(communicator.channel, peer, trip, _RESPONSE)
    await transport.send(peer, tag, _SECONDS.pack(now()), name)


async def _measure(communicator: Communicator, trip: int, now: Callable[[], float]) -> ClockOffset:
    transport, name = communicator.transport, "the clock of rank 0"
    begin_s = now()
    tag = Tag(communicator.channel, communicator.rank, trip, _REQUEST)
    await transport.send(0, tag, b"", name)
    (remote_s,) = _SECONDS.unpack(await transport.recv(0, tag._replace(round=_RESPONSE), name))
    end_s = now()
    return ClockOffset(remote_s - (begin_s + end_s) / 2, end_s - begin_s)
