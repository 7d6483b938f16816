"""How much of a step's communication hides behind its backward pass."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__: list[str] = []


class StepTimes(NamedTuple):
    """What one rank measured in one step.

    Args:
      step: number of the step, from 0.
      communication_ms: sum over the buckets of the time in the ring.
      exposed_ms: the part of it that lies after the last launch, that is after backward.
      wait_ms: sum over the buckets of the time in `wait`.
      last_launch_s: when the last launch returned, on this rank's clock.
      first_return_s: when the first wait returned, on this rank's clock.
      total_wait_ms: sum of `wait_ms` over all steps so far.
    """

    step: int
    communication_ms: float
    exposed_ms: float
    wait_ms: float
    last_launch_s: float
    first_return_s: float
    total_wait_ms: float

    @property
    def overlap_percent(self) -> float:
        """The part of the communication that is not exposed; 100 where there is none at all."""
        if not self.communication_ms:
            return 100.0
        return 100.0 * (1.0 - self.exposed_ms / self.communication_ms)


def together(times: Sequence[StepTimes]) -> StepTimes:
    """Join what several reducers measured in the same step.

    Args:
      times: the times of each reducer, of one at least.

    Returns:
      The sums, the last launch of all and the first return of all.
    """
    return StepTimes(
        times[0].step,
        sum(each.communication_ms for each in times),
        sum(each.exposed_ms for each in times),
        sum(each.wait_ms for each in times),
        max(each.last_launch_s for each in times),
        min(each.first_return_s for each in times),
        sum(each.total_wait_ms for each in times),
    )


def slowest_rank(waits_ms: Sequence[float]) -> int:
    """The rank whose buckets arrive last: it finds all others ready, so it waits least.

    Args:
      waits_ms: `StepTimes.wait_ms` of each rank, in rank order.

    Returns:
      A rank; the first of several that wait equally long.
    """
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
            wait_ms,
            last_launch_s,
            min(end for _, end in self.wait_s.values()),
            earlier_waits_ms + wait_ms,
        )


class StepStats:
    """Collects the times of each bucket until a step is complete; may be fed from any thread.

    A step is complete when all its buckets have been awaited. The first launch of a bucket
    belongs to step 0, the second to step 1, and so on; likewise its rings and waits.

    Args:
      buckets: number of buckets of a step.
    """

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._launches = [0] * buckets
        self._rings = [0] * buckets
        self._waits = [0] * buckets
        self._steps: dict[int, _Step] = {}
        self._lock = threading.Lock()
        self._last: StepTimes | None = None

    @property
    def last(self) -> StepTimes | None:
        """The last complete step; None before there is one."""
        return self._last

    def launched(self, bucket: int, at_s: float) -> int:
        """Note that a bucket was handed over.

        Args:
          bucket: index of the bucket.
          at_s: when its launch returned.

        Returns:
          The step to which this belongs.
        """
        with self._lock:
            step = self._next(self._launches, bucket)
            self._steps.setdefault(step, _Step()).launched_s[bucket] = at_s
            return step

    def ring(self, bucket: int, begin_s: float, end_s: float) -> int:
        """Note when a bucket was in the ring; before its wait returns.

        Args:
          bucket: index of the bucket.
          begin_s: when its first message was sent.
          end_s: when it was reduced.

        Returns:
          The step to which this belongs.
        """
        with self._lock:
            step = self._next(self._rings, bucket)
            self._steps.setdefault(step, _Step()).ring_s[bucket] = begin_s, end_s
            return step

    def waited(self, bucket: int, begin_s: float, end_s: float) -> int:
        """Note when a bucket was waited for.

        Args:
          bucket: index of the bucket.
          begin_s: when the wait began.
          end_s: when it returned.

        Returns:
          The step to which this belongs.
        """
        with self._lock:
            step = self._next(self._waits, bucket)
            found = self._steps.setdefault(step, _Step())
            found.wait_s[bucket] = begin_s, end_s
            if len(found.wait_s) == self._buckets:
                earlier_waits_ms = self._last.total_wait_ms if self._last else 0.0
                self._last = self._steps.pop(step).times(step, earlier_waits_ms)
            return step

    def _next(self, counts: list[int], bucket: int) -> int:
        counts[bucket] += 1
        return counts[bucket] - 1
