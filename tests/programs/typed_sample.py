"""A training whose author checks its types: `tests/unit/test_types.py` does so with mypy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import tensorflow as tf
from typing_extensions import assert_type

import estimator_ext
import estimator_ext.horovod as hvd
import hostopt
from estimator_ext import tpu

Features = dict[str, tf.Tensor]


class Model:
    """A model with one variable."""

    weights: tf.Variable


def input_fn(input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(({"x": [[1.0]]}, [[1.0]])).repeat()


def loss_and_predictions(features: Features, labels: tf.Tensor) -> tuple[tf.Tensor, Features]:
    outputs = tf.compat.v1.layers.dense(features["x"], 1)
    return tf.reduce_mean(tf.square(outputs - labels)), {"outputs": outputs}


def model_fn(
    features: Features, labels: tf.Tensor, mode: str, params: Mapping[str, float]
) -> estimator_ext.EstimatorSpec:
    loss, predictions = loss_and_predictions(features, labels)
    optimizer = estimator_ext.LossScaleOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(params["rate"]), scale=2.0**10, growth_steps=0
    )

    def update(host_loss: tf.Tensor) -> tf.Operation:
        variables = tf.compat.v1.trainable_variables()
        pairs = zip(tf.gradients(host_loss, variables), variables)
        return optimizer.apply_gradients(estimator_ext.reduce_gradients(pairs))

    def metrics(host_loss: tf.Tensor) -> dict[str, tuple[tf.Tensor, tf.Operation]]:
        return {"mean_loss": tf.compat.v1.metrics.mean(host_loss)}

    spec = estimator_ext.EstimatorSpec(
        mode,
        predictions,
        loss,
        train_op=tf.identity(loss),
        training_hooks=[tf.compat.v1.train.NanTensorHook(loss)],
        host_call=(update, [loss]),
        eval_metrics=(metrics, {"host_loss": loss}),
    )
    return assert_type(spec, estimator_ext.EstimatorSpec)


def strategy_of(directory: Path) -> estimator_ext.HostOffloadStrategy:
    strategy = estimator_ext.HostOffloadStrategy(
        auto_shard="data", bucket_mb=4.0, debug_dir=directory / "debug"
    )
    assert_type(strategy.accelerator, str)
    assert_type(strategy.cluster, hostopt.Cluster)
    assert_type(strategy.cluster.rank, Optional[int])
    assert_type(strategy.options, hostopt.Options)
    assert_type(strategy.communicator, hostopt.Communicator)
    assert_type(strategy.run(len, (["one", "two"],)), int)
    strategy.record_timeline(directory / "trace.json")
    strategy.update_config_proto(None)
    strategy.gather(tf.constant([1.0]), axis=0)
    strategy.close()
    return strategy


def config_of(directory: Path) -> estimator_ext.RunConfig:
    config = estimator_ext.RunConfig(
        str(directory),
        train_distribute=strategy_of(directory),
        save_checkpoints_steps=10,
        accumulate_steps=2,
        uneven_data="stop",
        timeline=directory / "trace.json",
    )
    assert_type(config.accumulate_steps, int)
    assert_type(config.uneven_data, str)
    assert_type(config.resume_data, str)
    assert_type(config.iterations_per_loop, int)
    assert_type(config.prefetch_depth, Optional[int])
    assert_type(config.strict, bool)
    assert_type(config.data_service, Optional[str])
    return config


def train(directory: Path) -> float | None:
    estimator_ext.install(contrib=True)
    estimator = estimator_ext.Estimator(
        model_fn, directory, config_of(directory), {"rate": 0.1}, train_batch_size=8
    )
    hooks = [tf.compat.v1.train.StepCounterHook()]
    assert_type(estimator.train(input_fn, hooks, max_steps=10), estimator_ext.Estimator)
    assert_type(estimator.evaluate(input_fn, steps=1, name="night"), dict[str, Any])
    assert_type(estimator.predict(input_fn, ["outputs"], num_predictions=3), Iterator[Any])
    assert_type(estimator_ext.adopt(estimator), estimator_ext.Estimator)
    metrics, exports = estimator_ext.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(input_fn, max_steps=20),
        [tf.estimator.EvalSpec(input_fn, name="day"), tf.estimator.EvalSpec(input_fn)],
    )
    assert_type(metrics, Optional[Mapping[str, Any]])
    assert_type(exports, Union[list[Any], dict[str, Any]])
    return None if metrics is None else float(metrics["loss"])


def train_alone(directory: Path) -> tpu.TPUEstimator:
    def tpu_model_fn(features: Features, labels: tf.Tensor, mode: str) -> tpu.TPUEstimatorSpec:
        loss, predictions = loss_and_predictions(features, labels)
        optimizer = tpu.CrossShardOptimizer(tf.compat.v1.train.AdamOptimizer())
        train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
        host_call = (tf.print, [loss])
        spec = tpu.TPUEstimatorSpec(mode, predictions, loss, train_op, host_call=host_call)
        return assert_type(spec, tpu.TPUEstimatorSpec)

    options = tpu.TPUConfig(per_host_input_for_training=tpu.InputPipelineConfig.PER_HOST_V2)
    config = tpu.RunConfig(options, model_dir=directory)
    assert_type(config.tpu_config, tpu.TPUConfig)
    estimator = tpu.TPUEstimator(tpu_model_fn, directory, config, use_tpu=False)
    return assert_type(estimator.train(input_fn, steps=1), tpu.TPUEstimator)


def average(values: list[float]) -> float:
    options = hostopt.Options(token_file=Path("token"), compression="bf16")
    cluster = hostopt.Cluster.from_tf_config()
    assert_type(cluster.ring, tuple[hostopt.Task, ...])
    with hostopt.connect(cluster, options) as communicator:
        assert_type(communicator.rank, int)
        hook = estimator_ext.BroadcastVariablesHook(communicator)
        hook.begin()
        total = communicator.all_reduce(np.array(values), hostopt.ReduceOp.AVERAGE)
        assert_type(total, np.ndarray[Any, Any])
        return float(total.sum())


def average_as_horovod_does(values: list[float]) -> tf.Tensor:
    hvd.init()
    assert_type(hvd.rank(), int)
    assert_type(hvd.size(), int)
    return hvd.allreduce(tf.constant(values), op=hvd.Average)
