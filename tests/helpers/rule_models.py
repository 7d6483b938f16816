"""Estimators of a small regression, for the rules of the accelerator estimator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import numpy as np
import tensorflow as tf

import estimator_ext

estimator_ext.install()

BATCH, FEATURES = 4, 3
MODES = tf.estimator.ModeKeys
X = np.random.RandomState(0).standard_normal((400, FEATURES))
Y = X.sum(-1, keepdims=True) + 1.0


def data(batches: int, features_only: bool = False) -> Callable[[], tf.data.Dataset]:
    """Returns an input_fn with batches of the same examples, in order."""

    def input_fn() -> tf.data.Dataset:
        arrays = X if features_only else (X, Y)
        return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH).take(batches)

    return input_fn


def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
    """Builds a network with variables of Keras and of TensorFlow, dropout and a moving average."""
    hidden = tf.keras.layers.Dense(5, activation="tanh", dtype="float64")(features)
    hidden = tf.nn.dropout(hidden, 0.2) if mode == MODES.TRAIN else hidden
    kernel = tf.compat.v1.get_variable(
        "kernel", [5, 1], tf.float64, tf.compat.v1.ones_initializer()
    )
    outputs = tf.matmul(hidden, kernel)
    if mode == MODES.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"y": outputs, "x": features})
    loss = tf.reduce_mean((outputs - labels) ** 2)
    if mode == MODES.EVAL:
        mean = tf.compat.v1.metrics.mean(outputs)
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops={"mean": mean})
    tf.compat.v1.summary.scalar("size", tf.reduce_mean(tf.abs(features)))
    observed = tf.compat.v1.get_variable(
        "seen", [], tf.int64, tf.compat.v1.zeros_initializer(), trainable=False
    )
    step = tf.compat.v1.train.get_global_step()
    with tf.control_dependencies([observed.assign_add(tf.shape(features, tf.int64)[0])]):
        train_op = tf.compat.v1.train.AdamOptimizer(0.05).minimize(loss, step)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def make_estimator(
    model_dir: Path, build: Any = model_fn, strict: bool = True, **options: Any
) -> Any:
    """Creates an estimator; `options` are those of RunConfig and Estimator."""
    own = ("params", "train_batch_size", "eval_batch_size", "predict_batch_size")
    arguments = {name: options.pop(name) for name in own if name in options}
    config = estimator_ext.RunConfig(tf_random_seed=1, strict=strict, **options)
    return estimator_ext.Estimator(build, str(model_dir), config, **arguments)


class Losses(tf.estimator.SessionRunHook):
    """Records the reported loss of each run of the session."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self.ended = 0

    def begin(self) -> None:
        self._loss = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.LOSSES)[-1]

    def before_run(self, run_context: Any) -> Any:
        return tf.estimator.SessionRunArgs(self._loss)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.found.append(run_values.results)

    def end(self, session: tf.compat.v1.Session) -> None:
        self.ended += 1


def evaluate(tmp_path: Path, spec: Callable[..., Any], batches: int = 3) -> Any:
    def build(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        return spec(mode, tf.reduce_mean(features), features, labels)

    def input_fn() -> tf.data.Dataset:
        rows = BATCH * batches - 1  # the last batch is smaller
        return tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(BATCH)

    return make_estimator(tmp_path, build).evaluate(input_fn)
