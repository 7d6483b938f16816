"""reduce_tensors: small and large tensors and sparse gradients, compared with numpy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from harness import reserved_addresses
from strategies import as_ranks, session

import estimator_ext
from estimator_ext.reduction.deferred import skip_deduplication
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.gradients.fused_exchange import FusedExchange
from hostopt.tensorflow.ops import StopSaveFlags
from hostopt.tensorflow.reductions import Reduction, can_join, reduce_tensors

estimator_ext.install()


LARGE = (300, 300)  # more bytes than an exchange takes
INDICES = [np.array([3, 1, 3]), np.array([4, 3])]  # of each rank


@pytest.fixture(params=["auto", "grpc"])
def addresses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("HOSTOPT_COMMUNICATION", request.param)
    with reserved_addresses(2) as result:
        yield result


def values_of(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.RandomState(rank).randint(-9, 9, shape).astype(np.float32)


def rows_of(rank: int, row_shape: tuple[int, ...]) -> tf.IndexedSlices:
    indices = INDICES[rank]
    values = values_of(rank, (len(indices), *row_shape))
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices))


def sum_of_rows(row_shape: tuple[int, ...]) -> np.ndarray:
    full = np.zeros((9, *row_shape), np.float32)
    for rank, indices in enumerate(INDICES):
        np.add.at(full, indices, values_of(rank, (len(indices), *row_shape)))
    return full


@pytest.mark.parametrize("shape", [(4,), LARGE])
def test_each_kind_of_reduction_in_one_call(addresses: list[str], shape: tuple[int, ...]) -> None:
    def work(strategy: Any) -> Any:
        rank = strategy.cluster.rank
        own = tf.constant(values_of(rank, shape))
        reductions = [
            Reduction(own, "gradient"),
            Reduction(own, "mean", ReduceOp.AVERAGE, is_gradient=False),
            Reduction(own, "most", ReduceOp.MAX, is_gradient=False),
            Reduction(rows_of(rank, (2,)), "table", row_shape=(2,)),
            Reduction(rows_of(rank, (2, 3)), "boxes", row_shape=(2, 3)),
            Reduction(rows_of(rank, (2,)), "also a table", row_shape=(2,)),
            Reduction(rows_of(rank, ()), "numbers", row_shape=()),
        ]
        results, reducers = reduce_tensors(reductions, strategy.communicator)
        assert sum(isinstance(each, FusedExchange) for each in reducers) == 1
        with session(strategy) as run:
            dense, rows = run.run([results[:3], results[3:]])
        for each in reducers:
            each.close()
        return dense, rows

    every = [values_of(rank, shape) for rank in range(2)]
    for dense, rows in as_ranks(addresses, work):
        np.testing.assert_array_equal(dense[0], sum(every))
        np.testing.assert_array_equal(dense[1], sum(every) / 2)
        np.testing.assert_array_equal(dense[2], np.maximum(*every))
        for result, row_shape in zip(rows, [(2,), (2, 3), (2,), ()]):
            assert result.indices.tolist() == [1, 3, 4]
            np.testing.assert_array_equal(result.values, sum_of_rows(row_shape)[result.indices])


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE])
@pytest.mark.parametrize("shape", [(4,), LARGE])
def test_a_scalar_and_flags_travel_with_gradients(
    addresses: list[str], shape: tuple[int, ...], op: ReduceOp
) -> None:
    def work(strategy: Any) -> Any:
        rank, communicator = strategy.cluster.rank, strategy.communicator
        gradients = [Reduction(tf.constant(values_of(rank, shape)), f"{i}") for i in range(3)]
        scalar = Reduction(tf.constant(1.5 + rank), "the loss", op, is_gradient=False)
        if not can_join(scalar, gradients, communicator):
            return None
        flags = StopSaveFlags(save=True, stop=rank == 1)
        weight = tf.constant(2.0, tf.float64)
        tensors = [*gradients, scalar]
        results, reducers = reduce_tensors(tensors, communicator, weight, flags=flags)
        with session(strategy) as run:
            for _ in range(3):
                *sums, total = run.run(results)
        for each in reducers:
            each.close()
        assert (flags.ranks_saving, flags.ranks_stopping) == (2, 1)
        return sums, total

    wanted = 2 * (values_of(0, shape) + values_of(1, shape))
    for result in as_ranks(addresses, work):
        if shape == LARGE and os.environ["HOSTOPT_COMMUNICATION"] == "grpc":
            assert result is None  # the scalar has messages of its own
            continue
        sums, total = result
        np.testing.assert_array_equal(sums, [wanted] * 3)
        assert total == (4 if op is ReduceOp.SUM else 2)


@pytest.mark.parametrize("row_shape", [(), (2,), (2, 3)])
def test_deduplication_of_indices_by_optimizers_is_skipped(row_shape: tuple[int, ...]) -> None:
    values = values_of(0, (3, *row_shape))
    with tf.Graph().as_default():
        rows = tf.IndexedSlices(
            tf.compat.v1.placeholder_with_default(values, [None, *row_shape]),
            tf.compat.v1.placeholder_with_default([5, 1, 4], [None]),
        )
        variable = tf.Variable(np.ones((9, *row_shape), np.float32))
        optimizer = tf.compat.v1.train.AdagradOptimizer(0.5)
        update = optimizer.apply_gradients([(rows, variable)])
        accumulator = optimizer.get_slot(variable, "accumulator")
        skip_deduplication(rows)
        (apply,) = (op for op in update.graph.get_operations() if "SparseApply" in op.type)
        assert {rows.values.op.name, rows.indices.op.name} <= {
            each.op.name for each in apply.inputs
        }
        with tf.compat.v1.Session() as run:
            run.run(tf.compat.v1.global_variables_initializer())
            run.run(update)
            trained, squares = run.run([variable, accumulator])
    expected_squares = np.full((9, *row_shape), 0.1, np.float32)
    expected_squares[[5, 1, 4]] += values**2
    expected = np.ones((9, *row_shape), np.float32)
    expected[[5, 1, 4]] -= 0.5 * values / np.sqrt(expected_squares[[5, 1, 4]])
    np.testing.assert_allclose(squares, expected_squares, rtol=1e-6)
    np.testing.assert_allclose(trained, expected, rtol=1e-5)
