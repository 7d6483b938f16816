"""Communication time of a step, and the part of it that overlaps with backward."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class StepTimes(NamedTuple):
    """Communication times of one rank in one step."""

    step: int  # from 0
    communication_ms: float  # in the ring, summed over the buckets
    exposed_ms: float  # the part of it after the last launch, when backward is done
    last_launch_s: float  # when the last launch returned, on this rank's monotonic clock
    first_return_s: float  # when the first wait returned, on the same clock
    total_wait_ms: float  # in `wait`, summed over the buckets of all steps so far

    @property
    def overlap_percent(self) -> float:
        """Share of the communication that is not exposed; 100 if there was no communication."""
        if not self.communication_ms:
            return 100.0
        return 100.0 * (1.0 - self.exposed_ms / self.communication_ms)


def merge(times: Sequence[StepTimes]) -> StepTimes:
    """Merges the times of one or more reducers in the same step."""
    return StepTimes(
        times[0].step,
        sum(each.communication_ms for each in times),
        sum(each.exposed_ms for each in times),
        max(each.last_launch_s for each in times),
        min(each.first_return_s for each in times),
        sum(each.total_wait_ms for each in times),
    )


def slowest_rank(waits_ms: Sequence[float]) -> int:
    """Returns the rank whose buckets arrive last. The others are ready, so it waits least."""
    return min(range(len(waits_ms)), key=lambda rank: waits_ms[rank])


@dataclass
class _Step:
    launched_s: dict[int, float] = field(default_factory=dict)
    ring_s: dict[int, tuple[float, float]] = field(default_factory=dict)
    wait_s: dict[int, tuple[float, float]] = field(default_factory=dict)

    def times(self, step: int, earlier_waits_ms: float) -> StepTimes:
        wait_ms = 1e3 * sum(end - begin for begin, end in self.wait_s.values())
        last_launch_s = max(self.launched_s.values())
        rings = self.ring_s.values()
        exposed_s = sum(max(end - max(begin, last_launch_s), 0.0) for begin, end in rings)
        return StepTimes(
            step,
            1e3 * sum(end - begin for begin, end in rings),
            1e3 * exposed_s,
            last_launch_s,
            min(end for _, end in self.wait_s.values()),
            earlier_waits_ms + wait_ms,
        )


class StepStats:
    """Collects the times of the buckets of each step; thread-safe.

    A step is complete when all its buckets have been waited for. The first launch of a bucket
    belongs to step 0, with its ring and its wait. The next launch, which belongs to step 1, comes
    after that wait. A step that leaves out buckets has no times.
    """

    def __init__(self, buckets: int) -> None:
        self._counts = [0] * buckets  # complete steps of each bucket
        self._steps: dict[int, _Step] = {}
        self._lock = threading.Lock()
        self.last: StepTimes | None = None  # of the last complete step

    def launched(self, bucket: int, at_s: float) -> int:
        """Records a launch; returns the number of the step, from 0."""
        with self._lock:
            step, times = self._current(bucket)
            times.launched_s[bucket] = at_s
            return step

    def ring(self, bucket: int, begin_s: float, end_s: float) -> int:
        """Records a ring all-reduce. Call it before `waited` of the same bucket."""
        with self._lock:
            step, times = self._current(bucket)
            times.ring_s[bucket] = begin_s, end_s
            return step

    def waited(self, bucket: int, begin_s: float, end_s: float) -> int:
        """Records a wait; returns the number of the step, from 0."""
        with self._lock:
            step, times = self._current(bucket)
            times.wait_s[bucket] = begin_s, end_s
            self._counts[bucket] += 1
            if len(times.wait_s) == len(self._counts):
                earlier_waits_ms = self.last.total_wait_ms if self.last else 0.0
                self.last = self._steps.pop(step).times(step, earlier_waits_ms)
            return step

    def end_step(self) -> None:
        """Ends the last step, whose remaining buckets are left out."""
        with self._lock:
            self._steps.clear()
            # a bucket that is not left out has made this many steps
            self._counts[:] = [max(self._counts)] * len(self._counts)

    def _current(self, bucket: int) -> tuple[int, _Step]:
        step = self._counts[bucket]
        return step, self._steps.setdefault(step, _Step())
