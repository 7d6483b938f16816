"""Ring schedules: the chunks that each rank sends and receives in each round.

A flat buffer is cut into `size` *chunks*, of which rank r reduces chunk r. In each *round* every
rank sends one chunk to the next rank and receives one from the previous rank, which it sends in
the next round. docs/algorithms.md has the tables and the source.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

from hostopt.collectives.call import Array

# What a rank sends before it receives keeps the network busy. More would leave the caches, or fill
# the receiver with freshly allocated memory, page fault by page fault.
_MOST_SEGMENTS_AHEAD, _BYTES_AHEAD = 4, 2 << 20


class Round(NamedTuple):
    """One round of one rank."""

    send: int  # chunk for the next rank
    recv: int  # chunk from the previous rank
    reduce: bool  # into the local chunk; otherwise the received one replaces it

    @property
    def phase(self) -> str:
        """Name of the phase, for warnings and errors."""
        if not self.reduce:
            return "all-gather"
        return "exchange" if self.send == self.recv else "reduce-scatter"


def reduce_scatter_rounds(rank: int, size: int) -> list[Round]:
    """Returns the size - 1 rounds after which rank r holds the reduced chunk r."""
    return [
        Round((rank - 1 - i) % size, (rank - 2 - i) % size, reduce=True) for i in range(size - 1)
    ]


def all_gather_rounds(rank: int, size: int) -> list[Round]:
    """Returns the size - 1 rounds that carry chunk r from rank r to all ranks."""
    return [Round((rank - i) % size, (rank - 1 - i) % size, reduce=False) for i in range(size - 1)]


def all_reduce_rounds(rank: int, size: int) -> list[Round]:
    """Rounds of an all-reduce: a reduce-scatter and an all-gather.

    Two ranks exchange their whole buffers instead: as many bytes, in one round instead of two.
    """
    if size == 2:
        return [Round(0, 0, reduce=True)]
    return reduce_scatter_rounds(rank, size) + all_gather_rounds(rank, size)


def chunk_slices(length: int, count: int) -> list[slice]:
    """Cuts `length` elements into `count` slices; the first ones may have one element more."""
    base, extra = divmod(length, count)
    starts = [c * base + min(c, extra) for c in range(count + 1)]
    return [slice(start, stop) for start, stop in zip(starts, starts[1:])]


def segments(
    chunk: Array, segment_bytes: int, at_least_one: bool = True
) -> Iterator[tuple[int, Array]]:
    """Cuts a chunk into numbered messages of up to `segment_bytes`, or of one larger element.

    With `at_least_one`, an empty chunk has one empty segment.
    """
    length = max(segment_bytes // chunk.itemsize, 1)
    for index, start in enumerate(range(0, max(chunk.size, at_least_one), length)):
        yield index, chunk[start : start + length]


class Stripe(NamedTuple):
    """The part of each chunk that one stream of a transport carries; see docs/algorithms.md."""

    stream: int
    streams: int
    most: int  # elements of a segment

    def segments_ahead(self, itemsize: int) -> int:
        """Returns how many segments a rank sends before it receives."""
        return max(1, min(_MOST_SEGMENTS_AHEAD, _BYTES_AHEAD // (self.most * itemsize)))

    def of(self, chunk: Array) -> Array:
        """Returns the stripe of a chunk."""
        stripe: Array = chunk[chunk_slices(chunk.size, self.streams)[self.stream]]
        return stripe

    def segments(self, stripe: Array, at_least_one: bool = True) -> Iterator[tuple[int, Array]]:
        """Returns the segments of a stripe, with numbers that no other stream uses."""
        for index, part in segments(stripe, self.most * stripe.itemsize, at_least_one):
            yield index * self.streams + self.stream, part


ONE_STREAM = Stripe(0, 1, sys.maxsize)
