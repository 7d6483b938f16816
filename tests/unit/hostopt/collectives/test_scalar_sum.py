"""Non-blocking sums of scalars: results, no wait at the start, and missing ranks."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.errors import HostOptError, PeerLostError


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_gets_the_same_sum(spawn: Spawn, size: int) -> None:
    def work(communicator: Communicator) -> list[bytes]:
        scalar_sum = communicator.open_scalar_sum("the loss")
        sums = []
        for step in range(20):
            scalar_sum.start(0.1 * (communicator.rank + 1) + step, step * communicator.rank)
            communicator.all_reduce(np.ones(10))
            sums.append(scalar_sum.wait())
        assert [second for _, second in sums] == [step * sum(range(size)) for step in range(20)]
        return [total.tobytes() for total, _ in sums]

    first, *others = spawn(size, work)
    numbers = np.frombuffer(b"".join(first), np.float32)
    expected = [sum(0.1 * (rank + 1) + step for rank in range(size)) for step in range(20)]
    np.testing.assert_allclose(numbers, expected, rtol=1e-6)
    assert all(other == first for other in others)


def test_start_does_not_block(spawn: Spawn) -> None:
    posted_alone = threading.Event()

    def work(communicator: Communicator) -> tuple[np.float32, np.float32]:
        scalar_sum = communicator.open_scalar_sum("the loss")
        if communicator.rank == 1:
            assert posted_alone.wait(30)
        scalar_sum.start(communicator.rank + 1.0)
        if communicator.rank == 0:
            posted_alone.set()
        return scalar_sum.wait()

    assert spawn(2, work) == [(3.0, 0.0), (3.0, 0.0)]


def test_a_rank_that_leaves_without_starting(spawn: Spawn) -> None:
    def work(communicator: Communicator) -> HostOptError | None:
        scalar_sum = communicator.open_scalar_sum("the loss")
        communicator.barrier()
        if communicator.rank == 1:
            return None
        scalar_sum.start(1.0)
        with pytest.raises(PeerLostError, match=r"rank 1 .*the loss") as caught:
            scalar_sum.wait()
        return caught.value

    error, _ = spawn(2, work)
    assert error is not None
    assert error.rank == 1
