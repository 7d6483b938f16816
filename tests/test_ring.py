"""The schedule as literal grids, and every collective against numpy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import Spawn

from hostopt import ring
from hostopt.communicator import DTYPES, Communicator, ReduceOp

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ALL_DTYPES = [np.dtype(name) for name in ("f2", "f4", "f8", "i4", "i8")] + [BFLOAT16]
FLOATING = [dtype for dtype in ALL_DTYPES if dtype.kind != "i"]
SIZES = (1, 2, 3, 4, 5)
# none, one, fewer than ranks, and more than one segment of 16 bytes in a chunk
LENGTHS = (0, 1, 3, 21)
TINY_SEGMENT_BYTES = 16
LARGE = 300_001
REFERENCE = {
    ReduceOp.SUM: lambda stack: stack.sum(axis=0),
    ReduceOp.AVERAGE: lambda stack: stack.sum(axis=0) / len(stack),
    ReduceOp.MIN: lambda stack: stack.min(axis=0),
    ReduceOp.MAX: lambda stack: stack.max(axis=0),
}


def whole_numbers(rank: int, length: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Values whose sums over all ranks every dtype holds exactly."""
    rng = np.random.default_rng([rank, length])
    return rng.integers(-8, 9, length).astype(dtype)


def stacked(size: int, length: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The data of all ranks, in float64."""
    return np.stack([whole_numbers(r, length, dtype) for r in range(size)]).astype(np.float64)


def check_bits(found: Iterable[Any], wanted: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> None:
    """Every rank found `wanted`, to the bit."""
    for rank, array in enumerate(found):
        assert array.dtype == dtype
        np.testing.assert_array_equal(
            array.astype(np.float64), wanted.astype(dtype).astype(np.float64), f"rank {rank}"
        )


# --- the schedule -----------------------------------------------------------------------------


def test_all_reduce_of_three_ranks_as_drawn() -> None:
    schedules = [ring.all_reduce_schedule(rank, 3) for rank in range(3)]
    assert [[round_.send for round_ in rounds] for rounds in zip(*schedules)] == [
        [2, 0, 1],
        [1, 2, 0],
        [0, 1, 2],
        [2, 0, 1],
    ]
    assert [[round_.recv for round_ in rounds] for rounds in zip(*schedules)] == [
        [1, 2, 0],
        [0, 1, 2],
        [2, 0, 1],
        [1, 2, 0],
    ]
    assert [[round_.reduce for round_ in rounds] for rounds in zip(*schedules)] == [
        [True] * 3,
        [True] * 3,
        [False] * 3,
        [False] * 3,
    ]


def test_reduce_scatter_of_four_ranks() -> None:
    schedules = [ring.reduce_scatter_schedule(rank, 4) for rank in range(4)]
    assert [[tuple(round_) for round_ in rounds] for rounds in zip(*schedules)] == [
        [(3, 2, True), (0, 3, True), (1, 0, True), (2, 1, True)],
        [(2, 1, True), (3, 2, True), (0, 3, True), (1, 0, True)],
        [(1, 0, True), (2, 1, True), (3, 2, True), (0, 3, True)],
    ]


def test_one_rank_has_nothing_to_do() -> None:
    assert ring.all_reduce_schedule(0, 1) == []
    assert ring.reduce_scatter_schedule(0, 1) == []
    assert ring.all_gather_schedule(0, 1) == []


@pytest.mark.parametrize(
    ("length", "size", "lengths"),
    [(0, 3, [0, 0, 0]), (2, 3, [1, 1, 0]), (10, 4, [3, 3, 2, 2]), (12, 3, [4, 4, 4])],
)
def test_chunks_differ_by_one_at_most(length: int, size: int, lengths: list[int]) -> None:
    slices = ring.chunk_slices(length, size)
    assert [len(range(length)[part]) for part in slices] == lengths
    assert [i for part in slices for i in range(length)[part]] == list(range(length))


# --- the collectives --------------------------------------------------------------------------


def test_these_are_all_dtypes() -> None:
    assert sorted(dtype.name for dtype in ALL_DTYPES) == sorted(DTYPES)


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce(spawn: Spawn, size: int) -> None:
    cases = [
        (op, length, dtype)
        for op in ReduceOp
        for length in LENGTHS
        for dtype in (FLOATING if op is ReduceOp.AVERAGE else ALL_DTYPES)
    ]

    def work(communicator: Communicator) -> list[Any]:
        return [
            communicator.all_reduce(whole_numbers(communicator.rank, length, dtype), op)
            for op, length, dtype in cases
        ]

    found = spawn(size, work, segment_bytes=TINY_SEGMENT_BYTES)
    for (op, length, dtype), arrays in zip(cases, zip(*found)):
        check_bits(arrays, REFERENCE[op](stacked(size, length, dtype)), dtype)


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter(spawn: Spawn, size: int) -> None:
    cases = [
        (op, length, dtype)
        for op in (ReduceOp.SUM, ReduceOp.AVERAGE)
        for length in LENGTHS
        for dtype in FLOATING
    ]

    def work(communicator: Communicator) -> list[Any]:
        return [
            communicator.reduce_scatter(whole_numbers(communicator.rank, length, dtype), op)
            for op, length, dtype in cases
        ]

    found = spawn(size, work, segment_bytes=TINY_SEGMENT_BYTES)
    for (op, length, dtype), arrays in zip(cases, zip(*found)):
        wanted = np.array_split(REFERENCE[op](stacked(size, length, dtype)), size)
        for array, chunk in zip(arrays, wanted):
            check_bits([array], chunk, dtype)


@pytest.mark.parametrize("size", SIZES)
def test_all_gather(spawn: Spawn, size: int) -> None:
    cases = [(length, dtype) for length in (0, 1, 10) for dtype in ALL_DTYPES]

    def work(communicator: Communicator) -> list[Any]:
        return [communicator.all_gather(whole_numbers(communicator.rank, *c)) for c in cases]

    found = spawn(size, work, segment_bytes=TINY_SEGMENT_BYTES)
    for (length, dtype), arrays in zip(cases, zip(*found)):
        check_bits(arrays, stacked(size, length, dtype), dtype)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_from_every_root(spawn: Spawn, size: int) -> None:
    cases = [
        (root, length, dtype)
        for root in range(size)
        for length in (0, 1, 10)
        for dtype in (np.dtype("i8"), np.dtype("?"), BFLOAT16)
    ]

    def work(communicator: Communicator) -> list[Any]:
        return [
            communicator.broadcast(whole_numbers(communicator.rank, length, dtype), root)
            for root, length, dtype in cases
        ]

    found = spawn(size, work, segment_bytes=TINY_SEGMENT_BYTES)
    for (root, length, dtype), arrays in zip(cases, zip(*found)):
        check_bits(arrays, whole_numbers(root, length, dtype), dtype)


@pytest.mark.parametrize("size", [2, 3])
def test_large_arrays(spawn: Spawn, size: int) -> None:
    float32 = np.dtype("f4")

    def work(communicator: Communicator) -> tuple[Any, ...]:
        mine = whole_numbers(communicator.rank, LARGE, float32)
        return (
            communicator.all_reduce(mine),
            communicator.reduce_scatter(mine),
            communicator.all_gather(mine),
            communicator.broadcast(mine, root=size - 1),
        )

    found = spawn(size, work, segment_bytes=1 << 16)
    reduced, scattered, gathered, sent = zip(*found)
    data = stacked(size, LARGE, float32)
    check_bits(reduced, data.sum(axis=0), float32)
    check_bits([np.concatenate(scattered)], data.sum(axis=0), float32)
    check_bits(gathered, data, float32)
    check_bits(sent, data[-1], float32)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE])
@pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: dtype.name)
def test_rounding_stays_small_and_is_the_same_on_all_ranks(
    spawn: Spawn, dtype: np.dtype[Any], op: ReduceOp
) -> None:
    size = 5
    data = np.random.default_rng(7).normal(size=(size, 1000)).astype(dtype)
    found = spawn(size, lambda c: c.all_reduce(data[c.rank], op), segment_bytes=100)
    assert len({array.tobytes() for array in found}) == 1
    exact = data.astype(np.float64)
    # each of size - 1 additions, and the division, rounds what is at most the sum of magnitudes
    bound = size * float(ml_dtypes.finfo(dtype).eps) * np.abs(exact).sum(axis=0)
    error = np.abs(found[0].astype(np.float64) - REFERENCE[op](exact))
    assert np.all(error <= bound)


@pytest.mark.parametrize("shape", [(), (1,), (3, 0, 2), (2, 3, 5)])
def test_shapes_are_kept(spawn: Spawn, shape: tuple[int, ...]) -> None:
    size, count = 3, int(np.prod(shape))
    data = np.arange(size * count, dtype=np.float32).reshape(size, *shape)

    def work(communicator: Communicator) -> tuple[Any, ...]:
        mine = data[communicator.rank]
        return (
            communicator.all_reduce(mine),
            communicator.all_gather(mine),
            communicator.broadcast(mine, root=1),
            communicator.reduce_scatter(mine),
        )

    for rank, (reduced, gathered, sent, scattered) in enumerate(
        spawn(size, work, segment_bytes=TINY_SEGMENT_BYTES)
    ):
        wanted = data.sum(axis=0)
        np.testing.assert_array_equal(reduced, wanted, strict=True)
        np.testing.assert_array_equal(gathered, data, strict=True)
        np.testing.assert_array_equal(sent, data[1, ...], strict=True)
        chunk = np.array_split(wanted.reshape(-1), size)[rank]
        np.testing.assert_array_equal(scattered, chunk, strict=True)


@pytest.mark.parametrize("size", [1, 3])
def test_the_input_is_neither_changed_nor_returned(spawn: Spawn, size: int) -> None:
    def work(communicator: Communicator) -> None:
        # transposed: not contiguous, so that no view of it is flat
        mine = np.full((4, 6), communicator.rank + 1.0).T
        before = mine.copy()
        for result in (
            communicator.all_reduce(mine),
            communicator.all_reduce(mine, ReduceOp.AVERAGE),
            communicator.reduce_scatter(mine),
            communicator.all_gather(mine),
            communicator.broadcast(mine, root=size - 1),
        ):
            assert not np.shares_memory(result, mine)
            np.testing.assert_array_equal(mine, before)
            result[...] = -1  # the result is the caller's to change
        np.testing.assert_array_equal(mine, before)

    spawn(size, work, segment_bytes=TINY_SEGMENT_BYTES)


# --- the wire ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_bytes_on_the_wire(spawn_ring: Spawn, size: int) -> None:
    chunk_bytes, segment_bytes = 480, 100  # 480 = 4 segments of 25 floats and one of 20
    length = size * chunk_bytes // 4

    def work(communicator: Communicator) -> list[tuple[int, int, int]]:
        mine = np.ones(length, np.float32)
        traffic = communicator.transport.traffic
        counts = []
        for collective in (
            communicator.all_reduce,
            communicator.reduce_scatter,
            lambda array: communicator.all_gather(array[: length // size]),
        ):
            before = (traffic.messages, traffic.payload_bytes, traffic.header_bytes)
            collective(mine)
            after = (traffic.messages, traffic.payload_bytes, traffic.header_bytes)
            counts.append(tuple(b - a for a, b in zip(before, after)))
        return counts

    header_bytes = 64 if spawn_ring.transport == "grpc" else 0
    for counts in spawn_ring(size, work, segment_bytes=segment_bytes):
        for (messages, payload, headers), rounds in zip(
            counts, [2 * (size - 1), size - 1, size - 1]
        ):
            assert payload == rounds * chunk_bytes  # all-reduce: 2 (size - 1) / size of the array
            assert messages == rounds * 5
            assert headers == messages * header_bytes
