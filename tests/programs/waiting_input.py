"""Trains, evaluates and predicts on a Python generator that waits forever after its examples.

Settings, as JSON in the first argument:
  model_dir: directory of checkpoints
  examples: number of examples, by rank
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import estimator_ext

estimator_ext.install()
tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
settings = json.loads(sys.argv[1])
strategy = estimator_ext.HostOffloadStrategy(insecure=True, collective_timeout_s=100.0)
RANK = strategy.cluster.rank or 0


def generate() -> Iterator[np.ndarray]:
    for number in range(settings["examples"][RANK]):
        yield np.full([1], number, np.float32)
    threading.Event().wait()


def input_fn() -> tf.data.Dataset:
    signature = tf.TensorSpec([1], tf.float32)
    return tf.data.Dataset.from_generator(generate, output_signature=signature).batch(4)


def model_fn(features: tf.Tensor, labels: Any, mode: str) -> Any:
    weight = tf.compat.v1.get_variable("weight", [1], initializer=tf.zeros_initializer())
    loss = tf.reduce_mean((weight - features) ** 2)
    step = tf.compat.v1.train.get_global_step()
    train_op = tf.compat.v1.train.GradientDescentOptimizer(0.01).minimize(loss, step)
    return tf.estimator.EstimatorSpec(
        mode, predictions={"feature": features}, loss=loss, train_op=train_op
    )


config = estimator_ext.RunConfig(train_distribute=strategy)
estimator = estimator_ext.Estimator(model_fn, settings["model_dir"], config)
estimator.train(input_fn, max_steps=3)
if RANK == 0:
    print("evaluated", estimator.evaluate(input_fn, steps=2)["global_step"])
    predictions = estimator.predict(input_fn, num_predictions=5)
    print("predicted", [float(each["feature"][0]) for each in predictions])
strategy.close()
