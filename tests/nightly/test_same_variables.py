"""Training on ranks creates the variables of the stock class, so checkpoints go both ways."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from by_name import halves
from harness import reserved_addresses
from strategies import as_ranks

import estimator_ext
import hostopt

estimator_ext.install()

v1 = tf.compat.v1
# ranks in one process: each needs threads to wait for the other
THREADS = v1.ConfigProto(inter_op_parallelism_threads=8, use_per_session_threads=True)
IDS = np.random.RandomState(0).permutation(8)[None]
DATA = {"id": IDS, "x": IDS.astype(np.float32)}, (IDS[..., None] % 3).astype(np.float32)
COLUMN = tf.feature_column.categorical_column_with_identity("id", 8)


@pytest.fixture
def addresses() -> Iterator[list[str]]:
    with reserved_addresses(2) as result:
        yield result


class Values(tf.estimator.SessionRunHook):
    """Reads all variables at the end."""

    def begin(self) -> None:
        self._variables = {v.op.name: v for v in v1.global_variables()}

    def end(self, session: v1.Session) -> None:
        self.found = session.run(self._variables)


# -- partitions ----------------------------------------------------------------------------


def lookups(features: Any, labels: tf.Tensor, mode: str) -> Any:
    """Reads a table by partition, as lookups of TensorFlow 1 do, and variables in a list."""
    with v1.variable_scope("model", partitioner=v1.fixed_size_partitioner(3)):
        table = v1.get_variable("table", [8, 1], initializer=v1.zeros_initializer())
        step = v1.get_variable("step", [], initializer=v1.ones_initializer())
    parts = v1.create_partitioned_variables([4, 1], [2, 1], v1.zeros_initializer(), name="parts")
    ids = features["id"]
    outputs = v1.nn.embedding_lookup(table, ids) + v1.nn.embedding_lookup(parts, ids % 4)
    loss = tf.reduce_mean((outputs * step - labels) ** 2)
    train_op = v1.train.AdagradOptimizer(0.5).minimize(loss, v1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def by_ranks(features: Any, labels: tf.Tensor, mode: str) -> Any:
    ranks = tf.distribute.get_strategy().num_replicas_in_sync
    split = v1.fixed_size_partitioner(ranks)
    table = v1.get_variable("table", [8, 1], partitioner=split)
    loss = tf.reduce_mean((v1.nn.embedding_lookup(table, features["id"]) - labels) ** 2)
    train_op = v1.train.GradientDescentOptimizer(0.5).minimize(loss, v1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


MODELS: dict[str, Callable[[], Any]] = {
    "by ranks": lambda: by_ranks,
    "lookups": lambda: lookups,
    "linear": lambda: v1.estimator.LinearRegressor([COLUMN]).model_fn,
    "dnn": lambda: (
        v1.estimator.DNNRegressor(
            [4],
            [tf.feature_column.embedding_column(COLUMN, 4)],
            input_layer_partitioner=v1.min_max_variable_partitioner(2, min_slice_size=1),
        ).model_fn
    ),
}


def train(model_dir: Path, kind: str, steps: int, strategy: Any = None) -> Any:
    """Trains with the stock class, or on a rank; returns the variables and the metrics."""
    options = {"model_dir": str(model_dir), "tf_random_seed": 3, "session_config": THREADS}
    config = tf.estimator.RunConfig(**options)
    estimator_class = tf.estimator.Estimator
    if strategy is not None:
        config = estimator_ext.RunConfig(train_distribute=strategy, **options)
        estimator_class = estimator_ext.Estimator
    estimator = estimator_class(MODELS[kind](), config=config)
    values, input_fn = Values(), halves(DATA)
    estimator.train(input_fn, hooks=[values], max_steps=steps)
    return values.found, estimator.evaluate(input_fn, steps=1)


def check_equal(found: Any, expected: Any) -> None:
    for ours, stock in zip(found, expected):
        assert ours.keys() == stock.keys()
        for name, value in stock.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", ["lookups", "linear", "dnn"])
def test_partitions_train_and_resume_both_ways_like_the_stock_class(
    tmp_path: Path, addresses: list[str], kind: str
) -> None:
    train(tmp_path / "stock", kind, 2)
    shutil.copytree(tmp_path / "stock", tmp_path / "ranks")
    stock = train(tmp_path / "stock", kind, 5)
    assert any("/part_0" in name for name in stock[0])
    for ours in as_ranks(addresses, lambda ring: train(tmp_path / "ranks", kind, 5, ring)):
        check_equal(ours, stock)
    stock = train(tmp_path / "stock", kind, 7)
    check_equal(train(tmp_path / "ranks", kind, 7), stock)


def test_partitions_that_depend_on_the_number_of_ranks_are_refused(
    tmp_path: Path, addresses: list[str]
) -> None:
    message = "'table' has 2 partitions in the training of .*model.ckpt-1, and 1 here. Give"
    with pytest.raises(hostopt.ConfigError, match=message):
        as_ranks(addresses, lambda ring: train(tmp_path, "by ranks", 1, ring))


# -- checkpoints of objects ----------------------------------------------------------------


def saved_by_object(features: Any, labels: tf.Tensor, mode: str) -> Any:
    weight = v1.get_variable("weight", [], initializer=v1.zeros_initializer())
    loss = tf.reduce_mean((weight * features["x"][:, None] - labels) ** 2)
    step = v1.train.get_global_step()
    train_op = v1.train.GradientDescentOptimizer(0.01).minimize(loss, step)
    saver = tf.train.Checkpoint(number=step, weight=weight)
    scaffold = v1.train.Scaffold(saver=saver)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, scaffold=scaffold)


def test_a_training_resumes_from_a_checkpoint_of_objects(
    tmp_path: Path, addresses: list[str]
) -> None:
    input_fn = halves(DATA)

    def work(strategy: Any) -> Any:
        config = estimator_ext.RunConfig(
            str(tmp_path / "ranks"), train_distribute=strategy, session_config=THREADS
        )
        estimator = estimator_ext.Estimator(saved_by_object, config=config)
        evaluate = tf.estimator.EvalSpec(input_fn, steps=1)
        return [
            estimator_ext.train_and_evaluate(
                estimator, tf.estimator.TrainSpec(input_fn, steps), evaluate
            )[0]
            for steps in (2, 5)
        ]

    stock = tf.estimator.Estimator(saved_by_object, str(tmp_path / "stock"))
    found, _ = as_ranks(addresses, work)
    for steps, metrics in zip((2, 5), found):
        stock.train(input_fn, max_steps=steps)
        expected = stock.evaluate(input_fn, steps=1)
        assert metrics["global_step"] == expected["global_step"] == steps
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
