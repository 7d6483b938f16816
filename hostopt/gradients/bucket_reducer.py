"""Base class of the reducers of gradient buckets."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np

from hostopt.collectives.call import Array
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.wire_format import WireFormat
from hostopt.gradients.bucket import Bucket, BufferPool, describe_bucket
from hostopt.gradients.nonfinite import NonFiniteCheck
from hostopt.gradients.step_stats import StepStats, StepTimes
from hostopt.telemetry.timeline import Timeline, Track
from hostopt.transport.signature import Signature, signature_of


class BucketReducer(abc.ABC):
    """Sums the gradient buckets of each step over the ranks, on a separate channel.

    Args:
      communicator: communicator on which all ranks create their reducers in the same order.
      wire_format: format of float32 values between hosts; None sends them unchanged.
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
        self._buckets = tuple(buckets)
        self._wire_format = wire_format
        self._first_step = 0
        self._pools = [BufferPool(bucket) for bucket in self._buckets]
        self._descriptions = [
            describe_bucket(self._buckets, index) for index in range(len(self._buckets))
        ]
        self._signatures = [self._signature(index) for index in range(len(self._buckets))]
        self._timing = BucketTiming(self._buckets, communicator.transport.timeline)

    @property
    def last_times(self) -> StepTimes | None:
        """Times of the last complete step; None if there is none yet."""
        return self._timing.stats.last

    def count_from(self, step: int) -> None:
        """Sets the number of the first step, the same on all ranks, before any reduction."""
        self._first_step = step

    def zeros(self, bucket: int) -> list[Array]:
        """Returns gradients of zeros for a bucket, for a rank that has no gradients."""
        return self._buckets[bucket].zeros()

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

    def _format_of(self, bucket: Bucket) -> WireFormat | None:
        return self._wire_format if bucket.dtype == np.float32 else None

    def _signature(self, index: int) -> Signature:
        bucket = self._buckets[index]
        wire_format = self._format_of(bucket)
        format_name = "" if wire_format is None else wire_format.name
        shape = (bucket.nbytes // bucket.dtype.itemsize,)
        return signature_of(
            "all_reduce(sum)", self._descriptions[index], bucket.dtype, shape, format_name
        )


# -- times of buckets ------------------------------------------------------------------------

# Times of each bucket, for the step statistics and the timeline.


class BucketTiming:
    """Records the times of launches, ring all-reduces and waits; thread-safe.

    Args:
      buckets: all buckets of a step.
      timeline: records the spans; None for no timeline.
    """

    def __init__(self, buckets: Sequence[Bucket], timeline: Timeline | None) -> None:
        self.stats = StepStats(len(buckets))
        self._buckets = buckets
        self._timeline = timeline

    def launched(self, bucket: int, begin_s: float, end_s: float) -> None:
        """Records the begin and end of a launch."""
        step = self.stats.launched(bucket, end_s)
        self._add_span(Track.LAUNCH, step, bucket, begin_s, end_s)

    def ring(self, bucket: int, begin_s: float, end_s: float) -> None:
        """Records the begin and end of a ring all-reduce, which adds its own spans."""
        self.stats.ring(bucket, begin_s, end_s)

    def waited(self, bucket: int, begin_s: float, end_s: float) -> None:
        """Records the begin and end of a wait. Call it after `ring` of the same bucket."""
        step = self.stats.waited(bucket, begin_s, end_s)
        self._add_span(Track.WAIT, step, bucket, begin_s, end_s)

    def end_step(self) -> None:
        """Ends the last step, whose remaining buckets are left out."""
        self.stats.end_step()

    def _add_span(
        self, track: Track, step: int, bucket: int, begin_s: float, end_s: float
    ) -> None:
        if self._timeline is not None:
            nbytes, name = self._buckets[bucket].nbytes, describe_bucket(self._buckets, bucket)
            self._timeline.span(
                track, name, begin_s, end_s, step=step, bucket=bucket, bytes=nbytes
            )
