"""Collectives in shared memory: results bit by bit."""

from __future__ import annotations

import mmap
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives.call import CollectiveCall
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.sequence_counters import counters_bytes
from hostopt.collectives.shared_memory import (
    SharedMemoryChannel,
    StagingBuffers,
    TensorListView,
    channel_bytes,
)
from hostopt.errors import CollectiveMismatchError, PeerLostError
from hostopt.transport.message import signature_of

BLOCK_BYTES = 4096
LENGTHS = [0, 1, 2, 7, 1024, 1025, 2047, 2049, 5000]  # of float32: up to five blocks
ARRAYS = [np.arange(3.0), np.arange(10.0, 11.0), np.arange(20.0, 24.0)]
STARTS = [0, 4, 8]  # gaps at 3, 5, 6 and 7
FLAT = np.array([0, 1, 2, -1, 10, -1, -1, -1, 20, 21, 22, 23, -1])


def shared_channel(size: int) -> Any:
    """Returns a function that opens the same memory on each rank."""
    memory = mmap.mmap(-1, channel_bytes(size, BLOCK_BYTES))

    def open_(communicator: Communicator) -> SharedMemoryChannel:
        members = tuple(range(size))
        return SharedMemoryChannel(
            memoryview(memory), members, BLOCK_BYTES, communicator.transport
        )

    return open_


def values(rank: int, length: int, dtype: Any = np.float32) -> Any:
    # magnitudes that differ, so that the order of additions shows in the bits
    random = np.random.default_rng([rank, length])
    return (random.standard_normal(length) * 10.0 ** random.integers(0, 4, length)).astype(dtype)


def call(step: int, name: str = "") -> CollectiveCall:
    return CollectiveCall(1, step, name=name)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, ml_dtypes.bfloat16])
def test_all_reduce_adds_in_rank_order(spawn_inproc: Spawn, size: int, dtype: Any) -> None:
    open_channel = shared_channel(size)

    def work(communicator: Communicator) -> None:
        channel = open_channel(communicator)
        for step, length in enumerate(LENGTHS):
            local = values(communicator.rank, length, dtype)
            expected = reduce(np.add, [values(rank, length, dtype) for rank in range(size)])
            channel.all_reduce(local, np.add, call(step))
            np.testing.assert_array_equal(local, expected, strict=True)

    spawn_inproc(size, work)


@pytest.mark.parametrize("op", [np.minimum, np.maximum])
def test_minimum_and_maximum(spawn_inproc: Spawn, op: np.ufunc) -> None:
    open_channel = shared_channel(3)

    def work(communicator: Communicator) -> None:
        local = values(communicator.rank, 3000)
        open_channel(communicator).all_reduce(local, op, call(0))
        expected = reduce(op, [values(rank, 3000) for rank in range(3)])
        np.testing.assert_array_equal(local, expected)

    spawn_inproc(3, work)


@pytest.mark.parametrize("size", [2, 3])
def test_alternating_reductions_and_broadcasts(spawn_inproc: Spawn, size: int) -> None:
    open_channel = shared_channel(size)

    def work(communicator: Communicator) -> None:
        channel = open_channel(communicator)
        for step in range(40):
            length, root = LENGTHS[step % len(LENGTHS)], step % size
            local = values(communicator.rank, length)
            channel.broadcast(local, root, call(2 * step))
            np.testing.assert_array_equal(local, values(root, length))
            local = values(communicator.rank, length)
            channel.all_reduce(local, np.add, call(2 * step + 1))
            expected = reduce(np.add, [values(rank, length) for rank in range(size)])
            np.testing.assert_array_equal(local, expected)

    spawn_inproc(size, work)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("other", [np.ones(9, np.float32), np.ones(10, np.int32)])
def test_arrays_that_do_not_match(spawn_inproc: Spawn, size: int, other: Any) -> None:
    open_channel = shared_channel(size)

    def work(communicator: Communicator) -> str:
        local = other if communicator.rank == 1 else np.ones(10, np.float32)
        signature = signature_of("all_reduce(sum)", "bread", local.dtype, local.shape)
        mismatched = CollectiveCall(1, 0, 0, "bread", signature)
        communicator.begin(mismatched)
        with pytest.raises(CollectiveMismatchError) as caught:
            open_channel(communicator).all_reduce(local, np.add, mismatched)
        return str(caught.value)

    (text,) = {*spawn_inproc(size, work)}
    assert "rank 0 (worker:0, inproc:0) calls all_reduce(sum) of 'bread' float32[10]" in text
    assert f"calls all_reduce(sum) of 'bread' {other.dtype.name}[{other.size}] at step 0" in text


def test_an_interrupted_call_aborts_the_ring(spawn_inproc: Spawn) -> None:
    open_channel = shared_channel(2)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def work(communicator: Communicator) -> str:
        channel, local = open_channel(communicator), np.ones(9, np.float32)
        if communicator.rank == 1:
            with pytest.raises(KeyboardInterrupt):
                channel.all_reduce(local, interrupt, call(0))
        else:
            channel.all_reduce(local, np.add, call(0))
        with pytest.raises(PeerLostError) as caught:  # else it would read values of call 0
            for step in range(1, 3):
                channel.all_reduce(local, np.add, call(step))
        return str(caught.value)

    (text,) = {*spawn_inproc(2, work)}
    assert (
        text == "rank 1 (worker:1, inproc:1) stopped with an error. Root cause: KeyboardInterrupt"
    )


def test_byte_strings_on_one_rank_and_a_reduction_on_another(spawn_inproc: Spawn) -> None:
    open_channel = shared_channel(2)

    def work(communicator: Communicator) -> str:
        kind = "all_gather_bytes" if communicator.rank else "all_reduce(sum)"
        mismatched = CollectiveCall(1, 0, 0, "bread", signature_of(kind, "bread"))
        communicator.begin(mismatched)
        channel = open_channel(communicator)
        with pytest.raises(CollectiveMismatchError) as caught:
            if communicator.rank:
                channel.all_gather_bytes(memoryview(b"flour"), mismatched)
            else:
                channel.all_reduce(np.ones(9), np.add, mismatched)
        return str(caught.value)

    (text,) = {*spawn_inproc(2, work)}
    assert "rank 1 (worker:1, inproc:1) calls all_gather_bytes of 'bread' at step 0" in text


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_byte_strings_of_all_lengths(spawn_inproc: Spawn, size: int) -> None:
    open_channel = shared_channel(size)
    room = BLOCK_BYTES - 8  # of the first block
    lengths = [0, 1, 7, room - 1, room, room + 1, room + BLOCK_BYTES, room + 3 * BLOCK_BYTES + 1]

    def text(rank: int, step: int) -> bytes:
        length = lengths[(3 * rank + step) % len(lengths)]
        return np.random.default_rng([rank, step]).integers(0, 256, length, np.uint8).tobytes()

    def work(communicator: Communicator) -> None:
        channel = open_channel(communicator)
        for step in range(0, 40, 2):
            local = memoryview(text(communicator.rank, step))
            expected = [text(rank, step) for rank in range(size)]
            assert channel.all_gather_bytes(local, call(step)) == expected
            array = values(communicator.rank, 1500)
            channel.all_reduce(array, np.add, call(step + 1))
            sums = reduce(np.add, [values(rank, 1500) for rank in range(size)])
            np.testing.assert_array_equal(array, sums)

    spawn_inproc(size, work)


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_of_several_arrays(spawn_inproc: Spawn, size: int) -> None:
    open_channel = shared_channel(size)
    lengths, starts = [5, 1, 3000, 7], [0, 16, 32, 3040]  # gaps between them, and three blocks

    def parts(rank: int) -> list[Any]:
        return [values(rank, length) for length in lengths]

    def work(communicator: Communicator) -> None:
        channel, flat = open_channel(communicator), np.zeros(3056, np.float32)
        channel.all_reduce(flat, np.add, call(0), TensorListView(parts(communicator.rank), starts))
        expected = np.zeros(3056, np.float32)
        for number, (start, length) in enumerate(zip(starts, lengths)):
            sums = reduce(np.add, [parts(rank)[number] for rank in range(size)])
            expected[start : start + length] = sums
        np.testing.assert_array_equal(flat, expected)

    spawn_inproc(size, work)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, ml_dtypes.bfloat16])
def test_reduce_scatter_adds_in_rank_order(spawn_inproc: Spawn, size: int, dtype: Any) -> None:
    open_channel = shared_channel(size)
    results = [np.zeros(length, dtype) for length in LENGTHS]  # all threads share them

    def work(communicator: Communicator) -> None:
        channel = open_channel(communicator)
        for step, (length, sums) in enumerate(zip(LENGTHS, results)):
            local = values(communicator.rank, length, dtype)
            channel.reduce_scatter(sums, np.add, call(step), TensorListView([local], [0]))
            expected = reduce(np.add, [values(rank, length, dtype) for rank in range(size)])
            np.testing.assert_array_equal(sums, expected, strict=True)

    spawn_inproc(size, work)


# -- staging buffers: disjoint, aligned, and the same for bytes and arrays


@pytest.mark.parametrize(("count", "slots"), [(2, 4), (3, 2), (8, 2)])
def test_blocks_fill_the_memory(count: int, slots: int) -> None:
    nbytes = channel_bytes(count, BLOCK_BYTES)
    memory = bytearray(nbytes)
    staging = StagingBuffers(memoryview(memory), count, BLOCK_BYTES)
    buffers = count + (count > 2)
    for slot in range(slots):
        for index in range(buffers):
            block = staging.block(index, np.dtype(np.uint8), BLOCK_BYTES)
            assert not block.any()  # no other block has the same memory
            block[:] = 1 + slot * buffers + index
        staging.next_slot()
    counters = counters_bytes(count)
    assert not any(memory[:counters])
    assert all(memory[counters:])
    assert nbytes == counters + slots * buffers * BLOCK_BYTES
    # the slots are used in turn
    assert staging.block(0, np.dtype(np.uint8), 1)[0] == 1


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64])
def test_arrays_and_bytes_are_the_same_memory(count: int, dtype: type[np.generic]) -> None:
    memory = memoryview(bytearray(channel_bytes(count, BLOCK_BYTES)))
    staging = StagingBuffers(memory, count, BLOCK_BYTES)
    for _ in range(5):
        staging.next_slot()
        blocks = staging.blocks(np.dtype(dtype), 10)
        for index, (block, data) in enumerate(zip(blocks, staging.bytes_of_blocks())):
            assert block.shape == (10,)
            block[:] = index + 1
            assert len(data) == BLOCK_BYTES
            assert data[: block.nbytes] == block.tobytes()


# -- flat buffers whose values are stored in several arrays


@pytest.mark.parametrize("begin", range(13))
@pytest.mark.parametrize("length", [0, 1, 2, 5, 13])
def test_ranges(begin: int, length: int) -> None:
    end = min(begin + length, len(FLAT))
    part = np.full(end - begin, -1.0)
    for values, target in TensorListView(ARRAYS, STARTS).between(begin, end):
        assert any(np.shares_memory(values, array) for array in ARRAYS)
        part[target] = values
    np.testing.assert_array_equal(part, FLAT[begin:end])


def test_gaps_are_not_written() -> None:
    flat = np.full(13, -1.0)
    TensorListView(ARRAYS, STARTS).copy_to(flat)
    np.testing.assert_array_equal(flat, FLAT)
