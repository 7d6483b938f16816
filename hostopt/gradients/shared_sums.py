"""Reduction of a bucket into memory that all ranks of one host share and read in place.

The sums lie in shared-memory slots. A rank may reuse a slot if it holds no view of it. Before each
reduction the ranks combine their masks of free slots with a bitwise AND, and use the lowest slot
that is free on all ranks. If there is none, they allocate another slot. A training that holds no
reduced gradients between steps needs a single slot.
"""

from __future__ import annotations

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.tensor_list_view import TensorListView
from hostopt.gradients.bucket import Bucket, free_buffers

_MAX_SLOTS = 64  # bits of the free mask


class SharedSums:
    """Reduces one bucket over the ranks of one host.

    Args:
      communicator: communicator of ranks on one host. Other buckets use it in turn.
      bucket: the bucket, the same on all ranks.
    """

    def __init__(self, communicator: Communicator, bucket: Bucket) -> None:
        assert communicator.memory is not None
        self._memory = communicator.memory
        self._bucket = bucket
        self._slots: list[Array] = []
        self._can_allocate = True

    def reduce(self, source: TensorListView, call: CollectiveCall) -> tuple[Array, bool] | None:
        """Sums the bucket over the ranks.

        Collective: all ranks must call it.

        Args:
          source: values of this rank.

        Returns:
          The sums, a read-only array of shape [n], and True if they are finite. None if no slot
          is free and no memory is left; nothing has been reduced then.
        """
        channel = self._memory.channel_of_all(self._bucket.nbytes)
        if channel is None:
            return None
        free_mask = sum(1 << index for index in free_buffers(self._slots))
        free_mask = channel.counters.all_reduce_band(free_mask, call)
        if not free_mask:
            if not self._allocate_slot():
                return None
            free_mask = 1 << (len(self._slots) - 1)
        slot = self._slots[(free_mask & -free_mask).bit_length() - 1]
        is_finite = channel.reduce_scatter(slot, np.add, call, source)
        sums = slot[:]
        sums.flags.writeable = False
        return sums, is_finite

    def _allocate_slot(self) -> bool:
        """Allocates a slot on all ranks. After a failure it is not tried again."""
        if self._can_allocate and len(self._slots) < _MAX_SLOTS:
            memory = self._memory.allocate(self._bucket.nbytes)
            self._can_allocate = memory is not None
            if memory is not None:
                # each slot is a view of its own base array, as `free_buffers` expects
                self._slots.append(np.frombuffer(memory, np.uint8).view(self._bucket.dtype))
                return True
        return False
