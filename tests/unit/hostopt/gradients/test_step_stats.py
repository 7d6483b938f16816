"""StepStats: overlap of communication with backward, in literal numbers."""

from __future__ import annotations

import pytest
from threads import in_threads

from hostopt.gradients.step_stats import StepStats, StepTimes, merge, slowest_rank


def test_an_overlapped_and_an_exposed_bucket() -> None:
    #   s      1.0    1.1    1.2    1.3    1.4    1.5
    #   launch [0]          [1]
    #   ring       [---- 0 ----------] [-- 1 ------]
    stats = StepStats(2)
    assert stats.launched(0, 1.0) == 0
    assert stats.launched(1, 1.2) == 0
    assert stats.ring(0, 1.0, 1.3) == 0
    assert stats.last is None
    assert stats.waited(0, 1.0, 1.3) == 0
    stats.ring(1, 1.3, 1.5)
    assert stats.last is None
    stats.waited(1, 1.3, 1.6)
    times = stats.last
    assert times is not None
    assert times.step == 0
    assert times.communication_ms == pytest.approx(500)
    assert times.exposed_ms == pytest.approx(300)  # 1.2 to 1.3 of bucket 0, all of bucket 1
    assert times.total_wait_ms == pytest.approx(600)
    assert times.overlap_percent == pytest.approx(40)
    assert (times.last_launch_s, times.first_return_s) == (1.2, 1.3)


@pytest.mark.parametrize(
    ("ring_s", "percent"),
    [((1.0, 2.0), 100.0), ((3.0, 4.0), 0.0), ((2.0, 4.0), 50.0), ((2.5, 2.5), 100.0)],
    ids=["all before the last launch", "all after it", "half", "no time at all"],
)
def test_overlap_percent(ring_s: tuple[float, float], percent: float) -> None:
    stats = StepStats(2)
    stats.launched(0, 1.0)
    stats.launched(1, 3.0)
    stats.ring(0, *ring_s)
    stats.ring(1, 3.0, 3.0)
    stats.waited(0, 5.0, 5.0)
    stats.waited(1, 5.0, 5.0)
    assert stats.last is not None
    assert stats.last.overlap_percent == pytest.approx(percent)


def test_steps_may_overlap() -> None:
    stats = StepStats(2)
    for step in range(3):  # bucket 0 is always a step ahead
        assert stats.launched(0, step) == step
        stats.ring(0, step, step + 0.25)
        assert stats.waited(0, step, step) == step
    assert stats.last is None
    for step in range(3):
        assert stats.launched(1, step + 0.5) == step
        stats.ring(1, step + 0.5, step + 0.625)
        stats.waited(1, step, step)
        assert stats.last is not None
        assert stats.last.step == step
        assert stats.last.communication_ms == 375.0
        assert stats.last.exposed_ms == 125.0


def test_a_step_without_its_last_bucket_has_no_times() -> None:
    stats = StepStats(2)
    stats.launched(0, 1.0)
    stats.ring(0, 1.0, 1.5)
    stats.waited(0, 1.0, 1.5)
    stats.end_step()
    for bucket in range(2):
        assert stats.launched(bucket, 2.0) == 1
        assert stats.ring(bucket, 2.0, 2.5) == 1
        assert stats.waited(bucket, 2.0, 2.5) == 1
    assert stats.last is not None
    assert (stats.last.step, stats.last.communication_ms) == (1, pytest.approx(1000))


def test_calls_from_several_threads() -> None:
    stats, steps = StepStats(4), 500

    def feed(bucket: int) -> None:
        for _ in range(steps):
            stats.launched(bucket, 0.0)
            stats.ring(bucket, 0.0, 1.0)
            stats.waited(bucket, 0.0, 1.0)

    in_threads(feed, range(4))
    assert stats.last == StepTimes(steps - 1, 4000.0, 4000.0, 0.0, 1.0, steps * 4000.0)


def test_merge_of_several_reducers() -> None:
    first = StepTimes(7, 10.0, 1.0, 1.5, 1.25, 100.0)
    second = StepTimes(7, 30.0, 3.0, 1.25, 1.75, 200.0)
    assert merge([first, second]) == StepTimes(7, 40.0, 4.0, 1.5, 1.25, 300.0)
    assert merge([first]) == first
    assert merge([first, second]).overlap_percent == pytest.approx(90)


def test_the_rank_that_waits_least_is_the_slowest() -> None:
    assert slowest_rank([3.0, 0.5, 2.0]) == 1
    assert slowest_rank([1.0, 1.0]) == 0
