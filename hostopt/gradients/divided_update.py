"""Updates that the ranks divide: each updates its part of every variable, for all of them.

    [D1] each rank copies its parts of the old values into new memory
    [D2] its optimizer updates them there, in place
    [D3] when all ranks have done so, each reads all of the new values

The ranks of one host share the new memory, and read the parts of the others where they were
updated. Otherwise the parts are gathered over the network. Old values stay as they are, so that
whoever holds them, such as a late operation of backward, is not disturbed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np

from hostopt.collectives.call import Array
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.shared_memory import SharedMemoryChannel
from hostopt.gradients.bucket import Bucket, BufferPool, TensorSpec
from hostopt.gradients.bucket_reducer import SharedSlots

# Parts begin at multiples of this many elements, so that an optimizer's vector instructions meet
# the same elements as in the whole variable, and that TensorFlow can use the memory in place.
_UNIT = 64


def part_of(size: int, index: int, count: int) -> slice:
    """Returns the elements of a variable of `size` elements that rank `index` updates."""
    units = -(-size // _UNIT)
    begin, end = (min(size, _UNIT * (units * i // count)) for i in (index, index + 1))
    return slice(begin, end)


class DividedUpdate:
    """Divides the updates of some variables of one dtype, for one update of each at a time.

    Collective: all ranks must call `begin` and `end` in turn, for the same variables.

    Args:
      specs: name, shape and dtype of each variable.
    """

    def __init__(self, communicator: Communicator, specs: Sequence[TensorSpec]) -> None:
        self._communicator = communicator.duplicate("divided updates")
        self._variables = Bucket(tuple(range(len(specs))), tuple(specs))
        sizes = [math.prod(spec.shape) for spec in specs]
        count = communicator.size
        self._parts = [[part_of(size, i, count) for size in sizes] for i in range(count)]
        self._slots = None
        if self._communicator.on_one_host:
            self._slots = SharedSlots(self._communicator, self._variables)
        self._pool = BufferPool(self._variables)
        self._channel: SharedMemoryChannel | None = None  # of the update that has begun
        self._new: list[Array] = []
        self._lock = threading.Lock()

    def begin(self, values: Sequence[Array]) -> list[Array]:
        """[D1] Returns this rank's parts of the values, as flat arrays to update in place."""
        with self._lock:
            call = self._communicator.begin_call("begin_update")
            self._channel = None if self._slots is None else self._slots.channel()
            slot = None
            if self._slots is not None and self._channel is not None:
                slot = self._slots.take(self._channel, call)
            if slot is None:
                self._channel = None  # no memory is left
            self._new = self._variables.views(self._pool.take() if slot is None else slot)
            parts = self._parts_of(self._new, self._communicator.rank)
            old = self._parts_of(values, self._communicator.rank)
            for part, value in zip(parts, old):
                np.copyto(part, value)
            return parts

    def end(self, parts: Sequence[Array]) -> list[Array]:
        """[D3] Returns the new values of all variables, as read-only arrays.

        Args:
          parts: those of `begin` after the update; copies of them are accepted.
        """
        with self._lock:
            new, self._new = self._new, []
            for part, value in zip(self._parts_of(new, self._communicator.rank), parts):
                if not np.shares_memory(part, value):
                    np.copyto(part, value)
            if self._channel is None:
                self._gather(new)
            else:
                call = self._communicator.begin_call("end_update")
                self._channel.barrier(call, self._variables.nbytes)
            for each in new:
                each.flags.writeable = False
            return new

    def _gather(self, new: Sequence[Array]) -> None:
        """Gathers the parts of the other ranks over the network."""
        rank = self._communicator.rank
        local = np.concatenate(self._parts_of(new, rank))
        gathered = self._communicator.all_gather_bytes(local.data, "divided updates")
        for peer, data in enumerate(gathered):
            if peer != rank:
                flat = np.frombuffer(data, self._variables.dtype)
                for part in self._parts_of(new, peer):
                    np.copyto(part, flat[: part.size])
                    flat = flat[part.size :]

    def _parts_of(self, values: Sequence[Array], rank: int) -> list[Array]:
        return [value.reshape(-1)[part] for value, part in zip(values, self._parts[rank])]
