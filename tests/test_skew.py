"""Slow ranks and slow links are named, and nobody else is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import Spawn

from hostopt.bucket import TensorSpec, plan_buckets
from hostopt.communicator import Communicator
from hostopt.reducer import Reducer
from hostopt.skew import Skew, SkewReports, is_slow_link, lag
from hostopt.step_stats import StepTimes

BUCKETS = plan_buckets([TensorSpec(name, (100,), np.dtype(np.float32)) for name in "ab"], 400)


def test_how_much_longer_the_others_wait() -> None:
    assert lag([5.0, 1.0]) == 4.0
    assert lag([5.0, 7.0, 1.0]) == 5.0
    assert lag([5.0, 6.0, 1.0, 90.0]) == 5.0
    assert lag([3.0, 3.0, 3.0]) == 0.0


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
def test_a_link_is_slow_where_the_others_are_not(sends_ms: list[float], is_slow: bool) -> None:
    assert is_slow_link(sends_ms, elapsed_ms=1000.0) == is_slow


def train(communicator: Communicator, pause: Callable[[], Any], steps: int) -> list[Skew]:
    """Steps of two buckets, each after a pause, with a report after every fifth."""
    reducer = Reducer(communicator.duplicate("gradients"), BUCKETS)
    reports, found = SkewReports(communicator.duplicate("reports")), []
    communicator.barrier()
    reports.begin(100)
    for step in range(101, 101 + steps):
        pause()
        for bucket in range(2):
            reducer.launch(bucket, [np.ones(100, np.float32)])
        for bucket in range(2):
            reducer.wait(bucket)
        found.append(reports.collect())
        if step % 5 == 0:
            assert reducer.last_times is not None
            reports.send(step, reducer.last_times)
    found.append(reports.collect())
    reducer.close()
    return [skew for skew in found if skew is not None]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "hostopt.skew"]


@pytest.mark.parametrize("slow", [0, 2])
def test_a_rank_ten_times_as_slow_is_named_and_not_lost(
    spawn: Spawn, caplog: pytest.LogCaptureFixture, slow: int
) -> None:
    def work(communicator: Communicator) -> list[Skew]:
        pause_s = 0.05 if communicator.rank == slow else 0.005
        return train(communicator, lambda: time.sleep(pause_s), steps=20)

    with caplog.at_level(logging.WARNING):
        found, *others = spawn(3, work)
    assert others == [[], []]
    assert [skew.slowest_rank for skew in found] == [slow] * 4
    assert all(skew.skew_ms > 5 for skew in found)
    (warning,) = warnings_of(caplog)  # at the second report, and no more
    assert warning.startswith("step 110: the others wait ")
    assert f"for rank {slow} (" in warning


def test_ranks_that_are_alike_are_not_named(
    spawn: Spawn, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found, *_ = spawn(3, lambda c: train(c, lambda: time.sleep(0.02), steps=20))
    assert len(found) == 4
    assert not warnings_of(caplog)


def test_hosts_whose_ranks_share_memory_send_through_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(communicator: Communicator) -> None:
        reports = SkewReports(communicator)
        # ranks 0 and 2 lead their hosts, and the network is as fast for both
        busy_s = {0: 30.0, 1: 0.0, 2: 29.0, 3: 0.0}[communicator.rank]
        for step in range(1, 5):
            sent_s = busy_s * step
            monkeypatch.setattr(communicator.transport, "sending_s", lambda s=sent_s: s)
            reports.send(step, StepTimes(step, 0.0, 0.0, 1.0, 0.0, 0.0, float(step)))
            reports.collect()

    with caplog.at_level(logging.WARNING):
        Spawn("hosts")(4, work)
    assert not warnings_of(caplog)


def test_a_link_is_named(
    spawn_inproc: Spawn, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(communicator: Communicator) -> list[Skew]:
        reports, found = SkewReports(communicator), []
        busy_s = {0: 0.001, 1: 30.0, 2: 0.002}[communicator.rank]
        monkeypatch.setattr(communicator.transport, "sending_s", lambda: busy_s * step)
        for step in range(1, 5):
            reports.send(step, StepTimes(step, 0.0, 0.0, 1.0, 0.0, 0.0, float(step)))
            found.append(reports.collect())
        return found

    with caplog.at_level(logging.WARNING):
        found, *_ = spawn_inproc(3, work)
    assert [skew.slowest_link for skew in found] == [1] * 4
    (warning,) = warnings_of(caplog)
    assert "step 2: the link from rank 1 (worker:1, inproc:1) to rank 2 (worker:2" in warning
