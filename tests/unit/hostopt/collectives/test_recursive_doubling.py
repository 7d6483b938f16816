"""Recursive doubling: small all-reduces on any number of ranks, the same bits on all of them."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.collectives.pairs import SMALL_BYTES
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import CollectiveMismatchError

SIZES = range(3, 10)


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("size", SIZES)
def test_results(spawn_inproc: Spawn, size: int, op: ReduceOp) -> None:
    inputs = [np.random.default_rng(rank).integers(1, 9, 100) * 1.0 for rank in range(size)]
    expected = functools.reduce(op.ufunc, inputs) / (size if op is ReduceOp.AVERAGE else 1)

    def work(communicator: Communicator) -> np.ndarray:
        return communicator.all_reduce(inputs[communicator.rank], op)

    for result in spawn_inproc(size, work):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_get_the_same_bits(spawn_inproc: Spawn, size: int) -> None:
    """Also of sums that depend on the order, and of NaNs whose bits differ between the ranks."""

    def work(communicator: Communicator) -> bytes:
        values = np.random.default_rng(communicator.rank).normal(size=1000).astype(np.float32)
        values[:10].view(np.uint32)[:] = 0x7FC0_0000 + communicator.rank
        values[10:20] = (-1) ** communicator.rank * 0.0
        return communicator.all_reduce(values).tobytes()

    first, *others = spawn_inproc(size, work)
    assert all(other == first for other in others)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("nbytes", "is_small"), [(0, True), (SMALL_BYTES, True), (SMALL_BYTES + 4, False)]
)
def test_number_of_messages(spawn_inproc: Spawn, size: int, nbytes: int, is_small: bool) -> None:
    def work(communicator: Communicator) -> int:
        before = communicator.transport.traffic.messages
        total = communicator.all_reduce(np.ones(nbytes // 4, np.float32))
        assert (total == size).all()
        return communicator.transport.traffic.messages - before

    messages = spawn_inproc(size, work)
    if is_small:
        assert max(messages) <= math.floor(math.log2(size)) + 1
    elif size in (4, 8):  # see collectives.pairs
        assert {*messages} == {2 * math.log2(size)}
    else:
        assert min(messages) >= 2 * (size - 1)


def test_more_than_a_segment_goes_over_the_ring(spawn_inproc: Spawn) -> None:
    def work(communicator: Communicator) -> int:
        communicator.all_reduce(np.ones(1000, np.float32))
        return communicator.transport.traffic.messages

    assert min(spawn_inproc(4, work, segment_bytes=1024)) >= 2 * 3


def test_ranks_connect_to_those_that_are_not_their_neighbours(spawn_tcp: Spawn) -> None:
    def work(communicator: Communicator) -> set[int]:
        for step in range(20):
            total = communicator.all_reduce(np.arange(1000.0) + communicator.rank + step)
            assert total[-1] == 4 * (999 + step) + 6
        return {peer for peer, _ in communicator.transport._streams._streams}

    assert spawn_tcp(4, work) == [{1, 2}, {2, 0, 3}, {3, 0}, {0, 2, 1}]


@pytest.mark.parametrize("size", [3, 4, 7])
def test_ranks_that_make_other_calls_are_named(spawn_inproc: Spawn, size: int) -> None:
    def work(communicator: Communicator) -> str:
        length = 10 if communicator.rank < size - 1 else 11
        with pytest.raises(CollectiveMismatchError) as caught:
            communicator.all_reduce(np.ones(length))
        return str(caught.value)

    for message in spawn_inproc(size, work):
        assert f"rank {size - 1}" in message
        assert "float64[11]" in message
