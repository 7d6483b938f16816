"""FusedExchange: small arrays and sparse gradients, compared with numpy on all data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import ConfigError, NonFiniteGradientError
from hostopt.gradients.bucket import TensorSpec
from hostopt.gradients.fused_exchange import DenseValue, FusedExchange, Rows, Table, _ordered

FLOAT32, FLOAT64, INT64 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int64)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DENSE = [
    DenseValue(TensorSpec("kernel", (2, 3), FLOAT64)),
    DenseValue(TensorSpec("mean", (), FLOAT64), ReduceOp.AVERAGE, is_gradient=False),
    DenseValue(TensorSpec("bias", (5,), FLOAT32)),
    DenseValue(TensorSpec("least", (3,), INT64), ReduceOp.MIN, is_gradient=False),
    DenseValue(TensorSpec("most", (3,), INT64), ReduceOp.MAX, is_gradient=False),
    DenseValue(TensorSpec("empty", (0, 4), FLOAT32)),
]
TABLES = [
    Table("wide", (8,), FLOAT64, np.dtype(np.int32)),
    Table("narrow", (), FLOAT64, INT64),
    Table("also wide", (2, 4), FLOAT64, INT64),
    Table("half", (2,), BFLOAT16, INT64),
    Table("all rows", (8,), FLOAT64, INT64, is_summed=False),
    Table("all rows, too", (8,), FLOAT64, INT64, is_summed=False),
]


def values_of(rank: int, step: int) -> tuple[list[np.ndarray], list[tuple[np.ndarray, ...]]]:
    """Returns the values of a rank: integers, so that sums are exact in any order and dtype."""
    random = np.random.RandomState(10 * step + rank)
    dense = [random.randint(-9, 9, value.spec.shape).astype(value.spec.dtype) for value in DENSE]
    rows = []
    for number, table in enumerate(TABLES):
        count = (rank + step + number) % 3 * 4  # none at all on some ranks
        indices = random.randint(0, 6, count).astype(table.index_dtype)
        rows.append(
            (indices, random.randint(-3, 3, (count, *table.row_shape)).astype(table.dtype))
        )
    return dense, rows


Pairs = Sequence[tuple[np.ndarray, ...]]  # indices and values of each table


def run_exchange(
    exchange: FusedExchange, dense: list[np.ndarray], pairs: Pairs, weight: float = 1.0
) -> tuple[list[np.ndarray], list[tuple[np.ndarray, ...]]]:
    """Runs an exchange with the rows of each table, and returns the sums by table."""
    rows = []
    for kind in exchange.kinds:
        own = [pairs[table] for table in kind]
        counts = np.array([len(indices) for indices, _ in own])
        values = [values.reshape(-1, math.prod(values.shape[1:])) for _, values in own]
        indices = np.concatenate([indices for indices, _ in own])
        rows.append(Rows(counts, indices, np.concatenate(values)))
    result = exchange.run(dense, rows, weight)
    arrays, sums = result.arrays, result.rows
    results: dict[int, tuple[np.ndarray, ...]] = {}
    for kind, (counts, indices, values) in zip(exchange.kinds, sums):
        edges = np.cumsum(counts)[:-1]
        results.update(zip(kind, zip(np.split(indices, edges), np.split(values, edges))))
    return arrays, [results[table] for table in range(len(pairs))]


def as_dense(table: Table, rows: tuple[np.ndarray, ...]) -> np.ndarray:
    full = np.zeros((6, *table.row_shape))
    values = rows[1].astype(np.float64).reshape(-1, *table.row_shape)
    np.add.at(full, rows[0], values)
    return full


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_exchange_equals_numpy(spawn: Spawn, size: int) -> None:
    def run(communicator: Communicator) -> Any:
        exchange = FusedExchange(communicator.duplicate("exchange"), DENSE, TABLES)
        return [run_exchange(exchange, *values_of(communicator.rank, step)) for step in range(4)]

    results = spawn(size, run)
    for step in range(4):
        everything = [values_of(rank, step) for rank in range(size)]
        for rank in range(size):
            dense, rows = results[rank][step]
            columns = list(zip(*(own for own, _ in everything)))
            np.testing.assert_array_equal(dense[0], sum(columns[0]))
            np.testing.assert_array_equal(dense[1], sum(columns[1]) / size)
            np.testing.assert_array_equal(dense[2], sum(columns[2]))
            np.testing.assert_array_equal(dense[3], np.min(columns[3], 0))
            np.testing.assert_array_equal(dense[4], np.max(columns[4], 0))
            assert dense[5].shape == (0, 4)
            for number, table in enumerate(TABLES):
                indices, values = rows[number]
                assert indices.dtype == table.index_dtype
                assert values.dtype == table.dtype
                if not table.is_summed:
                    of_ranks = zip(*(own[number] for _, own in everything))
                    for result, parts in zip(rows[number], of_ranks):
                        all_parts = np.concatenate(parts)  # in rank order
                        np.testing.assert_array_equal(result.reshape(all_parts.shape), all_parts)
                    continue
                assert np.all(np.diff(indices) > 0), "each index once, ascending"
                expected = sum(as_dense(table, own[number]) for _, own in everything)
                np.testing.assert_array_equal(as_dense(table, rows[number]), expected)
                touched = {int(i) for _, own in everything for i in own[number][0]}
                assert set(indices.tolist()) == touched


def test_all_ranks_get_the_same_bits(spawn: Spawn) -> None:
    table = Table("t", (9,), FLOAT32, INT64)

    def run(communicator: Communicator) -> Any:
        random = np.random.RandomState(communicator.rank)
        exchange = FusedExchange(communicator.duplicate("exchange"), DENSE[2:3], [table])
        indices = random.randint(0, 50, 200)
        values = random.standard_normal((200, 9)).astype(np.float32)
        dense = random.standard_normal(5).astype(np.float32)
        (summed,), ((rows, sums),) = run_exchange(exchange, [dense], [(indices, values)])
        return summed.tobytes(), rows.tobytes(), sums.tobytes()

    first, *others = spawn(3, run)
    assert all(other == first for other in others)


def test_kinds_of_rows_with_and_without_the_same_indices(spawn_inproc: Spawn) -> None:
    tables = [Table(str(width), (width,), FLOAT64, INT64) for width in (1, 8, 9, 64)]

    def rows_of(rank: int) -> list[tuple[np.ndarray, ...]]:
        random = np.random.RandomState(rank)
        same, few, other = random.randint(0, 6, 40), np.arange(rank, 6), random.randint(0, 6, 40)
        return [
            (indices, random.randint(-9, 9, (len(indices), *table.row_shape)).astype(np.float64))
            for table, indices in zip(tables, (same, same, few, other))
        ]

    def run(communicator: Communicator) -> Any:
        exchange = FusedExchange(communicator.duplicate("exchange"), [], tables)
        return run_exchange(exchange, [], rows_of(communicator.rank))[1]

    for sums in spawn_inproc(2, run):
        for table, rows, *parts in zip(tables, sums, rows_of(0), rows_of(1)):
            expected = sum(as_dense(table, part) for part in parts)
            np.testing.assert_array_equal(as_dense(table, rows), expected)
            np.testing.assert_array_equal(rows[0], np.unique(rows[0]))


@pytest.mark.parametrize("bits", [4, 44, 63])  # of the keys; 63 leave none for their positions
def test_keys_are_ordered_as_by_a_stable_sort(bits: int) -> None:
    keys = np.random.RandomState(0).randint(0, 2**bits, 3000, np.int64)
    keys = np.concatenate([keys[:1000], keys, keys[:1000:-1], keys[:0]])
    for some in (keys, keys[:1], keys[:0]):
        np.testing.assert_array_equal(_ordered(some), np.argsort(some, kind="stable"))


@pytest.mark.parametrize("width", [1, 16])
def test_many_rows_of_two_bytes_are_summed_in_pairs(spawn_inproc: Spawn, width: int) -> None:
    table = Table("t", (width,), BFLOAT16, INT64)

    def run(communicator: Communicator) -> Any:
        exchange = FusedExchange(communicator.duplicate("exchange"), [], [table])
        ones = np.ones((1024, width), BFLOAT16)
        return run_exchange(exchange, [], [(np.zeros(1024, np.int64), ones)])[1]

    ((_, values),) = spawn_inproc(1, run)[0]
    np.testing.assert_array_equal(values, np.full((1, width), 1024))  # 256 one after another


def test_only_gradients_are_weighted_by_rank(
    spawn_inproc: Spawn,
) -> None:
    table = Table("t", (1,), FLOAT32, INT64)
    dense = [DENSE[2], DenseValue(TensorSpec("count", (1,), FLOAT32), is_gradient=False)]

    def run(communicator: Communicator) -> Any:
        exchange = FusedExchange(communicator.duplicate("exchange"), dense, [table])
        value = np.nan if communicator.rank == 1 else 2.0  # rank 1 has no data
        arrays = [np.full(5, value, np.float32), np.ones(1, np.float32)]
        rows = np.array([communicator.rank]), np.full((1, 1), value, np.float32)
        return run_exchange(exchange, arrays, [rows], 1.5 if communicator.rank == 0 else 0.0)

    for (gradient, count), ((indices, values),) in spawn_inproc(2, run):
        np.testing.assert_array_equal(gradient, np.full(5, 3.0))
        np.testing.assert_array_equal(count, [2.0])
        np.testing.assert_array_equal(indices, [0])
        np.testing.assert_array_equal(values, [[3.0]])


@pytest.mark.parametrize("name", ["kernel", "bias"])  # float64 and float32: two sums
def test_a_gradient_of_any_dtype_that_is_not_finite_is_named(spawn: Spawn, name: str) -> None:
    names = [value.spec.name for value in DENSE]

    def run(communicator: Communicator) -> None:
        exchange = FusedExchange(communicator.duplicate("exchange"), DENSE, TABLES)
        dense, rows = values_of(communicator.rank, 0)
        if communicator.rank == 1:
            dense[names.index(name)].flat[2] = np.nan
        with pytest.raises(NonFiniteGradientError, match=rf"rank 1 .*{name!r}"):
            run_exchange(exchange, dense, rows)

    spawn(2, run)


def test_nonfinite_rows_are_reported_with_rank_and_variable(spawn: Spawn) -> None:
    def run(communicator: Communicator) -> Any:
        tables = [Table("good", (1,), FLOAT32, INT64), Table("bad", (1,), FLOAT32, INT64)]
        exchange = FusedExchange(communicator.duplicate("exchange"), [], tables)
        value = np.inf if communicator.rank == 1 else 1.0
        rows = np.array([3]), np.ones((1, 1), np.float32)
        with pytest.raises(NonFiniteGradientError) as caught:
            run_exchange(exchange, [], [rows, (rows[0], np.full((1, 1), value, np.float32))])
        return str(caught.value)

    for text in spawn(2, run):
        assert "rank 1" in text
        assert "Inf for 'bad'" in text
        assert "good" not in text


@pytest.mark.parametrize("index", [-1, 1 << 40])
def test_an_index_outside_of_the_table_is_refused(spawn_inproc: Spawn, index: int) -> None:
    def run(communicator: Communicator) -> Any:
        tables = [Table("good", (1,), FLOAT32, INT64), Table("bad", (1,), FLOAT32, INT64)]
        exchange = FusedExchange(communicator.duplicate("exchange"), [], tables)
        ones = np.ones((2, 1), np.float32)
        with pytest.raises(ConfigError) as caught:
            run_exchange(exchange, [], [(np.array([3, 4]), ones), (np.array([3, index]), ones)])
        return str(caught.value)

    (text,) = spawn_inproc(1, run)
    assert f"row {index} of 'bad'" in text
