"""A model with one weight, for tests that do not depend on the model."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
    weight = tf.compat.v1.get_variable("weight", [1, 1])
    loss = tf.reduce_mean(tf.square(tf.matmul(features, weight) - labels))
    step = tf.compat.v1.train.get_global_step()
    train_op = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
    return tf.estimator.EstimatorSpec(mode, {"feature": features}, loss, train_op)
