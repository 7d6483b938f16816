"""All ranks name the rank that is stuck, even if they wait for another one."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest
from harness import deadline_s
from rings import Spawn

from hostopt.cluster import Cluster
from hostopt.communicator import Communicator
from hostopt.errors import CollectiveTimeoutError
from hostopt.transport import event_loop
from hostopt.transport.stall import find_culprit


def short() -> dict[str, float]:
    """Returns options that also suit the collectives which succeed."""
    return {"stall_warning_s": deadline_s(0.3), "collective_timeout_s": deadline_s(1.0)}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stuck", [0, 1])
def test_all_ranks_blame_the_stuck_rank(
    spawn: Spawn, caplog: pytest.LogCaptureFixture, size: int, stuck: int
) -> None:
    finished = threading.Barrier(size)

    def work(communicator: Communicator) -> CollectiveTimeoutError | None:
        gradients = communicator.duplicate("gradients")
        gradients.all_reduce(np.ones(9), name="the first")
        if communicator.rank == stuck:
            finished.wait(30)
            return None
        with pytest.raises(CollectiveTimeoutError) as caught:
            gradients.all_reduce(np.ones(9), name="the second")
        finished.wait(30)
        return caught.value

    options = short()
    with caplog.at_level(logging.WARNING):
        errors = [error for error in spawn(size, work, **options) if error is not None]
    assert len(errors) == size - 1
    for error in errors:
        assert (error.rank, error.step) == (stuck, 1)
        assert "the second (" in str(error)  # and the phase
        assert "is in no collective; its last was the first" in str(error)
        assert f"collective_timeout_s ({options['collective_timeout_s']:g} s)" in str(error)
    assert len({error.root_cause for error in errors}) == 1
    assert f"rank {stuck} (" in str(errors[0].root_cause)
    messages = [record.getMessage() for record in caplog.records]
    warnings = [line for line in messages if " for the second " in line]  # the first may be slow
    assert {int(line.split()[1]) for line in warnings} == set(range(size)) - {stuck}
    assert all(f"rank {stuck} (" in line.partition(": ")[2] for line in warnings)


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


def test_ranks_that_wait_for_each_other(spawn: Spawn) -> None:
    def work(communicator: Communicator) -> CollectiveTimeoutError:
        both = [communicator.duplicate("odd"), communicator.duplicate("even")]
        with pytest.raises(CollectiveTimeoutError) as caught:
            both[communicator.rank % 2].all_reduce(np.ones(9))
        return caught.value

    for error in spawn(2, work, **short()):
        assert "they wait for each other, in different collectives" in str(error)
        assert "odd" in str(error)
        assert "even" in str(error)


def test_a_long_wait_that_succeeds(spawn: Spawn, caplog: pytest.LogCaptureFixture) -> None:
    warned = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.set()

    def work(communicator: Communicator) -> float:
        communicator.barrier()
        if communicator.rank == 1:
            assert warned.wait(30)
        return float(communicator.all_reduce(np.ones(9))[0])

    logger, watch = logging.getLogger("hostopt.transport.base"), Watch()
    logger.addHandler(watch)
    try:
        assert spawn(3, work, stall_warning_s=0.2, collective_timeout_s=30.0) == [3.0] * 3
    finally:
        logger.removeHandler(watch)


def test_no_warning_without_long_waits(spawn: Spawn, caplog: pytest.LogCaptureFixture) -> None:
    def work(communicator: Communicator) -> None:
        for _ in range(50):
            communicator.all_reduce(np.ones(1000))

    with caplog.at_level(logging.WARNING):
        spawn(3, work, stall_warning_s=5.0, collective_timeout_s=10.0)
    assert not [r for r in caplog.records if r.name.startswith("hostopt")]
