"""Slow ranks and slow links are named; equal ones are not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from clocks import Clock
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.gradients import reducer as reducers
from hostopt.gradients.bucket import TensorSpec, plan_buckets
from hostopt.gradients.nonfinite import NonFiniteCheck
from hostopt.gradients.reducer import Reducer
from hostopt.gradients.step_stats import StepTimes
from hostopt.measure import stragglers
from hostopt.measure.stragglers import StragglerReports, Stragglers, is_slow_link, straggler_lag

BUCKETS = plan_buckets([TensorSpec(name, (100,), np.dtype(np.float32)) for name in "ab"], 400)


def test_straggler_lag() -> None:
    assert straggler_lag([5.0, 1.0]) == 4.0
    assert straggler_lag([5.0, 7.0, 1.0]) == 5.0
    assert straggler_lag([5.0, 6.0, 1.0, 90.0]) == 5.0
    assert straggler_lag([3.0, 3.0, 3.0]) == 0.0


@pytest.mark.parametrize(
    ("sends_ms", "is_slow"),
    [
        ([10.0, 500.0, 12.0], True),
        ([500.0, 10.0], True),
        ([500.0, 480.0], False),  # a network that is slow for all
        ([500.0, 400.0, 510.0], False),
        ([1.0, 100.0, 2.0], False),  # a tenth of the time
        ([0.0, 0.0], False),
    ],
)
def test_is_slow_link(sends_ms: list[float], is_slow: bool) -> None:
    assert is_slow_link(sends_ms, elapsed_ms=1000.0) == is_slow


def train(communicator: Communicator, pause: Callable[[], Any], steps: int) -> list[Stragglers]:
    """Trains steps of two buckets, each after a pause, with a report every five steps."""
    reducer = Reducer(communicator, BUCKETS, NonFiniteCheck(communicator))
    reports, result = StragglerReports(communicator.duplicate("reports")), []
    communicator.barrier()
    reports.begin(100)
    for step in range(101, 101 + steps):
        pause()
        for bucket in range(2):
            reducer.launch(bucket, [np.ones(100, np.float32)])
        for bucket in range(2):
            reducer.wait(bucket)
        result.append(reports.collect())
        if step % 5 == 0:
            assert reducer.stats.last is not None
            reports.send(step, reducer.stats.last)
    result.append(reports.collect())
    reducer.close()
    return [report for report in result if report is not None]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "hostopt.measure.stragglers"]


@pytest.fixture
def clock(clock: Clock) -> Clock:
    clock.govern(reducers, stragglers)
    return clock


@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_rank_is_named_and_not_lost(
    spawn: Spawn,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    slow: int,
) -> None:
    computed = threading.Barrier(3, action=lambda: clock.advance(10.0))
    wait_for_progress, seen = Reducer._wait_for_progress, set()

    def wait_in_vain(waiting: Reducer, bucket: int) -> None:
        """Waits until the slow rank has computed, once in each step."""
        step = waiting.communicator.rank, waiting._step
        if step not in seen and waiting.communicator.rank != slow:
            seen.add(step)
            computed.wait(30)
        wait_for_progress(waiting, bucket)

    monkeypatch.setattr(Reducer, "_wait_for_progress", wait_in_vain)

    def work(communicator: Communicator) -> list[Stragglers]:
        is_slow = communicator.rank == slow
        return train(communicator, lambda: is_slow and computed.wait(30), steps=20)

    with caplog.at_level(logging.WARNING):
        result, *others = spawn(3, work)
    assert others == [[], []]
    assert [report.slowest_rank for report in result] == [slow] * 4
    assert all(report.skew_ms > 5 for report in result)
    (warning,) = warnings_of(caplog)  # at the second report, and no more
    assert warning.startswith("step 110: the others wait ")
    assert f"for rank {slow} (" in warning


def test_equal_ranks_are_not_named(
    spawn: Spawn, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    computed = threading.Barrier(3, action=lambda: clock.advance(10.0))
    with caplog.at_level(logging.WARNING):
        result, *_ = spawn(3, lambda c: train(c, lambda: computed.wait(30), steps=20))
    assert len(result) == 4
    assert not warnings_of(caplog)


def test_only_host_leaders_are_compared_as_senders(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(communicator: Communicator) -> None:
        reports = StragglerReports(communicator)
        # ranks 0 and 2 lead their hosts, and the network is as fast for both
        busy_s = {0: 30.0, 1: 0.0, 2: 29.0, 3: 0.0}[communicator.rank]
        for step in range(1, 5):
            sent_s = busy_s * step
            monkeypatch.setattr(communicator.transport, "send_time_s", lambda s=sent_s: s)
            reports.send(step, StepTimes(step, 0.0, 0.0, 0.0, 0.0, float(step)))
            reports.collect()

    with caplog.at_level(logging.WARNING):
        Spawn("hosts")(4, work)
    assert not warnings_of(caplog)


def test_a_slow_link_is_named(
    spawn_inproc: Spawn, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(communicator: Communicator) -> list[Stragglers]:
        reports, result = StragglerReports(communicator), []
        busy_s = {0: 0.001, 1: 30.0, 2: 0.002}[communicator.rank]
        monkeypatch.setattr(communicator.transport, "send_time_s", lambda: busy_s * step)
        for step in range(1, 5):
            reports.send(step, StepTimes(step, 0.0, 0.0, 0.0, 0.0, float(step)))
            result.append(reports.collect())
        return result

    with caplog.at_level(logging.WARNING):
        result, *_ = spawn_inproc(3, work)
    assert [report.slowest_link for report in result] == [1] * 4
    (warning,) = warnings_of(caplog)
    assert "step 2: the link from rank 1 (worker:1, inproc:1) to rank 2 (worker:2" in warning
