"""Collectives among the ranks of one host, in shared memory.

The data goes through shared memory in *blocks*, which stay in cache. Each rank has a *staging
buffer*, which it writes and the others read. After writing, a rank increments its *sequence
counter* and waits until the counters of all others have reached the same value: a barrier. All
ranks reduce in rank order, and so get the same bits.

All-reduce of two ranks:

    [X1] each rank copies the block to its staging buffer              barrier
    [X2] each rank reduces its values with those of the other rank

All-reduce of n > 2 ranks. A block is cut into n chunks; rank r reduces chunk r:

    [R1] each rank copies the chunks of the others to its buffer       barrier
    [R2] rank r reduces chunk r of all ranks into the shared sums      barrier
    [R3] each rank copies the other chunks from the sums

Reduce-scatter of n >= 2 ranks into shared memory that all ranks then read in place. One piece of
each of the n chunks of the whole buffer goes through the blocks at a time:

    [S1] each rank copies its pieces of the others' chunks             barrier
    [S2] rank r reduces the piece of chunk r of all ranks into the
         result; after the last piece                                  barrier

All-gather of byte strings. After the first block, all ranks know the number of blocks:

    [B1] each rank copies the length of its string and its first bytes
         to its buffer, later the rest, block by block                 barrier
    [B2] each rank copies the bytes of the others from their buffers

A staging buffer has several slots, used in turn. A slot, and the shared sums, are written again
only after a later barrier, which all ranks reach after they have read them.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Callable, TypeVar, cast

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.finite import all_finite
from hostopt.collectives.ring_schedule import chunk_slices
from hostopt.collectives.sequence_counters import SequenceCounters, counters_bytes
from hostopt.transport.base import Transport

_Method = TypeVar("_Method", bound=Callable[..., Any])
_LENGTH = struct.Struct("<Q")  # length of a byte string, before its first bytes


def channel_bytes(count: int, block_bytes: int) -> int:
    """Returns the size of the shared memory of a channel; blocks are multiples of 4096 bytes."""
    buffers = count + (count > 2)
    return counters_bytes(count) + buffers * _slot_count(count) * block_bytes


def _slot_count(count: int) -> int:
    # Two slots are needed. Memory that another core has just read is slow to write. With four
    # slots it has left the other core's cache before it is written again.
    return 4 if count == 2 else 2


class StagingBuffers:
    """Addresses the blocks of the current slot in memory of `channel_bytes`.

    The counters of `sequence_counters` come first, then the staging buffer of each rank and, for n
    > 2, one more buffer for the sums. A buffer consists of *slots* of one block each. All ranks
    use the same slot at the same time.
    """

    def __init__(self, memory: memoryview, count: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._count = count
        self._slots = _slot_count(count)
        self._slot = 0
        flat = np.frombuffer(memory, np.uint8, offset=counters_bytes(count))
        self._buffers = flat.reshape(-1, self._slots, block_bytes)
        self._arrays: dict[np.dtype[Any], Array] = {}  # the buffers, by dtype

    def next_slot(self) -> None:
        """Moves on to the next slot."""
        self._slot = (self._slot + 1) % self._slots

    def block(self, index: int, dtype: np.dtype[Any], size: int) -> Array:
        """Returns `size` elements of the block of the current slot in one buffer.

        The index is that of the rank on this host; the number of ranks for the sums.
        """
        if dtype not in self._arrays:
            self._arrays[dtype] = self._buffers.view(dtype)
        return self._arrays[dtype][index, self._slot, :size]

    def blocks(self, dtype: np.dtype[Any], size: int) -> list[Array]:
        """Returns the block of the current slot of each rank; see `block`."""
        return [self.block(index, dtype, size) for index in range(self._count)]

    def bytes_of_blocks(self) -> list[memoryview]:
        """Returns the bytes of the block of the current slot of each rank."""
        return [each.data for each in self._buffers[: self._count, self._slot]]


class TensorListView:
    """Read access to the values of a flat buffer that are stored in several arrays, with gaps."""

    def __init__(self, arrays: Sequence[Array], starts: Sequence[int]) -> None:
        self._arrays = arrays
        self._starts = starts  # position of each array in the buffer, ascending

    def between(self, begin: int, end: int) -> Iterator[tuple[Array, slice]]:
        """Yields views of the values in a range, and the slice of the range that each fills."""
        for index in range(max(bisect.bisect(self._starts, begin) - 1, 0), len(self._arrays)):
            start, array = self._starts[index], self._arrays[index]
            if start >= end:
                return
            low, high = max(start, begin), min(start + array.size, end)
            if low < high:
                yield array[low - start : high - start], slice(low - begin, high - begin)

    def copy_to(self, flat: Array) -> None:
        """Copies the values to a buffer; gaps are not written."""
        for values, target in self.between(0, flat.size):
            flat[target] = values


def _aborting(method: _Method) -> _Method:
    """Makes any error of a collective abort the ring, also an interrupt.

    The next collective of this rank would meet the rest of this one.
    """

    @functools.wraps(method)
    def call(self: SharedMemoryChannel, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._transport.abort(error)
            raise

    return cast(_Method, call)


class SharedMemoryChannel:
    """One rank's access to shared memory, initially zero, for one collective at a time.

    A collective raises CollectiveMismatchError if a rank makes another call.
    """

    def __init__(
        self, memory: memoryview, members: tuple[int, ...], block_bytes: int, transport: Transport
    ) -> None:
        self.counters = SequenceCounters(memory, members, transport)
        self._transport = transport
        self._staging = StagingBuffers(memory, len(members), block_bytes)
        self._members = members
        self._count = len(members)
        self._index = members.index(transport.rank)

    @_aborting
    def all_reduce(
        self, flat: Array, op: np.ufunc, call: CollectiveCall, source: TensorListView | None = None
    ) -> None:
        """Reduces a contiguous array of shape [n] over the ranks of this host, in place.

        `source` has the values of this rank, of the same size and dtype; by default those in
        `flat`. Collective: all ranks must call it.
        """
        self.counters.begin_call(call, flat.nbytes)
        if self._count > 2 and source is not None:
            source.copy_to(flat)
            source = None
        source = source or TensorListView([flat], [0])
        length = self._staging.block_bytes // flat.itemsize
        for number, start in enumerate(range(0, max(flat.size, 1), length)):
            part = flat[start : start + length]
            if self._count == 2:
                self._exchange(part, start, source, op, call, number)
            else:
                self._reduce_chunks(part, op, call, number)

    def _exchange(
        self,
        part: Array,
        start: int,
        source: TensorListView,
        op: np.ufunc,
        call: CollectiveCall,
        number: int,
    ) -> None:
        """All-reduces block `number`, which begins at element `start`, between two ranks."""
        peer = 1 - self._index
        staged = self._staging.blocks(part.dtype, part.size)
        for values, target in source.between(start, start + part.size):
            staged[self._index][target] = values  # [X1]
        self._staging.next_slot()
        self.counters.barrier(call, number)
        # Both ranks pass the operands in rank order, so that both get the same bits.
        for values, target in source.between(start, start + part.size):
            operands = [values, values]
            operands[peer] = staged[peer][target]
            op(operands[0], operands[1], out=part[target])  # [X2]

    def _reduce_chunks(self, part: Array, op: np.ufunc, call: CollectiveCall, number: int) -> None:
        """All-reduces block `number` among more than two ranks."""
        staged = self._staging.blocks(part.dtype, part.size)
        sums = self._staging.block(self._count, part.dtype, part.size)
        local = chunk_slices(part.size, self._count)[self._index]  # the chunk that is reduced here
        others = slice(0, local.start), slice(local.stop, part.size)
        for chunk in others:
            staged[self._index][chunk] = part[chunk]  # [R1]
        self.counters.barrier(call, 2 * number)
        staged[self._index] = part  # the local chunk was not staged
        op(staged[0][local], staged[1][local], out=sums[local])  # [R2]
        for values in staged[2:]:
            op(sums[local], values[local], out=sums[local])
        part[local] = sums[local]
        self.counters.barrier(call, 2 * number + 1)
        for chunk in others:
            part[chunk] = sums[chunk]  # [R3]

    @_aborting
    def reduce_scatter(
        self, sums: Array, op: np.ufunc, call: CollectiveCall, source: TensorListView
    ) -> bool:
        """Reduces into memory that all ranks of this host read. Collective: all must call it.

        The memory of `sums`, of shape [n], is the same on all ranks, and no other thread may
        access it during the call. `source` has the values of this rank. Returns True on all ranks
        if the sums are finite.
        """
        self.counters.begin_call(call, sums.nbytes)
        chunks = chunk_slices(sums.size, self._count)
        # A block holds one piece of each chunk, side by side.
        length = self._staging.block_bytes // sums.itemsize // self._count
        longest = max(chunk.stop - chunk.start for chunk in chunks)
        finite = True
        for number, start in enumerate(range(0, max(longest, 1), length)):
            staged = self._staging.blocks(sums.dtype, self._count * length)
            pieces = [
                slice(min(c.start + start, c.stop), min(c.start + start + length, c.stop))
                for c in chunks
            ]
            for index, piece in enumerate(pieces):
                if index != self._index:
                    target_piece = staged[self._index][index * length :]
                    for values, target in source.between(piece.start, piece.stop):
                        target_piece[target] = values  # [S1]
            self._staging.next_slot()
            self.counters.barrier(call, number)
            local = pieces[self._index]
            self._reduce_piece(
                [buffer[self._index * length :] for buffer in staged], sums, local, op, source
            )
            finite = all_finite(sums[local]) and finite  # while the sums are in cache
        return self.counters.all_finite(finite, call, number + 1)

    def _reduce_piece(
        self, staged: list[Array], sums: Array, local: slice, op: np.ufunc, source: TensorListView
    ) -> None:
        """Reduces one piece: staged values of the others with the values of this rank."""
        for values, target in source.between(local.start, local.stop):
            operands = [buffer[target] for buffer in staged]
            operands[self._index] = values  # never staged
            out = sums[local][target]
            op(operands[0], operands[1], out=out)  # [S2]
            for operand in operands[2:]:
                op(out, operand, out=out)

    @_aborting
    def broadcast(self, flat: Array, root: int, call: CollectiveCall) -> None:
        """Sends the values of one rank to this host, in place. Collective: all must call it."""
        self.counters.begin_call(call, flat.nbytes)
        root_index = self._members.index(root)
        length = self._staging.block_bytes // flat.itemsize
        for number, start in enumerate(range(0, max(flat.size, 1), length)):
            part = flat[start : start + length]
            staged = self._staging.block(root_index, part.dtype, part.size)
            if self._index == root_index:
                staged[...] = part
            self._staging.next_slot()
            self.counters.barrier(call, 2 * number)
            if self._index != root_index:
                part[...] = staged
            self.counters.barrier(call, 2 * number + 1)

    @_aborting
    def barrier(self, call: CollectiveCall, nbytes: int) -> None:
        """Waits until all ranks of this host have written. Collective: all must call it."""
        self.counters.begin_call(call, nbytes)
        self.counters.barrier(call, 0)

    @_aborting
    def all_gather_bytes(self, data: memoryview, call: CollectiveCall) -> list[bytes | memoryview]:
        """Gathers byte strings of any length on this host. Collective: all must call it.

        Returns the bytes of each rank, in rank order; `data` itself for this rank.
        """
        self.counters.begin_call(call, len(data))
        size = self._staging.block_bytes
        begin, end = 0, size - _LENGTH.size  # of what a block holds
        blocks = self._share([_LENGTH.pack(len(data)), data[:end]], call, 0)
        lengths = [_LENGTH.unpack_from(block)[0] for block in blocks]
        blocks = [block[_LENGTH.size :] for block in blocks]
        if max(lengths) <= end:
            gathered: list[bytes | memoryview] = [
                bytes(block[:length])
                for block, length in zip(blocks, lengths)  # [B2]
            ]
            gathered[self._index] = data
            return gathered
        # numpy arrays cause fewer page faults than `bytes`
        results = [np.empty(length, np.uint8).data for length in lengths]
        for number in itertools.count(1):
            for block, result in zip(blocks, results):
                piece = result[begin:end]
                piece[:] = block[: len(piece)]  # [B2]
            if end >= max(lengths):
                break
            begin, end = end, end + size
            blocks = self._share([data[begin:end]], call, number)
        gathered = [result.toreadonly() for result in results]
        gathered[self._index] = data
        return gathered

    def _share(
        self, parts: Sequence[bytes | memoryview], call: CollectiveCall, number: int
    ) -> list[memoryview]:
        """Writes block `number` of this rank, and returns the blocks of all ranks."""
        blocks, begin = self._staging.bytes_of_blocks(), 0
        for part in parts:
            blocks[self._index][begin : begin + len(part)] = part  # [B1]
            begin += len(part)
        self._staging.next_slot()
        self.counters.barrier(call, number)
        return blocks
