"""Times of each bucket, for the step statistics and the timeline."""

from __future__ import annotations

from collections.abc import Sequence

from hostopt.gradients.bucket import Bucket, describe_bucket
from hostopt.gradients.step_stats import StepStats
from hostopt.telemetry.timeline import Timeline, Track


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
