"""Updates that the ranks divide: each updates its part of every variable, for all of them.

The ranks of one host write their parts to memory that they share, and read those of the others
there. Otherwise the parts are gathered over the network. Values of earlier updates stay as they
are as long as a rank holds them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np

from hostopt.collectives.call import Array
from hostopt.collectives.communicator import Communicator
from hostopt.gradients.bucket import Bucket, BufferPool, TensorSpec
from hostopt.gradients.bucket_reducer import SharedSlots

# Parts begin at multiples of this many elements, so that the vector instructions of an update meet
# the same elements as in the whole variable.
_UNIT = 64


def part_of(size: int, index: int, count: int) -> slice:
    """Returns the elements of a variable of `size` elements that rank `index` updates."""
    units = -(-size // _UNIT)
    begin, end = (min(size, _UNIT * (units * i // count)) for i in (index, index + 1))
    return slice(begin, end)


class DividedUpdate:
    """Joins the parts of some variables of one dtype.

    Args:
      specs: name, shape and dtype of each variable.
    """

    def __init__(self, communicator: Communicator, specs: Sequence[TensorSpec]) -> None:
        self._communicator = communicator.duplicate("divided updates")
        self._variables = Bucket(tuple(range(len(specs))), tuple(specs))
        sizes = [math.prod(spec.shape) for spec in specs]
        count = communicator.size
        self._parts = [[part_of(size, i, count) for size in sizes] for i in range(count)]
        is_shared = self._communicator.on_one_host
        self._slots = SharedSlots(self._communicator, self._variables) if is_shared else None
        self._pool = BufferPool(self._variables)
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
        values = self._variables.views(slot)
        self._write(values, self._communicator.rank, parts)
        channel.barrier(call, self._variables.nbytes)
        return values

    def _gather(self, parts: Sequence[Array]) -> list[Array]:
        values = self._variables.views(self._pool.take())
        data = np.concatenate(parts).view(np.uint8).data  # bfloat16 has no buffer format
        for rank, gathered in enumerate(self._communicator.all_gather_bytes(data)):
            flat = np.frombuffer(gathered, self._variables.dtype)
            lengths = [part.stop - part.start for part in self._parts[rank]]
            self._write(values, rank, np.split(flat, np.cumsum(lengths)[:-1]))
        return values

    def _write(self, values: Sequence[Array], rank: int, parts: Sequence[Array]) -> None:
        for value, where, part in zip(values, self._parts[rank], parts):
            np.copyto(value.reshape(-1)[where], part)
