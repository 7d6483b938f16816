"""The accelerator estimator's rules: batch sizes, datasets, metrics, loops, prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from rule_models import BATCH, FEATURES, Losses, X, data, make_estimator, model_fn
from summaries import summaries

import estimator_ext
import hostopt

estimator_ext.install()


def variables_of(estimator: Any) -> dict[str, Any]:
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


# -- metrics -------------------------------------------------------------------------------


# -- iterations_per_loop -------------------------------------------------------------------


def trained(estimator: Any, batches: int, **options: Any) -> tuple[dict[str, Any], list[float]]:
    """Returns the final variables, and the losses of each run of the session."""
    tf.keras.utils.set_random_seed(1)
    losses = Losses()
    estimator.train(data(batches), hooks=[losses, *options.pop("hooks", ())], **options)
    return variables_of(estimator), losses.found


def check_equal(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(result) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(result[name], value, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("with_strategy", [False, True])
@pytest.mark.parametrize("batches", [12, 10])  # 10: the data end within a loop
def test_a_loop_of_steps_equals_single_steps(
    tmp_path: Path, with_strategy: bool, batches: int
) -> None:
    options: dict[str, Any] = {}
    if with_strategy:  # the accelerator has copies of the variables, which change in the loop
        options["session_config"] = tf.compat.v1.ConfigProto(allow_soft_placement=False)
        strategy = estimator_ext.HostOffloadStrategy(accelerator="/device:CPU:1")
        options["train_distribute"] = strategy
        stepwise = make_estimator(tmp_path / "steps", **options)
    else:
        config = tf.estimator.RunConfig(tf_random_seed=1)
        stepwise = tf.estimator.Estimator(model_fn, str(tmp_path / "steps"), config)
    expected, step_losses = trained(stepwise, batches)
    estimator = make_estimator(tmp_path / "loops", iterations_per_loop=4, **options)
    result, losses = trained(estimator, batches)
    check_equal(result, expected)
    assert result["global_step"] == batches == result["seen"] / BATCH
    loops = batches // 4  # the runs of the session
    means = np.reshape(step_losses[: loops * 4], (loops, 4)).mean(-1)
    np.testing.assert_allclose(losses, means, rtol=1e-12)


def test_a_loop_runs_on_the_devices_of_a_step(tmp_path: Path) -> None:
    result: dict[str, list[str]] = {}

    class Trace(tf.estimator.SessionRunHook):
        def before_run(self, run_context: Any) -> Any:
            full = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
            return tf.estimator.SessionRunArgs([], options=full)

        def after_run(self, run_context: Any, run_values: Any) -> None:
            for device in run_values.run_metadata.step_stats.dev_stats:
                result[device.device[-5:]] = [node.node_name for node in device.node_stats]

    strategy = estimator_ext.HostOffloadStrategy(accelerator="/device:CPU:1")
    estimator = make_estimator(tmp_path, iterations_per_loop=6, train_distribute=strategy)
    estimator.train(data(6), hooks=[Trace()])
    products = [name for name in result["CPU:1"] if name.endswith("dense/MatMul")]
    updates = [name for name in result["CPU:0"] if name.endswith("/ResourceApplyAdam")]
    assert len(products) == 6
    assert len(updates) == 6 * 3  # variables
    assert not [name for name in result["CPU:0"] if "MatMul" in name]


class Parts(tf.keras.layers.Layer):
    """A layer with a weight and control flow."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(name="scale", shape=[], initializer="ones", dtype="float64")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        rows = tf.map_fn(lambda row: row * self.scale, inputs)
        return tf.cond(tf.reduce_sum(rows) > 0, lambda: rows, lambda: -rows)


def model_fn_of_many_parts(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
    """Control flow, functions, Python calls, tables, batch normalisation and sparse gradients."""
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.range(4, dtype=tf.int64), tf.range(4)[::-1]), 0
    )
    ids = table.lookup(tf.cast(tf.abs(features) * 2, tf.int64) % 4)
    rows = tf.compat.v1.get_variable("rows", [4, 2], tf.float64)
    hidden = tf.reshape(tf.nn.embedding_lookup(rows, ids), [-1, 2 * FEATURES])
    hidden = tf.keras.layers.BatchNormalization(dtype="float64")(hidden, training=True)
    hidden = Parts(dtype="float64")(hidden)
    hidden = tf.function(lambda x: x * 2)(hidden)
    shift = tf.numpy_function(lambda x: np.tanh(x).sum(), [features], tf.float64)
    loss = tf.reduce_mean((tf.reduce_sum(hidden, -1, keepdims=True) + shift - labels) ** 2)
    step = tf.compat.v1.train.get_global_step()
    optimizer = tf.compat.v1.train.MomentumOptimizer(0.01, 0.9)
    updates = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
    with tf.control_dependencies(updates):
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, step))


def test_a_model_of_many_parts_in_a_loop(tmp_path: Path) -> None:
    config = tf.estimator.RunConfig(tf_random_seed=1)
    stock = tf.estimator.Estimator(model_fn_of_many_parts, str(tmp_path / "steps"), config)
    expected, _ = trained(stock, 12)
    loops = make_estimator(tmp_path / "loops", model_fn_of_many_parts, iterations_per_loop=6)
    result, losses = trained(loops, 12)
    check_equal(result, expected)
    assert len(losses) == 2


def test_numbers_of_steps_that_are_not_multiples_of_the_loop(tmp_path: Path) -> None:
    estimator = make_estimator(tmp_path, iterations_per_loop=4)
    rule = "steps is 10, wanted a multiple of iterations_per_loop=4.*Give steps=12"
    for run in (estimator.train, estimator.evaluate):
        with pytest.raises(ValueError, match=rule):
            run(data(20), steps=10)
    estimator.train(data(20), steps=8)
    assert estimator.evaluate(data(20), steps=8)["global_step"] == 8


def test_max_steps_is_rounded_up_to_a_multiple_of_the_loop(tmp_path: Path) -> None:
    estimator = make_estimator(tmp_path, iterations_per_loop=4)
    result, _ = trained(estimator, 100, max_steps=10)
    assert result["global_step"] == 12
    again, losses = trained(estimator, 100, max_steps=11)
    assert again["global_step"] == 12
    assert not losses


def test_hooks_between_loops(tmp_path: Path) -> None:
    """Savers save after the loop in which they are due, and a stop happens after a loop."""
    saved = []

    class Listener(tf.compat.v1.train.CheckpointSaverListener):
        def after_save(self, session: Any, global_step: int) -> None:
            saved.append(int(global_step))

    estimator = make_estimator(
        tmp_path,
        iterations_per_loop=4,
        save_checkpoints_steps=8,
        save_summary_steps=4,
        log_step_count_steps=8,
    )
    stop = tf.compat.v1.train.StopAtStepHook(last_step=18)
    estimator.train(data(100), hooks=[stop], saving_listeners=[Listener()])
    assert saved == [0, 8, 16, 20]
    assert len(summaries(tmp_path, "global_step/sec")) == 2  # after 12 and 20 steps
    sizes = [size for _, _, size in summaries(tmp_path, "size")]
    assert len(sizes) == 5
    for loop, size in enumerate(sizes):  # of the last batch of the loop
        batch = X[BATCH * (4 * loop + 3) :][:BATCH]
        np.testing.assert_allclose(size, np.abs(batch).mean(), rtol=1e-6)


def test_loops_in_train_and_evaluate(tmp_path: Path) -> None:
    estimator = make_estimator(tmp_path, iterations_per_loop=4, save_checkpoints_steps=8)
    result, _ = tf.estimator.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(data(100), max_steps=18),
        tf.estimator.EvalSpec(data(100), steps=4, throttle_secs=0),
    )
    assert result["global_step"] == 20
    assert len(summaries(tmp_path / "eval", "mean")) == 3  # after 8, 16 and 20 steps


def test_a_hook_that_fetches_a_tensor_of_a_loop(tmp_path: Path) -> None:
    def build(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        spec = model_fn(features, labels, mode)
        hook = tf.compat.v1.train.LoggingTensorHook({"x": features}, every_n_iter=1)
        return spec._replace(training_hooks=[hook])

    estimator = make_estimator(tmp_path, build, iterations_per_loop=2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="fetches a tensor of model_fn"):
        estimator.train(data(4))


def test_a_host_call_in_a_loop(tmp_path: Path) -> None:
    def build(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        loss = tf.reduce_mean(features)
        return estimator_ext.EstimatorSpec(
            mode, loss=loss, train_op=loss, host_call=(lambda: loss, [])
        )

    with pytest.raises(
        ValueError, match=r"has a host_call and RunConfig\.iterations_per_loop is 2"
    ):
        make_estimator(tmp_path, build, iterations_per_loop=2).train(data(4))


def test_a_reference_variable_in_a_loop(tmp_path: Path) -> None:
    def build(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        weight = tf.compat.v1.get_variable("w", [], tf.float64, use_resource=False)
        loss = tf.reduce_mean(features) * weight
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=loss)

    with pytest.raises(hostopt.ConfigError, match="'w' is a reference variable"):
        make_estimator(tmp_path, build, iterations_per_loop=2).train(data(4))
