"""Ring schedules: the chunks that each rank sends and receives in each round.

The flat buffer of n elements is cut into `size` *chunks*. Rank r reduces chunk r. In each *round*
every rank sends one chunk to the next rank and receives one chunk from the previous rank.

All-reduce with 3 ranks r0, r1, r2. Each number is the chunk that the rank sends:

    round        r0    r1    r2
      0   +       2     0     1      reduce-scatter: the receiver adds
      1   +       1     2     0      ... now rank r holds the sum of chunk r
      2   =       0     1     2      all-gather: the receiver copies
      3   =       2     0     1      ... now every rank holds every sum

The chunk received in a round is the chunk sent in the next round.

After P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations" (2009). Every rank sends 2 (size - 1) / size of the buffer. The order of additions
depends only on the chunk, and the sums are copied, so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hostopt.collectives.call import Array


class Round(NamedTuple):
    """One round of one rank.

    Args:
      send: chunk sent to the next rank.
      recv: chunk received from the previous rank.
      reduce: True if the received chunk is reduced into the local one; False if it replaces it.
    """

    send: int
    recv: int
    reduce: bool

    @property
    def phase(self) -> str:
        """Name of the phase, for warnings and errors."""
        if not self.reduce:
            return "all-gather"
        return "exchange" if self.send == self.recv else "reduce-scatter"


def reduce_scatter_rounds(rank: int, size: int) -> list[Round]:
    """Rounds after which rank r holds the reduced chunk r.

    Returns:
      size - 1 rounds.
    """
    return [
        Round((rank - 1 - i) % size, (rank - 2 - i) % size, reduce=True) for i in range(size - 1)
    ]


def all_gather_rounds(rank: int, size: int) -> list[Round]:
    """Rounds that carry chunk r from rank r to all ranks.

    Returns:
      size - 1 rounds.
    """
    return [Round((rank - i) % size, (rank - 1 - i) % size, reduce=False) for i in range(size - 1)]


def all_reduce_rounds(rank: int, size: int) -> list[Round]:
    """Rounds of an all-reduce: a reduce-scatter and an all-gather.

    Two ranks exchange their whole buffers instead. That sends as many bytes as the ring of two, in
    one round instead of two.

    Returns:
      2 (size - 1) rounds over `size` chunks; for two ranks, 1 round over 1 chunk.
    """
    if size == 2:
        return [Round(0, 0, reduce=True)]
    return reduce_scatter_rounds(rank, size) + all_gather_rounds(rank, size)


def chunk_slices(length: int, count: int) -> list[slice]:
    """Cuts `length` elements into `count` chunks whose lengths differ by at most one.

    Args:
      length: number of elements, 0 or more.

    Returns:
      One slice for each chunk. The first ``length % count`` chunks have one element more.
    """
    base, extra = divmod(length, count)
    starts = [c * base + min(c, extra) for c in range(count + 1)]
    return [slice(start, stop) for start, stop in zip(starts, starts[1:])]


def segments(
    chunk: Array, segment_bytes: int, at_least_one: bool = True
) -> Iterator[tuple[int, Array]]:
    """Cuts a chunk into segments, each of which is one message.

    Args:
      segment_bytes: maximum size of a segment, unless one element is larger.
      at_least_one: True if an empty chunk has one empty segment.

    Yields:
      Index of the segment, and a view of its elements.
    """
    length = max(segment_bytes // chunk.itemsize, 1)
    for index, start in enumerate(range(0, max(chunk.size, at_least_one), length)):
        yield index, chunk[start : start + length]
