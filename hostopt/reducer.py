"""Buckets on their way: `launch` hands one over and returns, `wait` hands it back reduced.

The numbers are those of the way of a gradient in docs/architecture.md.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

import numpy as np

from hostopt.bucket import Bucket, BufferPool, title
from hostopt.communicator import Communicator, ReduceOp
from hostopt.compression import WireFormat, new_wire_format
from hostopt.errors import CollectiveTimeoutError, ConfigError, PeerLostError
from hostopt.finite import all_finite, safe_limit, troubles
from hostopt.nonfinite import NonFiniteCheck
from hostopt.record import BucketRecord
from hostopt.ring import Array, Operation
from hostopt.step_stats import StepTimes
from hostopt.transport.signature import Signature, signature_of

__all__: list[str] = []


class Reducer:
    """Sums buckets over the ranks, in bucket order on every rank.

    Behind its gradients each rank sends a mark: 0 where they are so small that the sum is finite
    for certain. Where the sum of the marks is 0 nobody has to look at that of the gradients.

    A communication thread hands them on one by one, and the network hides behind backward. Where
    all ranks share memory, `InlineReducer` takes its place.

    Buckets of float32 travel as the option `compression` says, others as they are.

    Each step launches every bucket once and waits for every bucket once, from any thread and in
    any order.

    Args:
      communicator: a communicator of its own (a `duplicate`).
      buckets: the fusion plan, the same on all ranks.
      check: what follows where sums are not finite; by default what the option says.
    """

    def __init__(
        self,
        communicator: Communicator,
        buckets: Sequence[Bucket],
        check: NonFiniteCheck | None = None,
    ) -> None:
        self.communicator = communicator
        self.check = check or NonFiniteCheck(communicator)
        self._buckets = tuple(buckets)
        self._pools = [BufferPool(bucket) for bucket in buckets]
        self._wire_format = new_wire_format(communicator.transport.options.compression)
        self._first_step = 0
        self._limits = [self._limit(bucket) for bucket in buckets]
        self._titles = [title(self._buckets, index) for index in range(len(self._buckets))]
        self._signatures = [self._signature(index) for index in range(len(self._buckets))]
        self._under_way: set[int] = set()  # from launch to wait
        self._launched: dict[int, tuple[Array, dict[str, str]]] = {}
        self._reduced: dict[int, Array] = {}
        self._record = BucketRecord(self._buckets, communicator.transport.timeline)
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._in_ring = False
        self._progress_s = time.monotonic()
        self._stop_listening = communicator.transport.mailbox.on_failure(self._fail)
        self._thread = threading.Thread(target=self._run, daemon=True, name="hostopt-reducer")
        self._thread.start()

    @property
    def last_times(self) -> StepTimes | None:
        """What was measured in the last step whose buckets have all been awaited."""
        return self._record.stats.last

    def count_from(self, step: int) -> None:
        """Number the steps from here, in messages and errors; before the first launch.

        Args:
          step: number of the first step, the same on all ranks.
        """
        self._first_step = step

    def launch(self, bucket: int, arrays: Sequence[Array]) -> None:
        """Start the reduction of a bucket; returns at once.

        Args:
          bucket: index of the bucket.
          arrays: its gradients, in packing order; they may be freed once this returns.

        Raises:
          HostOptError: the ring has failed.
        """
        begin_s = time.monotonic()
        with self._changed:
            if self._error is not None:
                raise self._error
            if bucket in self._under_way:
                raise ConfigError(
                    f"bucket {bucket} ({self._buckets[bucket].what}) was launched twice in one "
                    "step. Run the training operation once in each session.run",
                    bucket=bucket,
                )
            self._under_way.add(bucket)
            buffer = self._pools[bucket].take()
        plan = self._buckets[bucket]
        certain = plan.pack(arrays, buffer, self._limits[bucket])  # 3. into the flat buffer
        # the ring writes over what this rank has: so find out before whether it is to blame
        own = {} if certain else troubles(plan.names, arrays)
        buffer[-1] = 0 if certain else 1
        with self._changed:
            self._launched[bucket] = buffer, own
            self._progress_s = time.monotonic()
            self._record.launched(bucket, begin_s, self._progress_s)
            self._changed.notify_all()

    def wait(self, bucket: int) -> list[Array]:
        """Wait until a launched bucket is reduced.

        Args:
          bucket: index of the bucket.

        Returns:
          Its reduced gradients, in packing order; views of a buffer that is not used again
          while they live.

        Raises:
          NonFiniteGradientError: sums are not finite, and that is an error.
          HostOptError: a rank failed, left or timed out.
        """
        begin_s = time.monotonic()
        with self._changed:
            while bucket not in self._reduced:
                self._wait_for_progress(bucket)
            buffer = self._reduced.pop(bucket)
            self._under_way.discard(bucket)
            self._record.waited(bucket, begin_s, time.monotonic())
        return self._buckets[bucket].views(buffer)  # 5. back to the graph

    def close(self) -> None:
        """End the communication thread once its current bucket is done, and free the buffers."""
        self._fail(PeerLostError("this reducer is closed", rank=self.communicator.rank))
        self._stop_listening()
        self._thread.join(self.communicator.transport.options.collective_timeout_s)
        self._pools.clear()

    def _run(self) -> None:
        try:
            for step in itertools.count():
                for index in range(len(self._buckets)):
                    self._reduce(step, index)
        except BaseException as error:
            if self._error is None:
                self.communicator.abort(error)
            self._fail(error)

    def _wait_for_progress(self, bucket: int) -> None:
        """Wait for a launch or the end of a reduction; the ring has deadlines of its own."""
        if self._error is not None:
            raise self._error
        timeout_s = self.communicator.transport.options.collective_timeout_s
        left_s = self._progress_s + timeout_s - time.monotonic()
        if left_s <= 0 and not self._in_ring:
            raise self._never_launched(bucket)
        self._changed.wait(None if self._in_ring else left_s)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _reduce(self, step: int, index: int) -> None:
        with self._changed:
            while index not in self._launched:  # idle until the graph launches the next bucket
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            buffer, own = self._launched.pop(index)
            self._in_ring = True
        begin_s = time.monotonic()
        step += self._first_step
        name, signature = self._titles[index], self._signatures[index]
        operation = Operation(self.communicator.channel, step, index, name, signature)
        # 4. the ring, while backward goes on
        wire_format = self._format_of(buffer.dtype)
        self.communicator.all_reduce_in_place(buffer, ReduceOp.SUM, operation, wire_format)
        end_s = time.monotonic()
        plan = self._buckets[index]
        self.check.look(
            operation,
            not buffer[-1] or all_finite(buffer),  # certain for all ranks, or looked at
            lambda: own,
            lambda: troubles(plan.names, plan.views(buffer)),
            None if wire_format is None else wire_format.name,
        )
        with self._changed:
            self._reduced[index] = buffer
            self._in_ring = False
            self._progress_s = time.monotonic()
            self._record.ring(index, begin_s, end_s)
            self._changed.notify_all()

    def _format_of(self, dtype: np.dtype[np.generic]) -> WireFormat | None:
        return self._wire_format if dtype == np.float32 else None

    def _signature(self, index: int) -> Signature:
        bucket, wire_format = self._buckets[index], self._format_of(self._buckets[index].dtype)
        travels_as = "" if wire_format is None else wire_format.name
        shape = (bucket.nbytes // bucket.dtype.itemsize,)
        return signature_of(
            "all_reduce(sum)", self._titles[index], bucket.dtype, shape, travels_as
        )

    def _limit(self, bucket: Bucket) -> float:
        """How large gradients may be whose sum needs no look, in the ring and on the wire."""
        dtypes = [bucket.dtype]
        wire_format = self._format_of(bucket.dtype)
        if wire_format is not None:
            dtypes.append(wire_format.dtype)
        return min(safe_limit(dtype, self.communicator.size) for dtype in dtypes)

    def _never_launched(self, bucket: int) -> CollectiveTimeoutError:
        rank = self.communicator.rank
        return CollectiveTimeoutError(
            f"rank {rank} waited for {title(self._buckets, bucket)}, and no bucket was launched "
            "or reduced meanwhile. A gradient of an earlier bucket was never computed: look "
            "whether the accelerator still works",
            rank=rank,
            bucket=bucket,
        )
