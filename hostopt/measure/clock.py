"""Offsets between the clocks of the ranks, measured by round trips of small messages."""

from __future__ import annotations

import struct
import time
from typing import Callable, NamedTuple

from hostopt.collectives.communicator import Communicator
from hostopt.transport import event_loop
from hostopt.transport.message import Tag

TRIPS = 16
_SECONDS = struct.Struct("<d")


class ClockOffset(NamedTuple):
    """The difference between the clocks of rank 0 and of this rank."""

    offset_s: float  # to add to a time of this rank to get the time of rank 0
    round_trip_s: float  # of the measuring trip; half of it bounds the error of the offset


def measure_offset(
    communicator: Communicator, now: Callable[[], float] = time.monotonic
) -> ClockOffset:
    """Measures the offset of this rank's clock. Collective: all ranks must call it.

    Rank 0 answers one rank after the other. Only the shortest of several trips counts, as the two
    directions of a slow trip may take very different times. The communicator is a duplicate that
    is used for nothing else.
    """
    return event_loop.run(_measure(communicator, now))


async def _measure(communicator: Communicator, now: Callable[[], float]) -> ClockOffset:
    transport, channel = communicator.transport, communicator.channel
    offsets = [ClockOffset(0.0, 0.0)] if communicator.rank == 0 else []
    for rank in range(1, communicator.size):
        for trip in range(TRIPS):
            request, response = (Tag(channel, rank, trip, round_) for round_ in range(2))
            if communicator.rank == 0:
                name = f"the clock of rank {rank}"
                await transport.recv(rank, request, name)
                await transport.send(rank, response, _SECONDS.pack(now()), name)
            elif communicator.rank == rank:
                name, begin_s = "the clock of rank 0", now()
                await transport.send(0, request, b"", name)
                (remote_s,) = _SECONDS.unpack(await transport.recv(0, response, name))
                end_s = now()
                offset_s = remote_s - (begin_s + end_s) / 2
                offsets.append(ClockOffset(offset_s, end_s - begin_s))
    return min(offsets, key=lambda offset: offset.round_trip_s)
