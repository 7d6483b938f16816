"""Divides large collectives among the streams of a transport.

Each stream runs the schedule for its *stripe* of each chunk, in a thread and on a connection of
its own. An element is reduced in the same order in any case, so the sums do not depend on the
number of streams.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Iterator
from typing import Any, Callable, NamedTuple

from hostopt.collectives.call import Array
from hostopt.collectives.ring_schedule import chunk_slices, segments
from hostopt.transport import event_loop
from hostopt.transport.base import Transport

# With several streams, the least size of a stripe. A smaller one costs more than a thread saves.
_LEAST_BYTES = 256 << 10


class Stripe(NamedTuple):
    """The part of each chunk that one of the streams carries."""

    stream: int
    streams: int
    most: int  # elements of a segment

    def of(self, chunk: Array) -> Array:
        """Returns the stripe of a chunk."""
        stripe: Array = chunk[chunk_slices(chunk.size, self.streams)[self.stream]]
        return stripe

    def segments(self, stripe: Array, at_least_one: bool = True) -> Iterator[tuple[int, Array]]:
        """Returns the segments of a stripe, with numbers that no other stream uses."""
        for index, part in segments(stripe, self.most * stripe.itemsize, at_least_one):
            yield index * self.streams + self.stream, part


ONE_STREAM = Stripe(0, 1, sys.maxsize)


async def run_on_streams(
    transport: Transport,
    length: int,
    itemsize: int,
    work: Callable[[Stripe], Coroutine[Any, Any, None]],
) -> None:
    """Runs a schedule once for each stream that is worth it, on its loop; called on loop 0.

    Args:
      length: elements of the longest chunk.
      itemsize: bytes of an element on the wire.
    """
    most = max(transport.options.segment_bytes // itemsize, 1)
    least = min(max(_LEAST_BYTES // itemsize, 1), most)
    streams = max(1, min(transport.streams, length // least))
    if streams == 1:
        await work(Stripe(0, 1, most))
        return
    stripes = [Stripe(each, streams, most) for each in range(streams)]
    await event_loop.run_on_loops({each.stream: work(each) for each in stripes})
