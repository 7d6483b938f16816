"""Halving and doubling of 4 and 8 ranks: the defined sums, in few messages, over any streams."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.collectives.pairs import MEDIUM_BYTES
from hostopt.errors import CollectiveMismatchError

SIZES = [4, 8]


def values(rank: int, length: int) -> Any:
    random = np.random.default_rng([rank, length])
    return (random.standard_normal(length) * 10.0 ** (rank % 4)).astype(np.float32)


def reference(size: int, length: int) -> Any:
    """Adds the second half of the ranks to the first, then again of these, and so on."""
    sums = [values(rank, length) for rank in range(size)]
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [a + b for a, b in zip(sums[:half], sums[half:])]
    return sums[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("streams", [1, 3])
def test_sums_have_the_defined_bits(spawn_inproc: Spawn, size: int, streams: int) -> None:
    def work(communicator: Communicator) -> None:
        communicator.transport.streams = streams
        for length in (17, 20, 1001, 4096):
            expected = reference(size, length)
            own = np.array_split(expected, size)[communicator.rank]
            local = values(communicator.rank, length)
            np.testing.assert_array_equal(communicator.all_reduce(local), expected)
            np.testing.assert_array_equal(communicator.reduce_scatter(local), own)
            rows = communicator.all_gather(local)
            for rank, row in enumerate(rows):
                np.testing.assert_array_equal(row, values(rank, length))

    spawn_inproc(size, work, segment_bytes=64)


@pytest.mark.parametrize("length", [0, 1, 3, 17, 20_000])
def test_chunks_have_the_bits_of_an_all_reduce(spawn_inproc: Spawn, length: int) -> None:
    def work(communicator: Communicator) -> None:
        flat = values(communicator.rank, 4 * length)
        expected = communicator.all_reduce(flat)
        communicator.reduce_scatter_in_place(flat, communicator.next_call())
        communicator.all_gather_in_place(flat)
        np.testing.assert_array_equal(flat, expected)

    spawn_inproc(4, work)


@pytest.mark.parametrize("size", SIZES)
def test_it_sends_the_least_bytes_in_few_messages(spawn_inproc: Spawn, size: int) -> None:
    def work(communicator: Communicator) -> None:
        traffic = communicator.transport.traffic
        before = traffic.messages, traffic.payload_bytes
        total = communicator.all_reduce(np.ones(MEDIUM_BYTES // 4, np.float32))
        assert (total == size).all()
        assert traffic.messages - before[0] == 2 * math.log2(size)
        assert traffic.payload_bytes - before[1] == 2 * (size - 1) * MEDIUM_BYTES // size

    spawn_inproc(size, work, segment_bytes=MEDIUM_BYTES)


def test_more_goes_over_the_ring(spawn_inproc: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        total = communicator.all_reduce(np.ones(MEDIUM_BYTES // 4 + 1, np.float32))
        assert (total == 4).all()
        assert communicator.transport.traffic.messages >= 2 * 3

    spawn_inproc(4, work)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_with_other_numbers_of_streams_are_refused(spawn_inproc: Spawn, size: int) -> None:
    """They agree on the number when they connect; if they did not, sums would be wrong."""

    def work(communicator: Communicator) -> None:
        communicator.transport.streams = 1 + communicator.rank % 2
        with pytest.raises(CollectiveMismatchError):
            communicator.all_reduce(np.ones(1000))

    spawn_inproc(size, work, segment_bytes=64)
