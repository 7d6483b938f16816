"""Sessions with more reductions per step than threads, in any order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from harness import reserved_addresses
from strategies import as_ranks, session

import estimator_ext
import hostopt
import hostopt.tensorflow

estimator_ext.install()


SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
COUNT = 100


@pytest.fixture
def addresses() -> Iterator[list[str]]:
    with reserved_addresses(2) as result:
        yield result


@pytest.fixture(params=["auto", "grpc"])
def communication(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HOSTOPT_COMMUNICATION", request.param)
    return request.param


@pytest.fixture(params=[1, 2], ids=lambda count: f"threads{count}")
def threads(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Sets the number of inter-op threads of each rank, as in separate processes."""
    return {"inter_op_parallelism_threads": request.param, "use_per_session_threads": True}


pytestmark = pytest.mark.usefixtures("communication")


def spelled(number: int) -> str:
    return f"value_{chr(97 + number // 26)}{chr(97 + number % 26)}"


def numbered(number: int) -> str:
    return f"value_{number}"


def reduce_one(
    strategy: Any, number: int, values: np.ndarray, name: Callable[[int], str] = spelled
) -> tf.Tensor:
    """Reduces by one of several functions, chosen by the number; all compute sums."""
    tensor = tf.constant(values, name=name(number))
    if number % 3 == 0:
        return strategy.reduce(SUM, tensor, axis=None)
    if number % 3 == 1:
        return strategy.reduce(MEAN, tensor, axis=None) * strategy.num_replicas_in_sync
    return hostopt.tensorflow.all_reduce(tensor, strategy.communicator)


def value(number: int, rank: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, 100.0 * rank + number, np.float32)


def shape_of(kind: str, number: int) -> tuple[int, ...]:
    """Returns the shape; tensors of equal shape differ only in their names."""
    return (3,) if kind == "equal shapes" else (number % 7, 2)


def reduce_all(
    strategy: Any, shapes: str, order: str, fields: dict[str, Any], name: Callable[[int], str]
) -> Any:
    """Returns the sums of three runs, by number; rank 1 builds them in this order."""
    rank = strategy.cluster.rank
    numbers = list(range(COUNT))
    if order == "other order" and rank == 1:
        np.random.RandomState(1).shuffle(numbers)
    with strategy.scope():
        sums = {
            str(n): reduce_one(strategy, n, value(n, rank, shape_of(shapes, n)), name)
            for n in numbers
        }
    with session(strategy, **fields) as run:
        return [run.run(sums) for _ in range(3)]


def check_sums(results: list[dict[str, np.ndarray]], shapes: str) -> None:
    for result in results:
        for number in range(COUNT):
            shape = shape_of(shapes, number)
            expected = value(number, 0, shape) + value(number, 1, shape)
            np.testing.assert_array_equal(result[str(number)], expected, err_msg=str(number))


@pytest.mark.parametrize(
    ("order", "shapes"), [("same order", "other shapes"), ("other order", "equal shapes")]
)
def test_a_hundred_reductions_in_one_run(
    addresses: list[str], threads: dict[str, Any], order: str, shapes: str
) -> None:
    for results in as_ranks(
        addresses, lambda strategy: reduce_all(strategy, shapes, order, threads, spelled)
    ):
        check_sums(results, shapes)


@pytest.mark.parametrize("shapes", ["equal shapes", "other shapes"])
def test_numbered_names_in_another_order_are_correct_or_refused(
    addresses: list[str], shapes: str
) -> None:
    try:
        ranks = as_ranks(
            addresses, lambda strategy: reduce_all(strategy, shapes, "other order", {}, numbered)
        )
    except hostopt.CollectiveMismatchError as error:
        named = set(re.findall(r"value_\d+", str(error)))
        assert len(named) >= 2, error
    else:
        for results in ranks:
            check_sums(results, shapes)


def test_reductions_that_depend_on_each_other(
    addresses: list[str], threads: dict[str, Any]
) -> None:
    """Each value of a layer of ten depends on all sums of the previous layer."""

    def work(strategy: Any) -> Any:
        start = np.full(2, strategy.cluster.rank + 1.0, np.float64)
        with strategy.scope():
            layer = [tf.constant(start)] * 10
            for depth in range(3):
                total = tf.add_n(layer) / 10
                layer = [
                    strategy.reduce(SUM, tf.identity(total + n, f"value_{depth}_{n}"), axis=None)
                    for n in range(10)
                ]
        with session(strategy, **threads) as run:
            return [run.run(layer) for _ in range(3)]

    mean, last = 1.5, np.arange(10)  # over the ranks
    for _ in range(2):
        mean = float(np.mean(2 * (mean + last)))
    for results in as_ranks(addresses, work):
        for layer in results:
            expected = np.repeat((2 * (mean + last))[:, None], 2, 1)
            np.testing.assert_allclose(layer, expected, rtol=1e-12)


def test_variables_synchronised_on_read(addresses: list[str], threads: dict[str, Any]) -> None:
    def work(strategy: Any) -> Any:
        rank = strategy.cluster.rank
        with strategy.scope():
            variables = [
                tf.compat.v1.get_variable(
                    f"v{n}",
                    initializer=np.zeros(3),
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.SUM,
                )
                for n in range(30)
            ]
            changed = [v.assign_add(np.full(3, n + 10.0 * rank)) for n, v in enumerate(variables)]
            with tf.control_dependencies([tensor.op for tensor in changed]):
                sums = [strategy.extended.read_var(v) for v in variables]
        with session(strategy, **threads) as run:
            run.run([v.initializer for v in variables])
            return [run.run(sums) for _ in range(2)]

    for results in as_ranks(addresses, work):
        for step, result in enumerate(results, 1):
            expected = [np.full(3, step * (2 * n + 10.0)) for n in range(30)]
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("order", ["same order", "other order"])
def test_initial_values_come_from_rank_0_by_name(
    addresses: list[str], threads: dict[str, Any], order: str
) -> None:
    def work(strategy: Any) -> Any:
        rank = strategy.cluster.rank
        numbers = range(20) if rank == 0 or order == "same order" else reversed(range(20))
        with strategy.scope():
            variables = {
                str(n): tf.compat.v1.get_variable(
                    f"v{n}", initializer=value(n, strategy.cluster.rank, (3,))
                )
                for n in numbers
            }
        with session(strategy, **threads) as run:
            run.run(tf.compat.v1.global_variables_initializer())
            return run.run(variables)

    for result in as_ranks(addresses, work):
        for number in range(20):
            expected = value(number, 0, (3,))
            np.testing.assert_array_equal(result[str(number)], expected, err_msg=f"v{number}")


def test_three_ranks_that_share_the_threads_of_one_process() -> None:
    def work(strategy: Any) -> Any:
        rank = strategy.cluster.rank
        with strategy.scope():
            sums = [reduce_one(strategy, n, value(n, rank, (3,))) for n in range(30)]
        with session(strategy) as run:
            return [run.run(sums) for _ in range(3)]

    with reserved_addresses(3) as addresses:
        ranks = as_ranks(addresses, work)
    for results in ranks:
        for result in results:
            expected = [sum(value(n, rank, (3,)) for rank in range(3)) for n in range(30)]
            np.testing.assert_array_equal(result, expected)
