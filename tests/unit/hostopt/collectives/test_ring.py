"""Every collective over the ring and in shared memory against numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from chunk_bits import check_chunks
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import DTYPES, ReduceOp

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ALL_DTYPES = [np.dtype(name) for name in ("f2", "f4", "f8", "i1", "u1", "i4", "i8")] + [BFLOAT16]
FLOATING = [dtype for dtype in ALL_DTYPES if dtype.kind not in "iu"]
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
    """Returns values whose sums over all ranks are exact in every dtype."""
    rng = np.random.default_rng([rank, length])
    return rng.integers(-8, 9, length).astype(dtype)


def stacked(size: int, length: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Returns the data of all ranks, in float64."""
    return np.stack([whole_numbers(r, length, dtype) for r in range(size)]).astype(np.float64)


def check_bits(
    result: Iterable[Any], expected: np.ndarray[Any, Any], dtype: np.dtype[Any]
) -> None:
    """Checks that each rank has the bits of `expected`."""
    for rank, array in enumerate(result):
        assert array.dtype == dtype
        np.testing.assert_array_equal(
            array.astype(np.float64), expected.astype(dtype).astype(np.float64), f"rank {rank}"
        )


def results(
    spawn: Spawn, size: int, cases: Iterable[Any], call: Callable[..., Any]
) -> Iterator[tuple[Any, ...]]:
    """Each case of a collective, and what it returns on all ranks.

    Args:
      spawn: runs the ranks.
      size: number of ranks.
      cases: the last two arguments of a case are length and dtype of the array.
      call: makes the collective of a case, called with communicator, array and other arguments.
    """
    cases = [*cases]

    def work(communicator: Communicator) -> list[Any]:
        return [
            call(communicator, whole_numbers(communicator.rank, *case[-2:]), *case[:-2])
            for case in cases
        ]

    return zip(cases, zip(*spawn(size, work, segment_bytes=TINY_SEGMENT_BYTES)))


# --- the collectives --------------------------------------------------------------------------


def test_all_dtypes_are_tested() -> None:
    assert sorted(dtype.name for dtype in ALL_DTYPES) == sorted(DTYPES)


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce(spawn: Spawn, size: int) -> None:
    cases = [
        (op, length, dtype)
        for op in REFERENCE  # products, of smaller numbers: test_named
        for length in LENGTHS
        for dtype in (FLOATING if op is ReduceOp.AVERAGE else ALL_DTYPES)
    ]
    for (op, *kind), arrays in results(spawn, size, cases, Communicator.all_reduce):
        check_bits(arrays, REFERENCE[op](stacked(size, *kind)), kind[1])


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter(spawn: Spawn, size: int) -> None:
    cases = itertools.product([ReduceOp.SUM, ReduceOp.AVERAGE], LENGTHS, FLOATING)
    for (op, *kind), arrays in results(spawn, size, cases, Communicator.reduce_scatter):
        expected = np.array_split(REFERENCE[op](stacked(size, *kind)), size)
        for array, chunk in zip(arrays, expected):
            check_bits([array], chunk, kind[1])


@pytest.mark.parametrize("size", SIZES)
def test_all_gather(spawn: Spawn, size: int) -> None:
    cases = itertools.product([0, 1, 10], ALL_DTYPES)
    for kind, arrays in results(spawn, size, cases, Communicator.all_gather):
        check_bits(arrays, stacked(size, *kind), kind[1])


@pytest.mark.parametrize("wire_format", [None, "bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_chunks_in_place_have_the_bits_of_an_all_reduce(
    spawn: Spawn, size: int, wire_format: str | None
) -> None:
    length = 60 * 500  # a multiple of each size, too much for recursive doubling

    def work(communicator: Communicator) -> None:
        values = np.random.default_rng(communicator.rank).normal(size=length).astype(np.float32)
        hosts = communicator.hosts
        is_even = hosts is None or len({len(host) for host in hosts.groups}) == 1
        assert communicator.has_chunks is is_even
        if is_even:
            check_chunks(communicator, values, wire_format)

    spawn(size, work, segment_bytes=4096)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_from_every_root(spawn: Spawn, size: int) -> None:
    dtypes = [np.dtype("i8"), np.dtype("?"), BFLOAT16]
    cases = itertools.product(range(size), [0, 1, 10], dtypes)
    for (root, *kind), arrays in results(spawn, size, cases, Communicator.broadcast):
        check_bits(arrays, whole_numbers(root, *kind), kind[1])


@pytest.mark.parametrize("size", [2, 3])
def test_large_arrays(spawn: Spawn, size: int) -> None:
    float32 = np.dtype("f4")

    def work(communicator: Communicator) -> tuple[Any, ...]:
        local = whole_numbers(communicator.rank, LARGE, float32)
        return (
            communicator.all_reduce(local),
            communicator.reduce_scatter(local),
            communicator.all_gather(local),
            communicator.broadcast(local, root=size - 1),
        )

    result = spawn(size, work, segment_bytes=1 << 16)
    reduced, scattered, gathered, sent = zip(*result)
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
    result = spawn(size, lambda c: c.all_reduce(data[c.rank], op), segment_bytes=100)
    assert len({array.tobytes() for array in result}) == 1
    exact = data.astype(np.float64)
    # each of size - 1 additions, and the division, rounds what is at most the sum of magnitudes
    bound = size * float(ml_dtypes.finfo(dtype).eps) * np.abs(exact).sum(axis=0)
    error = np.abs(result[0].astype(np.float64) - REFERENCE[op](exact))
    assert np.all(error <= bound)


@pytest.mark.parametrize("shape", [(), (1,), (3, 0, 2), (2, 3, 5)])
def test_shapes_are_kept(spawn: Spawn, shape: tuple[int, ...]) -> None:
    size, count = 3, int(np.prod(shape))
    data = np.arange(size * count, dtype=np.float32).reshape(size, *shape)

    def work(communicator: Communicator) -> tuple[Any, ...]:
        local = data[communicator.rank]
        return (
            communicator.all_reduce(local),
            communicator.all_gather(local),
            communicator.broadcast(local, root=1),
            communicator.reduce_scatter(local),
        )

    for rank, (reduced, gathered, sent, scattered) in enumerate(
        spawn(size, work, segment_bytes=TINY_SEGMENT_BYTES)
    ):
        expected = data.sum(axis=0)
        np.testing.assert_array_equal(reduced, expected, strict=True)
        np.testing.assert_array_equal(gathered, data, strict=True)
        np.testing.assert_array_equal(sent, data[1, ...], strict=True)
        chunk = np.array_split(expected.reshape(-1), size)[rank]
        np.testing.assert_array_equal(scattered, chunk, strict=True)


@pytest.mark.parametrize("size", [1, 3])
def test_the_input_is_neither_changed_nor_returned(spawn: Spawn, size: int) -> None:
    def work(communicator: Communicator) -> None:
        # transposed: not contiguous, so that no view of it is flat
        local = np.full((4, 6), communicator.rank + 1.0).T
        before = local.copy()
        for result in (
            communicator.all_reduce(local),
            communicator.all_reduce(local, ReduceOp.AVERAGE),
            communicator.reduce_scatter(local),
            communicator.all_gather(local),
            communicator.broadcast(local, root=size - 1),
        ):
            assert not np.shares_memory(result, local)
            np.testing.assert_array_equal(local, before)
            result[...] = -1  # the caller may modify the result
        np.testing.assert_array_equal(local, before)

    spawn(size, work, segment_bytes=TINY_SEGMENT_BYTES)


# --- the wire ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_bytes_on_the_wire(spawn_ring: Spawn, size: int) -> None:
    chunk_bytes, segment_bytes = 480, 100  # 480 = 4 segments of 25 floats and one of 20
    length = size * chunk_bytes // 4

    def work(communicator: Communicator) -> list[tuple[int, int]]:
        local = np.ones(length, np.float32)
        traffic = communicator.transport.traffic
        counts = []
        for collective in (
            communicator.all_reduce,
            communicator.reduce_scatter,
            lambda array: communicator.all_gather(array[: length // size]),
        ):
            before = (traffic.messages, traffic.payload_bytes)
            collective(local)
            after = (traffic.messages, traffic.payload_bytes)
            counts.append(tuple(b - a for a, b in zip(before, after)))
        return counts

    for counts in spawn_ring(size, work, segment_bytes=segment_bytes, streams=1):
        for (messages, payload), rounds in zip(counts, [2 * (size - 1), size - 1, size - 1]):
            assert payload == rounds * chunk_bytes  # all-reduce: 2 (size - 1) / size of the array
            assert messages == rounds * 5


@pytest.mark.parametrize("size", [2, 3, 4])
def test_scattering_and_gathering_send_as_much_as_an_all_reduce(
    spawn_ring: Spawn, size: int
) -> None:
    def work(communicator: Communicator) -> tuple[int, int]:
        flat = np.ones(120_000, np.float32)
        traffic = communicator.transport.traffic
        begin = traffic.payload_bytes
        communicator.all_reduce(flat)
        middle = traffic.payload_bytes
        communicator.reduce_scatter_in_place(flat, communicator.signed_call("scatter", "", flat))
        communicator.all_gather_in_place(flat)
        return middle - begin, traffic.payload_bytes - middle

    for all_reduce, both in spawn_ring(size, work):
        assert both == pytest.approx(all_reduce, rel=0.001)
