"""What a reducer notes of each bucket: into the statistics always, into a timeline if one is."""

from __future__ import annotations

from collections.abc import Sequence

from hostopt.bucket import Bucket, title
from hostopt.step_stats import StepStats
from hostopt.timeline import Timeline, Track

__all__: list[str] = []


class BucketRecord:
    """Takes the times of launches, rings and waits, from any thread.

    Args:
      buckets: the fusion plan.
      timeline: where spans go, or None.
    """

    def __init__(self, buckets: Sequence[Bucket], timeline: Timeline | None) -> None:
        self.stats = StepStats(len(buckets))
        self._buckets = buckets
        self._timeline = timeline

    def launched(self, bucket: int, begin_s: float, end_s: float) -> None:
        """Note when a launch began and returned."""
        step = self.stats.launched(bucket, end_s)
        self._show(Track.LAUNCH, step, bucket, begin_s, end_s)

    def ring(self, bucket: int, begin_s: float, end_s: float) -> None:
        """Note when a bucket was in the ring, which shows its messages by itself."""
        self.stats.ring(bucket, begin_s, end_s)

    def waited(self, bucket: int, begin_s: float, end_s: float) -> None:
        """Note when a wait began and returned; after its bucket's ring."""
        step = self.stats.waited(bucket, begin_s, end_s)
        self._show(Track.WAIT, step, bucket, begin_s, end_s)

    def _show(self, track: Track, step: int, bucket: int, begin_s: float, end_s: float) -> None:
        if self._timeline is not None:
            nbytes, name = self._buckets[bucket].nbytes, title(self._buckets, bucket)
            self._timeline.span(
                track, name, begin_s, end_s, step=step, bucket=bucket, bytes=nbytes
            )
