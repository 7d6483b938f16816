"""Buckets that are reduced at once, where all ranks share memory and nothing travels.

Handing a bucket to a thread and waiting for it would cost more than the copying that it hides.
The sums lie in memory that all ranks of the host read; none has a copy of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from hostopt.bucket import Bucket, BufferPool, title
from hostopt.communicator import Communicator, ReduceOp
from hostopt.finite import all_finite, troubles
from hostopt.lane import Source
from hostopt.nonfinite import NonFiniteCheck
from hostopt.record import BucketRecord
from hostopt.ring import Array, Operation
from hostopt.shared_sums import SharedSums
from hostopt.step_stats import StepTimes
from hostopt.transport.signature import Signature, signature_of

__all__: list[str] = []


class InlineReducer:
    """Sums buckets over the ranks of one host, in the thread that brings them.

    Each step reduces every bucket once, in bucket order.

    Args:
      communicator: a communicator of its own (a `duplicate`), of ranks on one host.
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
        self._shared = [SharedSums(communicator, bucket) for bucket in buckets]
        self._pools = [BufferPool(bucket) for bucket in buckets]
        self._steps = [0] * len(self._buckets)
        self._titles = [title(self._buckets, index) for index in range(len(self._buckets))]
        self._signatures = [self._signature(index) for index in range(len(self._buckets))]
        self._record = BucketRecord(self._buckets, communicator.transport.timeline)
        self._lock = threading.Lock()

    @property
    def last_times(self) -> StepTimes | None:
        """What was measured in the last step; a bucket is launched when its reduction begins."""
        return self._record.stats.last

    def count_from(self, step: int) -> None:
        """Number the steps from here, in errors; before the first reduction.

        Args:
          step: number of the first step, the same on all ranks.
        """
        self._steps = [step] * len(self._buckets)

    def reduce(self, bucket: int, arrays: Sequence[Array]) -> list[Array]:
        """Sum a bucket over the ranks.

        Args:
          bucket: index of the bucket.
          arrays: its gradients, in packing order; they are only read.

        Returns:
          Its reduced gradients, in packing order; views of memory that is not used again while
          they live on any rank. Other ranks read it too: they are not writeable.

        Raises:
          NonFiniteGradientError: the sums are not finite, and that is an error.
          HostOptError: a rank failed, left or timed out.
        """
        plan = self._buckets[bucket]
        begin_s = time.monotonic()
        with self._lock:
            what, signature = self._titles[bucket], self._signatures[bucket]
            step = self._steps[bucket]
            operation = Operation(self.communicator.channel, step, bucket, what, signature)
            self.communicator.begin(operation)
            self._steps[bucket] += 1
            source = Source([array.reshape(-1) for array in arrays], plan.starts)
            sums, finite = self._sum(bucket, source, operation)
            views = plan.views(sums)
            end_s = time.monotonic()
            self._record.launched(bucket, begin_s, begin_s)
            self._record.ring(bucket, begin_s, end_s)
            self._record.waited(bucket, begin_s, end_s)
            self.check.look(
                operation,
                finite,
                lambda: troubles(plan.names, arrays),
                lambda: troubles(plan.names, views),
            )
        return views

    def _signature(self, index: int) -> Signature:
        bucket = self._buckets[index]
        shape = (bucket.nbytes // bucket.dtype.itemsize,)
        return signature_of("all_reduce(sum)", self._titles[index], bucket.dtype, shape)

    def _sum(self, bucket: int, source: Source, operation: Operation) -> tuple[Array, bool]:
        shared = self._shared[bucket].reduce(source, operation)
        if shared is not None:
            return shared
        sums = self._pools[bucket].take()  # no more memory to share
        self.communicator.all_reduce_in_place(sums, ReduceOp.SUM, operation, source=source)
        return sums, all_finite(sums)

    def close(self) -> None:
        """Free the buffers."""
        self._pools.clear()
        self._shared.clear()
