"""Trains one weight on batches that take much longer to make than to learn from."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import estimator_ext

estimator_ext.install()

STEPS = 20


def batches() -> Iterator[Any]:
    while True:
        time.sleep(0.05)  # what this input costs
        yield [[1.0]] * 8


def input_fn() -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(
        batches, output_signature=tf.TensorSpec([8, 1], tf.float32)
    )


def model_fn(features: tf.Tensor, mode: str) -> Any:
    weight = tf.compat.v1.get_variable("weight", [1, 1])
    loss = tf.reduce_mean(tf.square(tf.matmul(features, weight)))
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


strategy = estimator_ext.HostOffloadStrategy()
config = estimator_ext.RunConfig(model_dir=sys.argv[1], train_distribute=strategy)
estimator_ext.Estimator(model_fn, config=config).train(input_fn, max_steps=STEPS)
