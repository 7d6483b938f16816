"""Updates that the ranks divide: each updates its part of every variable, for all of them.

The ranks of one host write their parts to memory that they share, and read those of the others
there. Otherwise the parts are gathered over the network. Values of earlier updates stay as they
are as long as a rank holds them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from hostopt.collectives import chunks
from hostopt.collectives.call import Array
from hostopt.collectives.communicator import Communicator
from hostopt.gradients.bucket import Bucket, BufferPool
from hostopt.gradients.bucket_reducer import SharedSlots


class DividedUpdate:
    """Joins the parts of some variables.

    Args:
      variables: name, shape and dtype of each variable, with a chunk for each rank.
    """

    def __init__(self, communicator: Communicator, variables: Bucket) -> None:
        self._communicator = communicator.duplicate("divided updates")
        self._variables = variables
        self._parts = variables.parts[communicator.rank]
        is_shared = self._communicator.on_one_host
        self._slots = SharedSlots(self._communicator, variables) if is_shared else None
        self._pool = BufferPool(variables)
        self._lock = threading.Lock()

    def join(self, parts: Sequence[Array]) -> list[Array]:
        """Returns the new values of all variables. Collective: all ranks must call it.

        Args:
          parts: the flat parts that this rank has updated, in the order of the variables.

        Returns:
          Read-only arrays in memory that other ranks may read too.
        """
        with self._lock:
            values = self._join_in_memory(parts)
            if values is None:
                values = self._gather(parts)
            for each in values:
                each.flags.writeable = False
            return values

    def _join_in_memory(self, parts: Sequence[Array]) -> list[Array] | None:
        """Returns None on all ranks if they have no memory to share."""
        if self._slots is None:
            return None
        call = self._communicator.begin_call("divided_update")
        taken = self._slots.take(call)
        if taken is None:
            return None
        channel, slot = taken
        values = self._write(slot, parts)
        channel.barrier(call, self._variables.nbytes)
        return values

    def _gather(self, parts: Sequence[Array]) -> list[Array]:
        buffer = self._pool.take()
        values = self._write(buffer, parts)
        chunks.all_gather(self._communicator, buffer)
        return values

    def _write(self, buffer: Array, parts: Sequence[Array]) -> list[Array]:
        values = self._variables.views(buffer)
        for value, where, part in zip(values, self._parts, parts):
            np.copyto(value.reshape(-1)[where], part)
        return values
