"""Updates that the ranks divide: each updates its part of every variable, for all of them.

A step calls `note`, `begin` and `join`. Between the last two it updates its parts, in place:

    note    the variables have these values; then it releases them
    begin   takes memory that no rank holds any longer, usually that of the last update, with the
            values of its parts
    join    waits for the parts of the other ranks, which share the memory or send them; of a table
            they send the rows that have changed
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.shared_memory import SharedMemoryChannel
from hostopt.gradients.bucket import ALIGNMENT_BYTES, Bucket, BufferPool, SharedSlots, uncounted


class DividedUpdate:
    """Joins the parts of some variables, a bucket with a chunk for each rank."""

    def __init__(
        self,
        communicator: Communicator,
        variables: Bucket,
        slots: Sequence[Array] = (),
        has_rows: bool = False,
    ) -> None:
        self._communicator = communicator.duplicate("divided updates")
        self._variables = variables
        self._parts_of_slots = slots  # in memory that the ranks share
        self._parts = self._slices(variables.parts[communicator.rank])
        is_shared = self._communicator.on_one_host
        # in other memory: the ranks send whole parts, but of a table only some rows
        self._kept = self._parts
        if has_rows and not is_shared:
            self._kept = self._slices([slice(0, math.prod(e.shape)) for e in variables.specs])
        self._slots = SharedSlots(self._communicator, variables) if is_shared else None
        self._pool = BufferPool(variables)
        self._buffers: list[Array] = []  # slots, or those of the pool
        self._index = 0  # of the buffer that holds the values of the last update
        self._values: Array | None = None  # an array in its memory
        self._assigned: list[Array | None] = [None] * len(variables.specs)
        self._barrier: tuple[SharedMemoryChannel, CollectiveCall] | None = None
        self._lock = threading.Lock()

    def note(self, values: Sequence[Array]) -> None:
        """Notes the values that variables have before an update, if they were assigned."""
        with self._lock:
            # TensorFlow passes scalars as numbers of NumPy
            arrays = map(np.asarray, values)
            for index, (value, start) in enumerate(zip(arrays, self._variables.starts)):
                is_current = self._values is not None and _is_at(value, self._values[start:])
                self._assigned[index] = None if is_current else value.reshape(-1)

    def begin(self) -> list[Array]:
        """Prepares this rank's parts. Collective: all ranks must call it, after `note`.

        Returns, for each variable, memory to update in place: its flat part, and then
        ALIGNMENT_BYTES that must not be changed.
        """
        with self._lock:
            old = self._values
            new = self._values = self._take()
            if self._barrier is None and self._parts_of_slots:
                # another rank may still read the slots, which no `_take` has waited for
                self._communicator.barrier()
            for index, kept in enumerate(self._kept):
                assigned, start = self._assigned[index], self._variables.starts[index]
                if assigned is not None:
                    np.copyto(new[kept], assigned[kept.start - start : kept.stop - start])
                elif old is not None and old is not new:
                    np.copyto(new[kept], old[kept])
                self._assigned[index] = None
            more = ALIGNMENT_BYTES // new.itemsize
            return [new[part.start : part.stop + more] for part in self._parts]

    def join(self, parts: Sequence[Array], rows: Sequence[Array] = ()) -> list[Array]:
        """Returns the new values of all variables. Collective: all ranks must call it.

        The parts that this rank has updated, in the order of the variables and then of the shared
        slots, are copied unless they are in the memory of `begin` or of the slots. The result is
        read-only, and other ranks may read it, too.

        Args:
          rows: for each table, the indices of the rows that all ranks together have updated.
        """
        with self._lock:
            assert self._values is not None
            memory = [self._values[where] for where in self._parts]
            for target, part in zip([*memory, *self._parts_of_slots], parts):
                if not _is_at(part, target):
                    np.copyto(target, part.reshape(-1))
            if self._barrier is not None:
                channel, call = self._barrier
                channel.barrier(call, self._variables.nbytes)
            elif rows:
                self._exchange_rows(rows)
            else:
                self._communicator.all_gather_in_place(self._values)
            values = self._variables.views(self._buffers[self._index])
            for each in values:
                each.flags.writeable = False
            return values

    def _exchange_rows(self, rows: Sequence[Array]) -> None:
        """Sends this rank's rows that have changed to the others, and takes theirs."""
        views = self._variables.views(self._buffers[self._index])
        tables = [values.reshape(len(values), -1) for values in views]
        changed = [np.unique(indices) for indices in rows]
        local = [
            table[indices].reshape(-1)
            for table, indices in self._parts_of_rows(tables, changed, self._communicator.rank)
        ]
        data = np.concatenate(local).view(np.uint8)
        for rank, gathered in enumerate(self._communicator.all_gather_bytes(data)):
            values = np.frombuffer(gathered, np.uint8).view(self._variables.dtype)
            begin = 0
            for table, indices in self._parts_of_rows(tables, changed, rank):
                end = begin + len(indices) * table.shape[1]
                if rank != self._communicator.rank:
                    table[indices] = values[begin:end].reshape(-1, table.shape[1])
                begin = end

    def _parts_of_rows(
        self, tables: Sequence[Array], rows: Sequence[Array], rank: int
    ) -> Iterator[tuple[Array, Array]]:
        """Yields each table, and the sorted indices that belong to the part of a rank."""
        for table, indices, part in zip(tables, rows, self._variables.parts[rank]):
            edges = part.start // table.shape[1], part.stop // table.shape[1]
            first, end = np.searchsorted(indices, edges)
            yield table, indices[first:end]

    def close(self) -> None:
        """Frees the memory, which the graph would keep until it is collected."""
        with self._lock:
            self._slots = self._values = None
            self._buffers, self._parts_of_slots, self._pool.buffers = [], (), []
            self._assigned = [None] * len(self._assigned)

    def _slices(self, parts: Sequence[slice]) -> list[slice]:
        """Returns where parts of the variables are in the memory of all."""
        starts = self._variables.starts
        return [slice(a + part.start, a + part.stop) for a, part in zip(starts, parts)]

    def _take(self) -> Array:
        """Takes the memory for the next values; the one for the last values if it is free."""
        buffers, index = self._pool.buffers, None
        if self._slots is not None:
            call = self._communicator.begin_call("divided_update")
            taken = self._slots.take(call, self._index)
            if taken is None:  # on all ranks: they have no memory to share
                self._slots = self._barrier = None
            else:
                channel, index = taken
                self._barrier, buffers = (channel, call), self._slots.slots
        if index is None:
            index = self._pool.take_index(self._index)
        if self._values is not None and buffers is self._buffers and index == self._index:
            return self._values
        self._buffers, self._index = buffers, index
        return uncounted(buffers[index])


def _is_at(value: Array, other: Array) -> bool:
    """Returns True if an array is, or is empty, where another one begins."""
    return value.size == 0 or value.ctypes.data == other.ctypes.data
