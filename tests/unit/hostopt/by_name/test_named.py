"""Collectives that ranks match by name: results, order and errors."""

from __future__ import annotations

import logging
import random
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rings import Spawn
from threads import in_threads

import hostopt.by_name.named
from hostopt.by_name.named import NamedCollectives
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import DTYPES, ReduceOp
from hostopt.errors import CollectiveMismatchError, ConfigError, HostOptError
from hostopt.process import descriptors

SIZES = [1, 2, 3, 4]
ALL_DTYPES = [np.dtype(getattr(ml_dtypes, name, name)) for name in DTYPES]


def average(all_: list[Any]) -> Any:
    """Averages of integers are truncated towards zero."""
    dtype = all_[0].dtype
    if dtype.kind not in "iu":
        return sum(all_[1:], all_[0]) / dtype.type(len(all_))
    return np.trunc(np.mean(np.array(all_, np.float64), 0)).astype(dtype)


REFERENCE = {
    ReduceOp.SUM: lambda all_: sum(all_[1:], all_[0]),
    ReduceOp.AVERAGE: average,
    ReduceOp.MIN: lambda all_: np.min(all_, 0),
    ReduceOp.MAX: lambda all_: np.max(all_, 0),
    ReduceOp.PRODUCT: lambda all_: np.prod(all_, 0, dtype=all_[0].dtype),
}


def values(rank: int, shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 0) -> Any:
    """Small integers, whose sums and products are exact in every dtype."""
    return np.random.default_rng([rank, seed]).integers(0, 3, shape).astype(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", list(ReduceOp))
def test_all_reduce_of_arrays(spawn: Spawn, op: ReduceOp, size: int) -> None:
    shapes = [(), (0,), (3, 2), (70_000,)]
    cases = [(shape, dtype) for shape in shapes for dtype in ALL_DTYPES]

    def work(communicator: Communicator) -> None:
        named = NamedCollectives(communicator)
        arrays = [values(named.rank, *case) for case in cases]
        copies = [array.copy() for array in arrays]
        results = named.all_reduce(arrays, "all", op)
        for case, array, copy, result in zip(cases, arrays, copies, results):
            assert np.array_equal(array, copy)
            expected = REFERENCE[op]([values(rank, *case) for rank in range(size)])
            assert (result.dtype, result.shape) == (case[1], case[0])
            assert np.array_equal(result, expected), case

    spawn(size, work)


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_of_rows(spawn: Spawn, size: int) -> None:
    def local(rank: int, row: tuple[int, ...], dtype: Any) -> Any:
        return values(rank, ((rank * 3) % 4, *row), dtype)

    def work(communicator: Communicator) -> None:
        named = NamedCollectives(communicator)
        for dtype in [*ALL_DTYPES, np.dtype(bool)]:
            for row in [(), (2,), (0,), (2, 3)]:
                result = named.all_gather(local(named.rank, row, dtype), "rows")
                expected = np.concatenate([local(rank, row, dtype) for rank in range(size)])
                assert (result.dtype, result.shape) == (dtype, expected.shape)
                assert np.array_equal(result, expected)

    spawn(size, work)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_of_one_and_of_several_arrays(spawn: Spawn, size: int) -> None:
    def work(communicator: Communicator) -> None:
        named = NamedCollectives(communicator)
        for root in range(size):
            for shapes in [[(2, 3)], [(), (0, 4), (5,)]]:
                cases = [(shape, dtype) for shape in shapes for dtype in ALL_DTYPES]
                arrays = [values(named.rank, *case) for case in cases]
                results = named.broadcast(arrays, root, f"{len(cases)} arrays")
                for case, result in zip(cases, results):
                    assert (result.dtype, result.shape) == (case[1], case[0])
                    assert np.array_equal(result, values(root, *case))
                    assert result.flags.writeable

    spawn(size, work)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 5, 12])
def test_reduce_scatter_of_rows(spawn: Spawn, rows: int, size: int) -> None:
    def work(communicator: Communicator) -> Any:
        named = NamedCollectives(communicator)
        return [
            named.reduce_scatter(values(named.rank, (rows, 2), dtype), "rows")
            for dtype in ALL_DTYPES
        ]

    for dtype, *parts in zip(ALL_DTYPES, *spawn(size, work)):
        total = sum(values(rank, (rows, 2), dtype) for rank in range(size))
        counts = [rows // size + (rank < rows % size) for rank in range(size)]
        assert [len(part) for part in parts] == counts
        assert np.array_equal(np.concatenate(parts), total)


@pytest.mark.parametrize("size", [2, 3])
def test_averages_of_integers(spawn: Spawn, size: int) -> None:
    """The sums do not fit into the dtypes, and no mean is exact in float64."""
    cases = {"uint8": [255, 250, 1], "int8": [-128, -101, 5], "int64": [2**61 + 1, 1 - 2**61, -7]}

    def work(communicator: Communicator) -> Any:
        named = NamedCollectives(communicator)
        results = []
        for dtype, row in cases.items():
            array = np.array([row] * 6, dtype) - np.array(communicator.rank, dtype)
            (all_,) = named.all_reduce([array], dtype, ReduceOp.AVERAGE)
            part = named.reduce_scatter(array, f"part of {dtype}", ReduceOp.AVERAGE)
            rows = 6 // size
            np.testing.assert_array_equal(part, all_[:rows], strict=True)
            results.append(all_[0].tolist())
        return results

    for result in spawn(size, work):
        for averages, (dtype, row) in zip(result, cases.items()):
            ranks = range(size)
            totals = [sum(int(np.array(x - r).astype(dtype)) for r in ranks) for x in row]
            assert averages == [abs(x) // size * (1 if x > 0 else -1) for x in totals]


def test_a_call_that_one_rank_refuses_fails_on_all(spawn: Spawn) -> None:
    error = ConfigError("it is too salty. Leave the salt out")

    def work(communicator: Communicator) -> str:
        named = NamedCollectives(communicator)
        for each in (named.all_reduce([np.ones(2)], "soup")[0], named.size):
            assert np.all(each == 2)
        named.refuse("bread", error)  # on all ranks: nobody waits
        if named.rank == 1:
            named.refuse("soup", error)
        with pytest.raises(CollectiveMismatchError) as caught:
            named.all_reduce([np.ones(2)], "bread" if named.rank else "soup")
        return str(caught.value)

    (text,) = {*spawn(2, work)}
    assert "rank 1" in text
    assert "has refused the call 'soup': it is too salty. Leave the salt out" in text


def test_reduce_scatter_of_rows_without_elements(spawn: Spawn) -> None:
    def work(communicator: Communicator) -> Any:
        return NamedCollectives(communicator).reduce_scatter(np.ones((4, 0)), "rows").shape

    assert spawn(2, work) == [(2, 0), (2, 0)]


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_of_rows(spawn: Spawn, size: int) -> None:
    def count(from_: int, to: int) -> int:
        return (from_ * 2 + to) % 3

    def part(from_: int, to: int, dtype: Any) -> Any:
        return values(from_ * 10 + to, (count(from_, to), 700), dtype)

    def work(communicator: Communicator) -> None:
        named = NamedCollectives(communicator)
        ranks = range(size)
        for dtype in ALL_DTYPES:
            array = np.concatenate([part(named.rank, to, dtype) for to in ranks])
            splits = [count(named.rank, to) for to in ranks]
            result, received = named.all_to_all(array, splits, "parts")
            assert received.tolist() == [count(from_, named.rank) for from_ in ranks]
            expected = np.concatenate([part(from_, named.rank, dtype) for from_ in ranks])
            assert np.array_equal(result, expected)

    spawn(size, work, segment_bytes=1000)


@pytest.mark.parametrize("size", [2, 4])
def test_threads_call_in_another_order_on_each_rank(spawn: Spawn, size: int) -> None:
    names = [f"tensor {number}" for number in range(12)]

    def work(communicator: Communicator) -> None:
        named = NamedCollectives(communicator)
        results: dict[str, Any] = {}

        def reduce(name: str) -> None:
            results[name] = [
                named.all_reduce([values(named.rank, (9,), np.dtype("f4"), step)], name)[0]
                for step in range(3)
            ]

        shuffled = random.Random(named.rank).sample(names, len(names))
        in_threads(reduce, shuffled)
        for name in names:
            for step, result in enumerate(results[name]):
                each = [values(rank, (9,), np.dtype("f4"), step) for rank in range(size)]
                assert np.array_equal(result, sum(each))

    spawn(size, work)


MISMATCHES = {
    "op": (
        lambda n: n.all_reduce([np.ones(2)], "x", [ReduceOp.SUM, ReduceOp.MAX][n.rank]),
        ["all_reduce(sum)", "all_reduce(max)"],
    ),
    "dtype": (
        lambda n: n.all_reduce([np.ones(2, ["f4", "f8"][n.rank])], "x"),
        ["float32[2]", "float64[2]"],
    ),
    "shape": (
        lambda n: n.all_reduce([np.ones(2 + n.rank)], "x"),
        ["float64[2]", "float64[3]"],
    ),
    "shapes of a list": (
        lambda n: n.all_reduce([np.ones(2), np.ones(1), np.ones([2 + n.rank, 2 - n.rank])], "x"),
        ["float64[2, 2]", "float64[3, 1]"],
    ),
    "root": (
        lambda n: n.broadcast([np.ones(2)], n.rank, "x"),
        ["broadcast from rank 0", "broadcast from rank 1"],
    ),
    "row": (
        lambda n: n.all_gather(np.ones([n.rank, 2 + n.rank]), "x"),
        ["float64[?, 2]", "float64[?, 3]"],
    ),
    "dtype of rows": (
        lambda n: n.all_to_all(np.ones([2, 1], ["f4", "f8"][n.rank]), [1, 1], "x"),
        ["float32[?, 1]", "float64[?, 1]"],
    ),
    "kind": (
        lambda n: n.barrier("x") if n.rank else n.all_reduce([np.ones(2)], "x"),
        ["all_reduce(sum)", "barrier"],
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_calls_that_differ_under_one_name(spawn: Spawn, case: str) -> None:
    call, texts = MISMATCHES[case]
    with pytest.raises(CollectiveMismatchError) as caught:
        spawn(2, lambda communicator: call(NamedCollectives(communicator)))
    for text in ["rank 0", "rank 1", "'x'", *texts]:
        assert text in str(caught.value)


def test_two_calls_of_one_name_at_the_same_time(spawn_ring: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        named = NamedCollectives(communicator)
        if named.rank == 0:
            waiting = threading.Thread(target=named.barrier, args=("x",))
            waiting.start()
            channel = None
            while channel is None or not channel.lock.locked():
                channel = named._channels.get("x")
            with pytest.raises(ConfigError, match="two calls named 'x' at the same time"):
                named.barrier("x")
            named.barrier("y")
            waiting.join()
        else:
            named.barrier("y")
            named.barrier("x")

    spawn_ring(2, work)


def test_a_call_after_an_error_does_not_take_the_data_of_a_call_that_was_given_up() -> None:
    """The data of the other rank are in shared memory already, so this rank would not wait."""

    def work(communicator: Communicator) -> None:
        named = NamedCollectives(communicator)
        named.all_reduce([np.ones(2)], "x")
        if named.rank == 1:
            communicator.abort(ConfigError("rank 1 gives up"))
            with pytest.raises(HostOptError, match="gives up"):
                named.all_reduce([np.ones(2)], "x")
        else:
            with pytest.raises(HostOptError, match="gives up"):
                while True:
                    named.all_reduce([np.ones(2)], "x")

    Spawn("shm")(2, work)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda n: n.all_gather(np.float32(1), "x"), "has a scalar"),
        (lambda n: n.reduce_scatter(np.float32(1), "x"), "has a scalar"),
        (lambda n: n.all_reduce([np.ones(2, bool)], "x"), "dtype bool cannot be reduced"),
        (lambda n: n.broadcast([np.array(["a"], object)], 0, "x"), "objects or strings"),
        (lambda n: n.broadcast([np.ones(2)], 1, "x"), "wanted a rank from 0 to 0"),
        (lambda n: n.all_to_all(np.ones(2), [3], "x"), "whose sum is 2"),
        (lambda n: n.all_to_all(np.ones(2), [1, 1], "x"), "wanted 1 numbers"),
        (lambda n: n.all_to_all(np.ones(2), [-1], "x"), "whose sum is 2"),
    ],
)
def test_calls_that_cannot_be_made(spawn_ring: Spawn, call: Any, text: str) -> None:
    with pytest.raises(HostOptError, match=text):
        spawn_ring(1, lambda communicator: call(NamedCollectives(communicator)))


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_sums(spawn_ring: Spawn, compression: str) -> None:
    array = np.array([1.0, 1 + 2**-12, 3.0], np.float32)

    def work(communicator: Communicator) -> Any:
        named = NamedCollectives(communicator)
        before = communicator.transport.traffic.payload_bytes
        big = np.full(1000, 1.5, np.float32)
        for op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            named.all_reduce([big], f"big {op}", op, compression)
        sent = communicator.transport.traffic.payload_bytes - before
        results = [
            named.all_reduce([array], f"x {op}", op, compression)[0]
            for op in (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MAX)
        ]
        return sent, results

    for sent, (total, mean, largest) in spawn_ring(2, work):
        assert sent == 2 * 2 * 1000
        assert total.tolist() == [2, 2, 6] and mean.tolist() == [1, 1, 3]
        assert np.array_equal(largest, array)  # only sums are compressed


@pytest.mark.parametrize("low_rank", [0, 1])
def test_names_beyond_a_limit_of_one_rank_travel_in_messages(
    low_rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits: dict[int, int] = {}
    monkeypatch.setattr(descriptors, "limit", lambda: limits[threading.get_ident()])

    def work(communicator: Communicator) -> tuple[int, int]:
        limits[threading.get_ident()] = 8 if communicator.rank == low_rank else 4096
        named, sent = NamedCollectives(communicator), [0]
        for i in range(7):
            for _ in range(2):
                (total,) = named.all_reduce([np.full(50_000, named.rank, np.int32)], f"loss {i}")
                np.testing.assert_array_equal(total, np.full(50_000, 3))
            assert named.all_gather_bytes(bytes([named.rank]), f"b {i}") == [b"\0", b"\1", b"\2"]
            sent.append(communicator.transport.traffic.payload_bytes)
        return sent[2], sent[7]

    with caplog.at_level(logging.WARNING):
        for in_memory, in_all in Spawn("shm")(3, work):
            assert in_memory < 10_000  # opening memory takes messages, too
            assert in_all > 10 * 200_000  # a ring of three sends 4/3 of an array
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"rank {low_rank} has used 4 names of collectives, and now 'loss 2'" in message
    assert "without the step's number" in message


def test_memory_is_shared_for_all_names_if_the_program_requires_it() -> None:
    def work(communicator: Communicator) -> int:
        named = NamedCollectives(communicator)
        for i in range(3):
            named.all_reduce([np.ones(50_000, np.float32)], f"loss {i}")
        return communicator.transport.traffic.payload_bytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hostopt.by_name.named, "MAX_IN_MEMORY", 1)
        assert max(Spawn("shm")(2, work, communication="shm")) < 10_000
