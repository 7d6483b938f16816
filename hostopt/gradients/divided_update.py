"""Updates that the ranks divide: each updates its part of every variable, for all of them.

A step calls `note`, `begin` and `join`. Between the last two it updates its parts, in place:

    note    the variables have these values; then it releases them
    begin   takes memory that no rank holds any longer, usually that of the last update, with the
            values of its parts
    join    waits for the parts of the other ranks, which share the memory or send them
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.shared_memory import SharedMemoryChannel
from hostopt.gradients.bucket import ALIGNMENT_BYTES, Bucket, BufferPool, SharedSlots, uncounted


class DividedUpdate:
    """Joins the parts of some variables, a bucket with a chunk for each rank."""

    def __init__(
        self, communicator: Communicator, variables: Bucket, slots: Sequence[Array] = ()
    ) -> None:
        self._communicator = communicator.duplicate("divided updates")
        self._variables = variables
        self._parts_of_slots = slots  # in memory that the ranks share
        self._parts = [
            slice(start + part.start, start + part.stop)
            for start, part in zip(variables.starts, variables.parts[communicator.rank])
        ]
        is_shared = self._communicator.on_one_host
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
            for index, part in enumerate(self._parts):
                assigned, start = self._assigned[index], self._variables.starts[index]
                if assigned is not None:
                    np.copyto(new[part], assigned[part.start - start : part.stop - start])
                elif old is not None and old is not new:
                    np.copyto(new[part], old[part])
                self._assigned[index] = None
            more = ALIGNMENT_BYTES // new.itemsize
            return [new[part.start : part.stop + more] for part in self._parts]

    def join(self, parts: Sequence[Array]) -> list[Array]:
        """Returns the new values of all variables. Collective: all ranks must call it.

        The parts that this rank has updated, in the order of the variables and then of the shared
        slots, are copied unless they are in the memory of `begin` or of the slots. The result is
        read-only, and other ranks may read it, too.
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
            else:
                self._communicator.all_gather_in_place(self._values)
            values = self._variables.views(self._buffers[self._index])
            for each in values:
                each.flags.writeable = False
            return values

    def close(self) -> None:
        """Frees the memory, which the graph would keep until it is collected."""
        with self._lock:
            self._slots = self._values = None
            self._buffers, self._parts_of_slots, self._pool.buffers = [], (), []
            self._assigned = [None] * len(self._assigned)

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
