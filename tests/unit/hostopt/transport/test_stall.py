"""All ranks name the rank that is stuck, even if they wait for another one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from clocks import Clock, until_blocked
from harness import until
from rings import Spawn

from hostopt.cluster.cluster import Cluster
from hostopt.collectives.communicator import Communicator
from hostopt.errors import CollectiveMismatchError, CollectiveTimeoutError, HostOptError
from hostopt.transport import event_loop
from hostopt.transport.stall import find_culprit

WARNING_S, TIMEOUT_S = 30.0, 300.0
SECONDS = {"stall_warning_s": WARNING_S, "collective_timeout_s": TIMEOUT_S}


@pytest.fixture(autouse=True)
def governed(clock: Clock) -> None:
    clock.govern_waits()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stuck", [0, 1])
def test_all_ranks_blame_the_stuck_rank(
    spawn: Spawn, clock: Clock, caplog: pytest.LogCaptureFixture, size: int, stuck: int
) -> None:
    ring: list[Communicator] = []
    finished = threading.Barrier(size)

    def warnings() -> dict[int, str]:
        messages = [record.getMessage() for record in caplog.records]
        return {int(line.split()[1]): line for line in messages if " for the second " in line}

    def stand_still(communicator: Communicator) -> None:
        others = until_blocked(ring, communicator)
        clock.advance(WARNING_S, *others)
        until(lambda: len(warnings()) == size - 1, "warnings")
        waits = {each: each.transport.mailbox.waits()[0] for each in others}
        indirect = [each for each, wait in waits.items() if wait.peer != stuck]
        clock.advance(TIMEOUT_S - WARNING_S, *(indirect or others))
        finished.wait(30)

    def work(communicator: Communicator) -> CollectiveTimeoutError | None:
        ring.append(communicator)
        gradients = communicator.duplicate("gradients")
        gradients.all_reduce(np.ones(9), name="the first")
        if communicator.rank == stuck:
            return stand_still(communicator)
        with pytest.raises(CollectiveTimeoutError) as caught:
            gradients.all_reduce(np.ones(9), name="the second")
        finished.wait(30)
        return caught.value

    with caplog.at_level(logging.WARNING):
        errors = [error for error in spawn(size, work, **SECONDS) if error is not None]
    assert len(errors) == size - 1
    for error in errors:
        assert (error.rank, error.step) == (stuck, 1)
        assert "the second (" in str(error)  # and the phase
        assert "is in no collective; its last was the first" in str(error)
        assert "collective_timeout_s (300 s)" in str(error)
    assert len({error.root_cause for error in errors}) == 1
    assert f"rank {stuck} (" in str(errors[0].root_cause)
    assert warnings().keys() == set(range(size)) - {stuck}
    assert all(f"rank {stuck} (" in line.partition(": ")[2] for line in warnings().values())


def test_ranks_that_wait_in_the_same_collective() -> None:
    """As over MPI, if its network stops."""
    cluster = Cluster.from_dict({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "worker", 0)
    tag = [7, 5, 0, 0, 0, 0, 1]

    async def request_status(peer: int, waiting: int, _: Any) -> dict[str, Any]:
        wait = {"peer": waiting, "what": "bread", "tag": tag, "for_s": 1.0}
        return {"error": None, "waits": [wait], "sends": [], "last": None, "sent": False}

    culprit = event_loop.run(find_culprit(cluster, 1, tag, request_status))
    assert culprit.text == (
        "rank 1 waits for rank 0 in bread: they wait for each other, in the same collective, and "
        "the network makes no progress"
    )


def waiting_in_different_calls(
    ring: list[Communicator], error: type[HostOptError]
) -> Callable[[Communicator], str]:
    """Returns the work of two ranks that wait for each other, which returns their errors."""
    met = threading.Barrier(2)

    def work(communicator: Communicator) -> str:
        ring.append(communicator)
        both = [communicator.duplicate("odd"), communicator.duplicate("even")]
        met.wait(30)
        with pytest.raises(error) as caught:
            both[communicator.rank % 2].all_reduce(np.ones(9))
        return str(caught.value)

    return work


def test_ranks_that_wait_for_each_other(spawn: Spawn, clock: Clock) -> None:
    ring: list[Communicator] = []
    work = waiting_in_different_calls(ring, CollectiveTimeoutError)
    with ThreadPoolExecutor() as threads:
        errors = threads.submit(spawn, 2, work, **SECONDS)
        until(lambda: len(ring) == 2, "ring")
        clock.advance(TIMEOUT_S, *until_blocked(ring))
    for text in errors.result():
        assert "they wait for each other, in different collectives" in text
        assert "odd" in text
        assert "even" in text


def test_ranks_that_wait_for_each_other_fail_before_the_deadline(
    spawn: Spawn, clock: Clock
) -> None:
    ring: list[Communicator] = []
    work = waiting_in_different_calls(ring, CollectiveMismatchError)
    with ThreadPoolExecutor() as threads:
        errors = threads.submit(spawn, 2, work, **SECONDS)
        until(lambda: len(ring) == 2, "ring")
        (first,) = (each.transport for each in ring if each.rank == 0)
        clock.advance(2.0, *until_blocked(ring))
        until(lambda: first._deadlocks._last is not None, "look")
        clock.advance(20.0, *until_blocked(ring))  # the tests beside this one take time, too
    (text,) = {*errors.result()}
    for part in ["rank 0", "rank 1", "odd", "even", "none of them can continue"]:
        assert part in text


def test_a_long_wait_that_succeeds(
    spawn: Spawn, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ring: list[Communicator] = []

    def work(communicator: Communicator) -> float:
        ring.append(communicator)
        communicator.barrier()
        if communicator.rank == 1:
            clock.advance(WARNING_S, *until_blocked(ring, communicator))
            until(lambda: "hostopt.transport.base" in {r.name for r in caplog.records}, "warning")
        return float(communicator.all_reduce(np.ones(9))[0])

    with caplog.at_level(logging.WARNING):
        assert spawn(3, work, **SECONDS) == [3.0] * 3


def test_no_warning_without_long_waits(
    spawn: Spawn, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ring: list[Communicator] = []

    def work(communicator: Communicator) -> None:
        ring.append(communicator)
        communicator.barrier()
        for _ in range(3):
            if communicator.rank == 1:
                clock.advance(0.9 * WARNING_S, *until_blocked(ring, communicator))
            communicator.all_reduce(np.ones(1000))

    with caplog.at_level(logging.WARNING):
        spawn(3, work, **SECONDS)
    assert not [r for r in caplog.records if r.name.startswith("hostopt")]
