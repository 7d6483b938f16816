"""Reducers of gradient buckets: their base class, and the one for ranks that share memory."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Sequence

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.finite import all_finite
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.collectives.shared_memory import SharedMemoryChannel, TensorListView
from hostopt.collectives.wire_format import WireFormat
from hostopt.gradients.bucket import Bucket, BufferPool, free_buffers
from hostopt.gradients.nonfinite import NonFiniteCheck, find_nonfinite
from hostopt.gradients.step_stats import StepStats, StepTimes
from hostopt.telemetry.timeline import Track
from hostopt.transport.message import signature_of

_MAX_SLOTS = 64  # bits of the free mask of `SharedSlots`


class BucketReducer(abc.ABC):
    """Sums the gradient buckets of each step over the ranks, on a separate channel.

    All ranks create their reducers on a communicator in the same order.
    """

    def __init__(
        self,
        communicator: Communicator,
        buckets: Sequence[Bucket],
        check: NonFiniteCheck,
        wire_format: WireFormat | None = None,
    ) -> None:
        self.communicator = communicator.duplicate("gradients")
        self.nonfinite_check = check
        self.buckets = tuple(buckets)  # in the order in which they are reduced
        self._wire_format = wire_format
        self._first_step = 0
        self._pools = [BufferPool(bucket) for bucket in self.buckets]
        self._calls = [self._first_call(index) for index in range(len(self.buckets))]
        self._stats = StepStats(len(self.buckets))

    @property
    def last_times(self) -> StepTimes | None:
        """Times of the last complete step; None if there is none yet."""
        return self._stats.last

    def count_from(self, step: int) -> None:
        """Sets the number of the first step, the same on all ranks, before any reduction."""
        self._first_step = step

    def scatter(self, bucket: int) -> bool:
        """Makes each rank get its `Bucket.parts` of the sums of a bucket only, as flat arrays.

        All ranks must call it alike, before the first step. Returns False, and changes nothing, if
        that would save no message.
        """
        del bucket
        return False

    def zeros(self, bucket: int) -> list[Array]:
        """Returns gradients of zeros for a bucket, for a rank that has no gradients."""
        return self.buckets[bucket].zeros()

    def refuse(self, reason: str) -> None:
        """Counts a step that this rank refuses, and tells ranks that wait for it."""
        step = self._first_step + self._count_steps()
        self.communicator.transport.call_log.refuse(self.communicator.channel, step, reason)
        self._first_step += 1

    @abc.abstractmethod
    def _count_steps(self) -> int:
        """Returns the number of steps that this rank has made."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the reductions, and frees the buffers."""

    def _record_launch(self, bucket: int, begin_s: float, end_s: float) -> None:
        step = self._stats.launched(bucket, end_s)
        self._add_span(Track.LAUNCH, step, bucket, begin_s, end_s)

    def _record_wait(self, bucket: int, begin_s: float, end_s: float) -> None:
        """Records a wait; the all-reduce of the bucket has been recorded before."""
        step = self._stats.waited(bucket, begin_s, end_s)
        self._add_span(Track.WAIT, step, bucket, begin_s, end_s)

    def _add_span(
        self, track: Track, step: int, bucket: int, begin_s: float, end_s: float
    ) -> None:
        timeline = self.communicator.transport.timeline
        if timeline is not None:
            nbytes, name = self.buckets[bucket].nbytes, self._calls[bucket].name
            timeline.span(track, name, begin_s, end_s, step=step, bucket=bucket, bytes=nbytes)

    def _format_of(self, bucket: Bucket) -> WireFormat | None:
        return self._wire_format if bucket.dtype == np.float32 else None

    def _call(self, bucket: int, step: int) -> CollectiveCall:
        """Returns the call that reduces a bucket in one of the steps of this reducer."""
        return self._calls[bucket]._replace(step=self._first_step + step)

    def _first_call(self, index: int) -> CollectiveCall:
        bucket = self.buckets[index]
        name = f"{bucket.name} (bucket {index + 1}/{len(self.buckets)})"
        wire_format = self._format_of(bucket)
        format_name = "" if wire_format is None else wire_format.name
        shape = (bucket.nbytes // bucket.dtype.itemsize,)
        signature = signature_of("all_reduce(sum)", name, bucket.dtype, shape, format_name)
        return CollectiveCall(self.communicator.channel, 0, index, name, signature)


class InlineReducer(BucketReducer):
    """Sums buckets over the ranks of one host, on the calling thread.

    Handing a bucket to another thread would cost more time than the copying that it could hide.
    The sums lie in shared memory, which all ranks of the host read in place.

    Each step reduces every bucket once, in bucket order. It may leave out the last buckets, on all
    ranks. The launch of a bucket and its reduction begin at the same time.
    """

    def __init__(
        self, communicator: Communicator, buckets: Sequence[Bucket], check: NonFiniteCheck
    ) -> None:
        super().__init__(communicator, buckets, check)
        self._slots = [SharedSlots(self.communicator, bucket) for bucket in self.buckets]
        self._steps = [0] * len(self.buckets)  # reductions of each bucket
        self._lock = threading.Lock()

    def reduce(self, bucket: int, arrays: Sequence[Array]) -> list[Array]:
        """Sums a bucket over the ranks. Collective: all ranks must call it.

        The arrays, in packing order, are not modified. The sums are read-only views of memory that
        other ranks read too. It is not reused while a view is alive on any rank.
        """
        plan = self.buckets[bucket]
        begin_s = time.monotonic()
        with self._lock:
            call = self._call(bucket, self._steps[bucket])
            self.communicator.begin(call)
            self._steps[bucket] += 1
            if bucket == 0:
                self._stats.end_step()  # if it has left out its last buckets
            source = TensorListView([array.reshape(-1) for array in arrays], plan.starts)
            sums, is_finite = self._sum(bucket, source, call)
            views = plan.views(sums)
            end_s = time.monotonic()
            self._record_launch(bucket, begin_s, begin_s)
            self._stats.ring(bucket, begin_s, end_s)
            self._record_wait(bucket, begin_s, end_s)
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
        """Returns the sums, an array of shape [n], and True if they are finite."""
        taken = self._slots[bucket].take(call)
        if taken is None:  # no shared memory is left
            sums = self._pools[bucket].take()
            self.communicator.all_reduce_in_place(sums, ReduceOp.SUM, call, source=source)
            return sums, all_finite(sums)
        channel, index = taken
        sums = self._slots[bucket].slots[index][:]
        is_finite = channel.reduce_scatter(sums, np.add, call, source)
        sums.flags.writeable = False
        return sums, is_finite

    def close(self) -> None:
        """Frees the buffers."""
        self._pools.clear()
        self._slots.clear()


class SharedSlots:
    """Buffers of one bucket in memory that all ranks of one host share.

    A rank may reuse a slot if it holds no view of it. Before each use the ranks combine their
    masks of free slots with a bitwise AND, and take a slot that is free on all ranks. If there is
    none, they allocate another slot. A training that holds no reduced gradients between steps
    needs a single slot.
    """

    def __init__(self, communicator: Communicator, bucket: Bucket) -> None:
        assert communicator.memory is not None
        self._memory = communicator.memory
        self._bucket = bucket
        self.slots: list[Array] = []
        self._can_allocate = True

    def take(
        self, call: CollectiveCall, preferred: int = 0
    ) -> tuple[SharedMemoryChannel, int] | None:
        """Returns the channel of the ranks, and the index of a slot that is free on all.

        Collective: all ranks must call it. Then they must reach a barrier, unless it returns None:
        no memory is left.
        """
        channel = self._memory.channel_of_all(self._bucket.nbytes)
        if channel is None:
            return None
        free_mask = sum(1 << index for index in free_buffers(self.slots))
        free_mask = channel.counters.all_reduce_band(free_mask, call)
        if free_mask >> preferred & 1:
            return channel, preferred
        if not free_mask:
            if not self._allocate_slot():
                return None
            free_mask = 1 << (len(self.slots) - 1)
        return channel, (free_mask & -free_mask).bit_length() - 1  # lowest set bit

    def _allocate_slot(self) -> bool:
        """Allocates a slot on all ranks. After a failure it is not tried again."""
        if self._can_allocate and len(self.slots) < _MAX_SLOTS:
            memory = self._memory.allocate(self._bucket.buffer_bytes)
            self._can_allocate = memory is not None
            if memory is not None:
                self.slots.append(self._bucket.buffer_in(memory))
                return True
        return False
