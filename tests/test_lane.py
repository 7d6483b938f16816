"""Reduction in shared memory: the bits that its definition says, block by block."""

from __future__ import annotations

import mmap
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import Spawn

from hostopt import lane as lane_module
from hostopt.communicator import Communicator
from hostopt.errors import CollectiveMismatchError, HostOptError, PeerLostError
from hostopt.lane import Lane, Source, lane_bytes
from hostopt.ring import Operation
from hostopt.transport.signature import signature_of

BLOCK_BYTES = 4096
LENGTHS = [0, 1, 2, 7, 1024, 1025, 2047, 2049, 5000]  # of float32: up to five blocks


def lanes_of(size: int) -> Any:
    """Function that gives each rank its side of one piece of memory."""
    memory = mmap.mmap(-1, lane_bytes(size, BLOCK_BYTES))

    def lane(communicator: Communicator) -> Lane:
        members = tuple(range(size))
        return Lane(memoryview(memory), members, BLOCK_BYTES, communicator.transport)

    return lane


def values(rank: int, length: int, dtype: Any = np.float32) -> Any:
    # magnitudes that differ, so that the order of additions shows in the bits
    random = np.random.default_rng([rank, length])
    return (random.standard_normal(length) * 10.0 ** random.integers(0, 4, length)).astype(dtype)


def operation(step: int, what: str = "") -> Operation:
    return Operation(1, step, what=what)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, ml_dtypes.bfloat16])
def test_sums_are_made_in_rank_order(spawn_inproc: Spawn, size: int, dtype: Any) -> None:
    lane_of = lanes_of(size)

    def work(communicator: Communicator) -> None:
        lane = lane_of(communicator)
        for step, length in enumerate(LENGTHS):
            mine = values(communicator.rank, length, dtype)
            wanted = reduce(np.add, [values(rank, length, dtype) for rank in range(size)])
            lane.all_reduce(mine, np.add, operation(step))
            np.testing.assert_array_equal(mine, wanted, strict=True)

    spawn_inproc(size, work)


@pytest.mark.parametrize("combine", [np.minimum, np.maximum])
def test_least_and_greatest(spawn_inproc: Spawn, combine: np.ufunc) -> None:
    lane_of = lanes_of(3)

    def work(communicator: Communicator) -> None:
        mine = values(communicator.rank, 3000)
        lane_of(communicator).all_reduce(mine, combine, operation(0))
        wanted = reduce(combine, [values(rank, 3000) for rank in range(3)])
        np.testing.assert_array_equal(mine, wanted)

    spawn_inproc(3, work)


@pytest.mark.parametrize("size", [2, 3])
def test_reductions_and_broadcasts_in_turn(spawn_inproc: Spawn, size: int) -> None:
    lane_of = lanes_of(size)

    def work(communicator: Communicator) -> None:
        lane = lane_of(communicator)
        for step in range(40):
            length, root = LENGTHS[step % len(LENGTHS)], step % size
            mine = values(communicator.rank, length)
            lane.broadcast(mine, root, operation(2 * step))
            np.testing.assert_array_equal(mine, values(root, length))
            mine = values(communicator.rank, length)
            lane.all_reduce(mine, np.add, operation(2 * step + 1))
            wanted = reduce(np.add, [values(rank, length) for rank in range(size)])
            np.testing.assert_array_equal(mine, wanted)

    spawn_inproc(size, work)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("other", [np.ones(9, np.float32), np.ones(10, np.int32)])
def test_arrays_that_differ_between_ranks(spawn_inproc: Spawn, size: int, other: Any) -> None:
    lane_of = lanes_of(size)

    def work(communicator: Communicator) -> str:
        mine = other if communicator.rank == 1 else np.ones(10, np.float32)
        signature = signature_of("all_reduce(sum)", "bread", mine.dtype, mine.shape)
        call = Operation(1, 0, 0, "bread", signature)
        communicator.begin(call)
        with pytest.raises(CollectiveMismatchError) as caught:
            lane_of(communicator).all_reduce(mine, np.add, call)
        return str(caught.value)

    (text,) = {*spawn_inproc(size, work)}
    assert "rank 0 (worker:0, inproc:0) calls all_reduce(sum) of 'bread' float32[10]" in text
    assert f"calls all_reduce(sum) of 'bread' {other.dtype.name}[{other.size}] at step 0" in text


def test_byte_strings_where_another_rank_reduces(spawn_inproc: Spawn) -> None:
    lane_of = lanes_of(2)

    def work(communicator: Communicator) -> str:
        kind = "all_gather_bytes" if communicator.rank else "all_reduce(sum)"
        call = Operation(1, 0, 0, "bread", signature_of(kind, "bread"))
        communicator.begin(call)
        lane = lane_of(communicator)
        with pytest.raises(CollectiveMismatchError) as caught:
            if communicator.rank:
                lane.all_gather_bytes(memoryview(b"flour"), call)
            else:
                lane.all_reduce(np.ones(9), np.add, call)
        return str(caught.value)

    (text,) = {*spawn_inproc(2, work)}
    assert "rank 1 (worker:1, inproc:1) calls all_gather_bytes of 'bread' at step 0" in text


def test_a_thread_does_not_spin_beside_another(
    spawn_inproc: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane_of = lanes_of(2)
    monkeypatch.setattr(lane_module, "_SPINS", 1 << 60)  # whoever spins sees no peer leave

    def work(communicator: Communicator) -> None:
        lane = lane_of(communicator)
        if communicator.rank == 0:
            lane.all_reduce(np.ones(10), np.add, operation(0, "the bread"))

    with lane_module._spinning, pytest.raises(PeerLostError, match="waited for the bread"):
        spawn_inproc(2, work)


def test_a_rank_that_waits_in_vain_says_for_whom(spawn_inproc: Spawn) -> None:
    lane_of = lanes_of(2)

    def work(communicator: Communicator) -> HostOptError | None:
        lane = lane_of(communicator)
        if communicator.rank == 1:
            return None
        with pytest.raises(HostOptError) as caught:
            lane.all_reduce(np.ones(10), np.add, operation(3, "the bread"))
        return caught.value

    error, _ = spawn_inproc(2, work)
    assert isinstance(error, PeerLostError)
    assert "rank 1 (worker:1, inproc:1) is gone at step 3" in str(error)
    assert "waited for the bread" in str(error)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_posted_words_reach_all_ranks_in_rank_order(spawn_inproc: Spawn, size: int) -> None:
    lane_of = lanes_of(size)

    def work(communicator: Communicator) -> None:
        lane, rank = lane_of(communicator), communicator.rank
        for step in range(50):
            lane.post(step, (1 << 63) + 100 * step + rank)
            mine = np.full(3, rank, np.float32)
            lane.all_reduce(mine, np.add, operation(step))  # a rank that is late posts late
            wanted = [(1 << 63) + 100 * step + other for other in range(size)]
            assert lane.collect(operation(step, "the words")) == wanted

    spawn_inproc(size, work)


def test_a_word_that_is_never_posted(spawn_inproc: Spawn) -> None:
    lane_of = lanes_of(2)

    def work(communicator: Communicator) -> None:
        lane = lane_of(communicator)
        if communicator.rank == 1:
            communicator.transport.close()
            return
        lane.post(0, 1)
        lane.collect(operation(0, "the bread"))

    with pytest.raises(PeerLostError, match=r"rank 1 .* is gone .* waited for the bread"):
        spawn_inproc(2, work)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_byte_strings_of_all_lengths(spawn_inproc: Spawn, size: int) -> None:
    lane_of = lanes_of(size)
    room = BLOCK_BYTES - 8  # of the first block
    lengths = [0, 1, 7, room - 1, room, room + 1, room + BLOCK_BYTES, room + 3 * BLOCK_BYTES + 1]

    def text(rank: int, step: int) -> bytes:
        length = lengths[(3 * rank + step) % len(lengths)]
        return np.random.default_rng([rank, step]).integers(0, 256, length, np.uint8).tobytes()

    def work(communicator: Communicator) -> None:
        lane = lane_of(communicator)
        for step in range(0, 40, 2):
            mine = memoryview(text(communicator.rank, step))
            wanted = [text(rank, step) for rank in range(size)]
            assert lane.all_gather_bytes(mine, operation(step)) == wanted
            array = values(communicator.rank, 1500)
            lane.all_reduce(array, np.add, operation(step + 1))
            sums = reduce(np.add, [values(rank, 1500) for rank in range(size)])
            np.testing.assert_array_equal(array, sums)

    spawn_inproc(size, work)


@pytest.mark.parametrize("size", [2, 3])
def test_a_source_of_several_arrays(spawn_inproc: Spawn, size: int) -> None:
    lane_of = lanes_of(size)
    lengths, starts = [5, 1, 3000, 7], [0, 16, 32, 3040]  # gaps between them, and three blocks

    def parts(rank: int) -> list[Any]:
        return [values(rank, length) for length in lengths]

    def work(communicator: Communicator) -> None:
        lane, flat = lane_of(communicator), np.zeros(3056, np.float32)
        lane.all_reduce(flat, np.add, operation(0), Source(parts(communicator.rank), starts))
        wanted = np.zeros(3056, np.float32)
        for number, (start, length) in enumerate(zip(starts, lengths)):
            sums = reduce(np.add, [parts(rank)[number] for rank in range(size)])
            wanted[start : start + length] = sums
        np.testing.assert_array_equal(flat, wanted)

    spawn_inproc(size, work)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, ml_dtypes.bfloat16])
def test_shared_sums_are_made_in_rank_order(spawn_inproc: Spawn, size: int, dtype: Any) -> None:
    lane_of = lanes_of(size)
    places = [np.zeros(length, dtype) for length in LENGTHS]  # all threads share them

    def work(communicator: Communicator) -> None:
        lane = lane_of(communicator)
        for step, (length, sums) in enumerate(zip(LENGTHS, places)):
            mine = values(communicator.rank, length, dtype)
            lane.reduce_scatter(sums, np.add, operation(step), Source([mine], [0]))
            wanted = reduce(np.add, [values(rank, length, dtype) for rank in range(size)])
            np.testing.assert_array_equal(sums, wanted, strict=True)

    spawn_inproc(size, work)


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_agree_on_flags(spawn_inproc: Spawn, size: int) -> None:
    lane_of = lanes_of(size)
    offers = [[0b1101, 0b0111, 0b1111], [0, 1, 3], [1 << 63, 1 << 63 | 1, 1 << 63]]

    def work(communicator: Communicator) -> None:
        lane, sums = lane_of(communicator), np.zeros(3, np.float32)
        for step, offer in enumerate(offers * 20):
            agreed = lane.agree(offer[communicator.rank], operation(step))
            assert agreed == reduce(int.__and__, offer[:size])
            lane.reduce_scatter(np.array(sums), np.add, operation(step), Source([sums], [0]))

    spawn_inproc(size, work)
