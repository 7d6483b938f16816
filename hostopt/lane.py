"""Reduction in memory that the ranks of one host share.

The buffer goes through the shared memory in *blocks*. A lane holds, for n ranks,

    marks     how far each rank is, and numbers that it posts; a cache line for each
    inboxes   memory of each rank: what it gives to the others
    sums      what has been reduced; for n > 2

Two ranks exchange:

    1. each rank copies the block into its inbox                       marks: given
    2. each rank combines its own block with the other inbox

The inbox holds several blocks, used in turn: one is written again when both have marked a later
one, and so have read it. Memory that the other core has read is slow to write, and has left its
cache by then.

With more ranks a block is cut into n chunks, of which rank r reduces chunk r:

    1. each rank copies the chunks of the others into its inbox        marks: given
    2. rank r combines its own chunk with chunk r of all inboxes,
       in rank order, into sums                                        marks: reduced
    3. each rank copies the other chunks out of sums

An inbox is written again only when all have marked the reduction that read it, and sums only when
all have marked the next gift, which follows their copying.

Where the ranks read the result in place (`reduce_scatter`), each of n chunks of the whole buffer
goes through the blocks at the same time, whatever n is:

    1. each rank copies its pieces of the others' chunks into its inbox     marks: given
    2. rank r combines its own piece of chunk r with those of all inboxes,
       in rank order, into the result
    and, after the last block,                                              marks: reduced

That is half the copying: nothing is written that another rank does not need.

Byte strings of different lengths (`all_gather_bytes`) go through the blocks whatever n is:

    1. each rank copies the length of its string and as much of it as
       fits into its inbox, later the rest, block by block              marks: given
    2. each rank copies what the others have given out of their inboxes

All know all lengths after the first block, and so how many blocks follow.

What is shared stays in cache, and all ranks end with the same bits. Marks are plain 8-byte stores
after the data; x86-64 shows stores to other cores in that order, which `hostopt.hosts` asks for.
"""

from __future__ import annotations

import bisect
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hostopt.errors import HostOptError
from hostopt.finite import all_finite
from hostopt.ring import Array, Operation, chunk_slices
from hostopt.transport import event_loop
from hostopt.transport.base import Transport

__all__: list[str] = []

_LINE_BYTES = 128  # two lines of the cache, which processors fetch together
_WORDS = _LINE_BYTES // 8
# Words of a rank's line: its meetings; its flags; each twice, in turn, what it posts, the step of
# that and the layout of an array; and whether its part of the sums is finite, which is written
# behind the first meeting of a call. So a rank which is ahead overwrites none that another has yet
# to read.
_MEETINGS, _FLAGS, _POSTED, _POSTED_STEP, _LAYOUT, _FINITE = 0, 1, 2, 4, 6, 8
_PAGE_BYTES = 4096
_LENGTH = struct.Struct("<Q")
_TURNS = 4  # blocks of an inbox that are used in turn
# Looks at a mark before the thread sleeps between looks, about 2 ms: a rank that sleeps when the
# other one comes is late itself.
_SPINS = 40_000
_spinning = threading.Lock()  # one that spins holds the interpreter, which the others need
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 1e-3


def lane_bytes(count: int, block_bytes: int) -> int:
    """Size of the memory that a lane needs.

    Args:
      count: number of ranks.
      block_bytes: size of a block, a multiple of 4096.

    Returns:
      Bytes.
    """
    inboxes_and_sums = count + (count > 2)
    return _marks_bytes(count) + inboxes_and_sums * _turns(count) * block_bytes


class Source:
    """The values of a flat buffer, where they lie: in several arrays, one after the other.

    Args:
      arrays: arrays of one dimension.
      starts: where each begins in the buffer; gaps hold nothing.
    """

    def __init__(self, arrays: Sequence[Array], starts: Sequence[int]) -> None:
        self._arrays = arrays
        self._starts = starts

    def between(self, begin: int, end: int) -> Iterator[tuple[Array, slice]]:
        """The values of a piece of the buffer.

        Args:
          begin: first element of the piece.
          end: the element after the last one.

        Yields:
          Values, and the slice of the piece that they fill.
        """
        for index in range(max(bisect.bisect(self._starts, begin) - 1, 0), len(self._arrays)):
            start, array = self._starts[index], self._arrays[index]
            if start >= end:
                return
            low, high = max(start, begin), min(start + array.size, end)
            if low < high:
                yield array[low - start : high - start], slice(low - begin, high - begin)

    def copy_to(self, flat: Array) -> None:
        """Fill the buffer."""
        for values, where in self.between(0, flat.size):
            flat[where] = values


class Lane:
    """One rank's side of a piece of shared memory, for one collective at a time.

    Args:
      memory: `lane_bytes` of zeros at first, the same memory for all ranks.
      members: ranks of this host, in order.
      block_bytes: size of a block.
      transport: this rank's transport: names, deadlines, and errors of the ring.
    """

    def __init__(
        self, memory: memoryview, members: tuple[int, ...], block_bytes: int, transport: Transport
    ) -> None:
        self._memory = memory
        self._members = members
        self._index = members.index(transport.rank)
        self._block_bytes = block_bytes
        self._transport = transport
        self._marks = memory[: _marks_bytes(len(members))].cast("Q")
        self._others = [
            (index * _WORDS, rank) for index, rank in enumerate(members) if rank != transport.rank
        ]
        self._meetings = 0
        self._spins = _SPINS if len(members) <= len(os.sched_getaffinity(0)) else 1
        self._calls = 0
        self._turn = 0
        self._arrays: dict[np.dtype[Any], Array] = {}  # all that follows the marks, by dtype

    def all_reduce(
        self, flat: Array, combine: np.ufunc, operation: Operation, source: Source | None = None
    ) -> None:
        """Reduce over the ranks of this host.

        Args:
          flat: contiguous array of shape [n], the same shape and dtype on all ranks; receives
            the result.
          combine: binary ufunc.
          operation: which call this is.
          source: this rank's values, of the same size and dtype; by default those of `flat`.

        Raises:
          CollectiveMismatchError: a rank makes another call.
          HostOptError: a rank failed, left or timed out.
        """
        self._announce(flat.nbytes, operation)
        if len(self._members) > 2 and source is not None:
            source.copy_to(flat)
            source = None
        source = source or Source([flat], [0])
        length = self._block_bytes // flat.itemsize
        for number, start in enumerate(range(0, max(flat.size, 1), length)):
            part = flat[start : start + length]
            if len(self._members) == 2:
                self._exchange(part, start, source, combine, operation, number)
            else:
                self._reduce_chunks(part, combine, operation, number)

    def _exchange(
        self,
        part: Array,
        start: int,
        source: Source,
        combine: np.ufunc,
        operation: Operation,
        number: int,
    ) -> None:
        given = [self._memory_of(index, part.dtype, part.size) for index in range(2)]
        for values, where in source.between(start, start + part.size):
            given[self._index][where] = values  # 1.
        self._turn += 1
        self._meet(operation, number)
        if number == 0:
            self._check_layout(operation)
        for values, where in source.between(start, start + part.size):
            pair = [values, values]
            pair[1 - self._index] = given[1 - self._index][where]
            combine(pair[0], pair[1], out=part[where])  # 2.

    def _reduce_chunks(
        self, part: Array, combine: np.ufunc, operation: Operation, number: int
    ) -> None:
        count = len(self._members)
        inboxes = [self._memory_of(index, part.dtype, part.size) for index in range(count)]
        sums = self._memory_of(count, part.dtype, part.size)
        mine = chunk_slices(part.size, count)[self._index]
        others = slice(0, mine.start), slice(mine.stop, part.size)
        for chunk in others:
            inboxes[self._index][chunk] = part[chunk]  # 1.
        self._meet(operation, 2 * number)
        if number == 0:
            self._check_layout(operation)
        inboxes[self._index] = part
        combine(inboxes[0][mine], inboxes[1][mine], out=sums[mine])  # 2.
        for inbox in inboxes[2:]:
            combine(sums[mine], inbox[mine], out=sums[mine])
        part[mine] = sums[mine]
        self._meet(operation, 2 * number + 1)
        for chunk in others:
            part[chunk] = sums[chunk]  # 3.

    def agree(self, flags: int, operation: Operation) -> int:
        """Find out what all ranks of this host can do; before a `reduce_scatter`.

        Args:
          flags: 64 bits of this rank.
          operation: which call this is.

        Returns:
          The bits that are set on all ranks.

        Raises:
          HostOptError: a rank failed, left or timed out.
        """
        self._marks[self._index * _WORDS + _FLAGS] = flags
        self._meet(operation, 0)
        for line, _ in self._others:
            flags &= self._marks[line + _FLAGS]
        return flags

    def reduce_scatter(
        self, sums: Array, combine: np.ufunc, operation: Operation, source: Source
    ) -> bool:
        """Reduce into memory that all ranks of this host share and read in place.

        Args:
          sums: array of shape [n] in shared memory, the same memory on all ranks, which none
            reads or writes otherwise; receives the result.
          combine: binary ufunc.
          operation: which call this is.
          source: this rank's values, of the same size and dtype.

        Returns:
          Whether the sums are finite, the same on all ranks.

        Raises:
          CollectiveMismatchError: a rank makes another call.
          HostOptError: a rank failed, left or timed out.
        """
        self._announce(sums.nbytes, operation)
        count = len(self._members)
        chunks = chunk_slices(sums.size, count)
        length = self._block_bytes // sums.itemsize // count  # of a piece of each chunk
        finite = True
        longest = max(chunk.stop - chunk.start for chunk in chunks)
        for number, start in enumerate(range(0, max(longest, 1), length)):
            inboxes = [self._memory_of(i, sums.dtype, count * length) for i in range(count)]
            pieces = [
                slice(min(c.start + start, c.stop), min(c.start + start + length, c.stop))
                for c in chunks
            ]
            for index, piece in enumerate(pieces):
                if index != self._index:
                    box = inboxes[self._index][index * length :]
                    for values, where in source.between(piece.start, piece.stop):
                        box[where] = values  # 1.
            self._turn += 1
            self._meet(operation, number)
            if number == 0:
                self._check_layout(operation)
            mine = pieces[self._index]
            given = [inbox[self._index * length :] for inbox in inboxes]
            for values, where in source.between(mine.start, mine.stop):
                parts = [box[where] for box in given]
                parts[self._index] = values
                out = sums[mine][where]
                combine(parts[0], parts[1], out=out)  # 2.
                for part in parts[2:]:
                    combine(out, part, out=out)
            finite = all_finite(sums[mine]) and finite  # while it is in the cache
        self._marks[self._index * _WORDS + _FINITE] = finite
        self._meet(operation, number + 1)
        return finite and all(self._marks[line + _FINITE] for line, _ in self._others)

    def broadcast(self, flat: Array, root: int, operation: Operation) -> None:
        """Give all ranks of this host the values of one of them, in place.

        Args:
          flat: contiguous array of shape [n], the same shape and dtype on all ranks.
          root: rank whose values hold.
          operation: which call this is.

        Raises:
          HostOptError: a rank failed, left or timed out.
        """
        length = self._block_bytes // flat.itemsize
        for number, start in enumerate(range(0, max(flat.size, 1), length)):
            part = flat[start : start + length]
            index = self._members.index(root)
            shared = self._memory_of(index, part.dtype, part.size)
            if self._transport.rank == root:
                shared[...] = part
            self._turn += 1
            self._meet(operation, 2 * number)
            if self._transport.rank != root:
                part[...] = shared
            self._meet(operation, 2 * number + 1)

    def all_gather_bytes(self, data: memoryview, operation: Operation) -> list[bytes | memoryview]:
        """Collect byte strings, which may differ in length, on every rank of this host.

        Args:
          data: contiguous bytes of this rank.
          operation: which call this is.

        Returns:
          The bytes of each rank, in rank order; `data` itself for this one.

        Raises:
          CollectiveMismatchError: a rank makes another call.
          HostOptError: a rank failed, left or timed out.
        """
        self._announce(len(data), operation)
        memory, room = self._memory, self._block_bytes - _LENGTH.size
        starts = self._block_starts()
        own = starts[self._index] + _LENGTH.size
        first = data[:room]
        _LENGTH.pack_into(memory, own - _LENGTH.size, len(data))
        memory[own : own + len(first)] = first  # 1.
        self._turn += 1
        self._meet(operation, 0)
        self._check_layout(operation)
        lengths = [_LENGTH.unpack_from(memory, start)[0] for start in starts]
        firsts = [
            memory[start + _LENGTH.size : start + _LENGTH.size + min(length, room)]
            for start, length in zip(starts, lengths)
        ]
        if max(lengths) <= room:
            found: list[bytes | memoryview] = [bytes(each) for each in firsts]  # 2.
        else:
            wholes = [np.empty(length, np.uint8).data for length in lengths]
            for whole, each in zip(wholes, firsts):
                whole[: len(each)] = each  # 2.
            self._gather_more(data, room, wholes, operation)
            found = [whole.toreadonly() for whole in wholes]
        found[self._index] = data
        return found

    def _gather_more(
        self, data: memoryview, begin: int, wholes: list[memoryview], operation: Operation
    ) -> None:
        """The blocks of byte strings behind the first one, which ends at `begin`."""
        memory, size = self._memory, self._block_bytes
        longest = max(map(len, wholes))
        for number, at in enumerate(range(begin, longest, size), start=1):
            starts = self._block_starts()
            given, own = data[at : at + size], starts[self._index]
            memory[own : own + len(given)] = given  # 1.
            self._turn += 1
            self._meet(operation, number)
            for index, (start, whole) in enumerate(zip(starts, wholes)):
                if index != self._index and at < len(whole):
                    piece = whole[at : at + size]
                    piece[:] = memory[start : start + len(piece)]  # 2.

    def post(self, step: int, word: int) -> None:
        """Leave a word for the other ranks, without waiting for them.

        Args:
          step: number of the post, from 0; between two posts all ranks meet or collect.
          word: 64 bits.
        """
        place = self._index * _WORDS + step % 2
        self._marks[place + _POSTED] = word
        self._marks[place + _POSTED_STEP] = step + 1

    def collect(self, operation: Operation) -> list[int]:
        """The words that the ranks have posted for a step; waits only for those that are late.

        Args:
          operation: which step, and what is collected.

        Returns:
          A word from each rank of this host, in rank order.

        Raises:
          HostOptError: a rank failed, left or timed out.
        """
        place = operation.step % 2
        for line, rank in self._others:
            self._wait(line + place + _POSTED_STEP, operation.step + 1, rank, operation, 0)
        lines = range(0, len(self._members) * _WORDS, _WORDS)
        return [self._marks[line + place + _POSTED] for line in lines]

    # -- meeting ---------------------------------------------------------------------------

    def _meet(self, operation: Operation, round_: int) -> None:
        """Mark that this rank is here, and wait for all others."""
        self._meetings += 1
        self._marks[self._index * _WORDS + _MEETINGS] = self._meetings
        for line, rank in self._others:
            self._wait(line + _MEETINGS, self._meetings, rank, operation, round_)

    def _wait(self, place: int, wanted: int, rank: int, operation: Operation, round_: int) -> None:
        """Return once the mark of a rank has come as far as `wanted`."""
        if self._marks[place] >= wanted or self._spin(place, wanted):
            return
        tag = operation.tag(round_)
        pause_s = _SHORTEST_SLEEP_S
        try:
            what = operation.in_phase("exchange in memory")
            with self._transport.mailbox.waiting(rank, tag, what) as check:
                while self._marks[place] < wanted:
                    check()
                    time.sleep(pause_s)
                    pause_s = min(1.5 * pause_s, _LONGEST_SLEEP_S)
        except HostOptError as error:
            self._transport.abort(error)
            raise

    def _spin(self, place: int, wanted: int) -> bool:
        """Look at a mark for about 2 ms, unless another thread of this process does so already."""
        if not _spinning.acquire(blocking=False):
            return False
        try:
            marks = self._marks
            for _ in range(self._spins):
                if marks[place] >= wanted:
                    break
            return marks[place] >= wanted
        finally:
            _spinning.release()

    def _announce(self, nbytes: int, operation: Operation) -> None:
        tag = operation.tag()
        self._transport.recorder.note("in memory", -1, operation.what, tag, nbytes)
        self._calls += 1
        self._marks[self._index * _WORDS + _LAYOUT + self._calls % 2] = tag.layout

    def _check_layout(self, operation: Operation) -> None:
        place = _LAYOUT + self._calls % 2
        wanted = self._marks[self._index * _WORDS + place]
        for line, rank in self._others:
            if self._marks[line + place] != wanted:
                raise event_loop.run(self._transport.mismatch(rank, operation.tag()))

    # -- memory ----------------------------------------------------------------------------

    def _block_starts(self) -> list[int]:
        """Where in memory the block whose turn it is begins, in each inbox."""
        turns = _turns(len(self._members))
        begin = _marks_bytes(len(self._members)) + self._turn % turns * self._block_bytes
        return [begin + i * turns * self._block_bytes for i in range(len(self._members))]

    def _memory_of(self, index: int, dtype: np.dtype[Any], size: int) -> Array:
        """The block whose turn it is in an inbox, or in the sums, which follow the inboxes."""
        if dtype not in self._arrays:
            start = _marks_bytes(len(self._members))
            count = (len(self._memory) - start) // dtype.itemsize
            self._arrays[dtype] = np.frombuffer(self._memory, dtype, count, start)
        turns = _turns(len(self._members))
        start = (index * turns + self._turn % turns) * (self._block_bytes // dtype.itemsize)
        return self._arrays[dtype][start : start + size]


def _turns(count: int) -> int:
    return _TURNS if count == 2 else 2


def _marks_bytes(count: int) -> int:
    return -(-count * _LINE_BYTES // _PAGE_BYTES) * _PAGE_BYTES
