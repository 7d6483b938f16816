"""Reducers of gradient buckets: `InlineReducer` for ranks that share memory, `Reducer` for others.

[G3] to [G5] are steps of "Path of a gradient" in docs/architecture.md.
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Sequence
from typing import Union

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.finite import all_finite, safe_limit
from hostopt.collectives.host_memory import ScalarSum
from hostopt.collectives.pairs import SMALL_BYTES
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.collectives.shared_memory import TensorListView
from hostopt.collectives.wire_format import WireFormat, new_wire_format, no_compression
from hostopt.errors import CollectiveTimeoutError, ConfigError, PeerLostError
from hostopt.gradients.bucket import Bucket, BufferPool, SharedSlots
from hostopt.gradients.fused_exchange import FusedExchange
from hostopt.gradients.nonfinite import NonFiniteCheck, find_nonfinite
from hostopt.gradients.step_stats import StepStats
from hostopt.telemetry.timeline import Track
from hostopt.transport.message import signature_of


class BucketReducer(abc.ABC):
    """Sums the gradient buckets of each step over the ranks, on a separate channel."""

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
        self.stats = StepStats(len(self.buckets))

    def count_from(self, step: int) -> None:
        """Sets the number of the first step, the same on all ranks, before any reduction."""
        self._first_step = step

    def scatter(self, bucket: int) -> bool:
        """Makes each rank get its `Bucket.parts` of the sums of a bucket only, as flat arrays.

        All ranks must call it alike, before the first step. Returns False, and changes nothing, if
        that would save no message.
        """
        return False

    def zeros(self, bucket: int) -> list[Array]:
        """Returns gradients of zeros for a bucket, for a rank that has no gradients."""
        return [np.zeros(spec.shape, spec.dtype) for spec in self.buckets[bucket].specs]

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
        self._pools.clear()
        if self.communicator.memory is not None:
            self.communicator.memory.close()

    def _record(self, track: Track, bucket: int, begin_s: float, end_s: float) -> None:
        """Records a launch, or a wait, whose all-reduce has been recorded before."""
        if track is Track.LAUNCH:
            step = self.stats.launched(bucket, end_s)
        else:
            step = self.stats.waited(bucket, begin_s, end_s)
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
    """Sums buckets over the ranks of one host, on the calling thread, in memory that all read.

    Each step reduces every bucket once, in bucket order. It may leave out the last buckets, on all
    ranks. The launch of a bucket and its reduction begin at the same time.
    """

    def __init__(
        self, communicator: Communicator, buckets: Sequence[Bucket], check: NonFiniteCheck
    ) -> None:
        super().__init__(communicator, buckets, check)
        self._slots = [
            SharedSlots(self.communicator, bucket, bucket.nbytes) for bucket in self.buckets
        ]
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
                self.stats.end_step()  # if it has left out its last buckets
            source = TensorListView([array.reshape(-1) for array in arrays], plan.starts)
            sums, is_finite = self._sum(bucket, source, call)
            views = plan.views(sums)
            end_s = time.monotonic()
            self._record(Track.LAUNCH, bucket, begin_s, begin_s)
            self.stats.ring(bucket, begin_s, end_s)
            self._record(Track.WAIT, bucket, begin_s, end_s)
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
        super().close()
        self._slots.clear()


class Reducer(BucketReducer):
    """Sums buckets over the ranks on a communication thread, which overlaps with backward.

    Each step launches every bucket once and waits for every bucket once, from any thread and in
    any order; the thread reduces them in bucket order. A step may leave out the last buckets, on
    all ranks. The next step must then launch bucket 0 first, after all waits of the step before.

    Each rank sends a flag after its gradients, which is 0 if these are so small that their sum
    must be finite. If the flags add up to 0, the sums need not be scanned.

    Buckets of float32 are sent in the wire format, by default that of the option `compression`.
    """

    def __init__(
        self,
        communicator: Communicator,
        buckets: Sequence[Bucket],
        check: NonFiniteCheck,
        wire_format: WireFormat | None = None,
    ) -> None:
        option = communicator.transport.options.compression
        super().__init__(communicator, buckets, check, wire_format or new_wire_format(option))
        self._scattered: set[int] = set()
        self._flags: ScalarSum | None = None  # of scattered buckets
        self._limits = [self._limit(bucket) for bucket in self.buckets]
        self._step = 0
        self._next = 0  # bucket that is reduced next
        self._pending: set[int] = set()  # launched, and not yet waited for
        # by bucket: buffer, and result of `find_nonfinite` for the local gradients
        self._launched: dict[int, tuple[Array, dict[str, str]]] = {}
        self._reduced: dict[int, Array] = {}
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_reducing = False
        self._progress_s = time.monotonic()
        self._stop_listening = communicator.transport.mailbox.on_failure(self._fail)
        self._thread = threading.Thread(target=self._run, daemon=True, name="hostopt-reducer")
        self._thread.start()

    def scatter(self, bucket: int) -> bool:
        """See `BucketReducer.scatter`."""
        nbytes = self.buckets[bucket].nbytes
        # a smaller one is not reduced by a ring
        if not self.communicator.has_chunks or nbytes <= SMALL_BYTES:
            return False
        if self._flags is None:
            self._flags = self.communicator.open_scalar_sum("flags")
            self._whole = self.communicator.duplicate("whole sums")
        self._scattered.add(bucket)
        return True

    def launch(self, bucket: int, arrays: Sequence[Array]) -> None:
        """Starts the reduction of a copy of a bucket's gradients, without blocking."""
        begin_s = time.monotonic()
        with self._changed:
            if self._error is not None:
                raise self._error
            if bucket in self._pending:
                raise ConfigError(
                    f"bucket {bucket} ({self.buckets[bucket].name}) was launched twice in one "
                    "step. Run the training operation once in each session.run",
                    bucket=bucket,
                )
            if bucket < self._next and not self._pending:
                self.stats.end_step()  # the step before has left out its last buckets
                self._begin_step()
            self._pending.add(bucket)
            buffer = self._pools[bucket].take()
        plan = self.buckets[bucket]
        is_safe = plan.pack(arrays, buffer, self._limits[bucket])  # [G3] copy to the flat buffer
        # the ring overwrites the local gradients: scan them before
        nonfinite = {} if is_safe else find_nonfinite(plan.names, arrays)
        buffer[-1] = 0 if is_safe else 1  # the flag
        with self._changed:
            self._launched[bucket] = buffer, nonfinite
            self._progress_s = time.monotonic()
            self._record(Track.LAUNCH, bucket, begin_s, self._progress_s)
            self._changed.notify_all()

    def wait(self, bucket: int) -> list[Array]:
        """Returns the sums of a bucket, in packing order, or this rank's parts (`scatter`).

        They are views of a buffer that is not reused while one of them is alive.
        """
        begin_s = time.monotonic()
        with self._changed:
            while bucket not in self._reduced:
                self._wait_for_progress(bucket)
            buffer = self._reduced.pop(bucket)
            self._pending.discard(bucket)
            self._record(Track.WAIT, bucket, begin_s, time.monotonic())
        plan = self.buckets[bucket]
        sums = plan.views(buffer)
        if bucket in self._scattered:
            parts = plan.parts[self.communicator.rank]
            return [each.reshape(-1)[part] for each, part in zip(sums, parts)]
        return sums  # [G5] back to the graph

    def close(self) -> None:
        """Ends the communication thread after its current bucket, and frees the buffers."""
        self._fail(PeerLostError("this reducer is closed", rank=self.communicator.rank))
        self._stop_listening()
        self._thread.join(self.communicator.transport.options.collective_timeout_s)
        super().close()

    def _run(self) -> None:
        try:
            while True:
                self._reduce_next()
        except BaseException as error:
            is_first = self._error is None
            self._fail(error)  # before the abort, which would call it with less
            if is_first:
                self.communicator.abort(error)

    def _wait_for_progress(self, bucket: int) -> None:
        """Waits for a launch or the end of a reduction. The ring checks its own deadlines."""
        if self._error is not None:
            raise self._error
        timeout_s = self.communicator.transport.options.collective_timeout_s
        remaining_s = self._progress_s + timeout_s - time.monotonic()
        if remaining_s <= 0 and not self._is_reducing:
            raise self._never_launched(bucket)
        self._changed.wait(None if self._is_reducing else remaining_s)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _count_steps(self) -> int:
        with self._changed:  # the last step may have left out its last buckets
            return self._step + (self._next > 0)

    def _begin_step(self) -> None:
        self._step += 1
        self._next = 0

    def _reduce_next(self) -> None:
        with self._changed:
            while self._next not in self._launched:  # until the graph launches the bucket
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            index, call = self._next, self._call(self._next, self._step)
            buffer, nonfinite = self._launched.pop(index)
            self._is_reducing = True
        plan = self.buckets[index]
        begin_s = time.monotonic()
        wire_format = self._format_of(plan)
        # [G4] the ring, while backward computes the next buckets
        if index in self._scattered:
            is_finite = self._reduce_scatter(plan, buffer, call, wire_format)
        else:
            self.communicator.all_reduce_in_place(buffer, ReduceOp.SUM, call, wire_format)
            is_finite = not buffer[-1] or all_finite(buffer)  # scanned unless all flags are 0
        end_s = time.monotonic()
        self.nonfinite_check.check(
            call,
            is_finite,
            lambda: nonfinite,
            lambda: self._find_in_sums(index, buffer),
            None if wire_format is None else wire_format.name,
        )
        with self._changed:
            self._reduced[index] = buffer
            self._is_reducing = False
            self._progress_s = time.monotonic()
            self.stats.ring(index, begin_s, end_s)
            self._next += 1
            if self._next == len(self.buckets):
                self._begin_step()
            self._changed.notify_all()

    def _reduce_scatter(
        self, plan: Bucket, buffer: Array, call: CollectiveCall, wire_format: WireFormat | None
    ) -> bool:
        """Sums a bucket, of which this rank gets its chunk; True if all sums are finite."""
        assert self._flags is not None
        self._flags.start(float(buffer[-1]))  # travels at the same time
        self.communicator.reduce_scatter_in_place(buffer, call, wire_format)
        if not self._flags.wait()[0]:
            return True
        chunk = plan.chunks[self.communicator.rank]
        self._flags.start(float(not all_finite(buffer[chunk])))
        return not self._flags.wait()[0]

    def _find_in_sums(self, index: int, buffer: Array) -> dict[str, str]:
        plan = self.buckets[index]
        if index in self._scattered:
            self._whole.all_gather_in_place(buffer, self._calls[index].name)
        return find_nonfinite(plan.names, plan.views(buffer))

    def _limit(self, bucket: Bucket) -> float:
        """Largest magnitude of a gradient whose sum must be finite, in memory and on the wire."""
        wire_format = self._format_of(bucket) or no_compression(bucket.dtype)
        dtypes = bucket.dtype, wire_format.dtype
        return min(safe_limit(dtype, self.communicator.size) for dtype in dtypes)

    def _never_launched(self, bucket: int) -> CollectiveTimeoutError:
        rank = self.communicator.rank
        return CollectiveTimeoutError(
            f"rank {rank} waited for {self._calls[bucket].name}, and no bucket was launched or "
            "reduced meanwhile. A gradient of an earlier bucket was never computed: check whether "
            "the accelerator still works",
            rank=rank,
            bucket=bucket,
        )


AnyReducer = Union[BucketReducer, FusedExchange]


def open_reducer(
    communicator: Communicator,
    buckets: Sequence[Bucket],
    check: NonFiniteCheck | None = None,
    wire_format: WireFormat | None = None,
) -> Reducer | InlineReducer:
    """Opens a reducer of gradient buckets on a new channel. Collective: all ranks must call it.

    The defaults are those of the options `nonfinite` and `compression`.
    """
    check = check or NonFiniteCheck(communicator)
    if communicator.on_one_host:
        return InlineReducer(communicator, buckets, check)
    return Reducer(communicator, buckets, check, wire_format)
