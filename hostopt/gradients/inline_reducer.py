"""Bucket reduction on the calling thread, if all ranks share memory.

Handing a bucket to another thread would cost more time than the copying that it could hide. The
sums lie in shared memory, which all ranks of the host read in place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.finite import all_finite
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.collectives.shared_memory import TensorListView
from hostopt.gradients.bucket import Bucket, free_buffers
from hostopt.gradients.bucket_reducer import BucketReducer
from hostopt.gradients.nonfinite import NonFiniteCheck, find_nonfinite

_MAX_SLOTS = 64  # bits of the free mask


class InlineReducer(BucketReducer):
    """Sums buckets over the ranks of one host, on the calling thread.

    Each step reduces every bucket once, in bucket order. It may leave out the last buckets, on all
    ranks. The launch of a bucket and its reduction begin at the same time.

    See `BucketReducer` for the arguments. All ranks must run on one host.
    """

    def __init__(
        self, communicator: Communicator, buckets: Sequence[Bucket], check: NonFiniteCheck
    ) -> None:
        super().__init__(communicator, buckets, check)
        self._shared = [SharedSums(self.communicator, bucket) for bucket in self._buckets]
        self._steps = [0] * len(self._buckets)  # reductions of each bucket
        self._lock = threading.Lock()

    def reduce(self, bucket: int, arrays: Sequence[Array]) -> list[Array]:
        """Sums a bucket over the ranks.

        Collective: all ranks must call it.

        Args:
          arrays: gradients of the bucket, in packing order. They are not modified.

        Returns:
          The sums, in packing order. They are read-only views of memory that other ranks read
          too. It is not reused while a view is alive on any rank.
        """
        plan = self._buckets[bucket]
        begin_s = time.monotonic()
        with self._lock:
            name, signature = self._descriptions[bucket], self._signatures[bucket]
            step = self._first_step + self._steps[bucket]
            call = CollectiveCall(self.communicator.channel, step, bucket, name, signature)
            self.communicator.begin(call)
            self._steps[bucket] += 1
            if bucket == 0:
                self._timing.end_step()  # if it has left out its last buckets
            source = TensorListView([array.reshape(-1) for array in arrays], plan.starts)
            sums, is_finite = self._sum(bucket, source, call)
            views = plan.views(sums)
            end_s = time.monotonic()
            self._timing.launched(bucket, begin_s, begin_s)
            self._timing.ring(bucket, begin_s, end_s)
            self._timing.waited(bucket, begin_s, end_s)
            self.nonfinite_check.check(
                call,
                is_finite,
                lambda: find_nonfinite(plan.names, arrays),
                lambda: find_nonfinite(plan.names, views),
            )
        return views

    def _count_steps(self) -> int:
        return self._steps[0]

    def _sum(
        self, bucket: int, source: TensorListView, call: CollectiveCall
    ) -> tuple[Array, bool]:
        shared = self._shared[bucket].reduce(source, call)
        if shared is not None:
            return shared
        sums = self._pools[bucket].take()  # no shared memory is left
        self.communicator.all_reduce_in_place(sums, ReduceOp.SUM, call, source=source)
        return sums, all_finite(sums)

    def close(self) -> None:
        """Frees the buffers."""
        self._pools.clear()
        self._shared.clear()


# -- sums in shared memory -------------------------------------------------------------------

# Reduction of a bucket into memory that all ranks of one host share and read in place. The sums
# lie in shared-memory slots. A rank may reuse a slot if it holds no view of it. Before each
# reduction the ranks combine their masks of free slots with a bitwise AND, and use the lowest slot
# that is free on all ranks. If there is none, they allocate another slot. A training that holds no
# reduced gradients between steps needs a single slot.


class SharedSums:
    """Reduces one bucket over the ranks of one host.

    Args:
      communicator: communicator of ranks on one host. Other buckets use it in turn.
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
