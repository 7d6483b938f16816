"""Trains several times on scalars of unknown shape, with an unused feature that cannot be read.

The metrics are chosen: a loss that is best in the middle, and bytes, as summaries have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import estimator_ext

estimator_ext.install()


def examples() -> Iterator[Any]:
    for _ in range(100):
        yield 1.0, 2.0


def fail() -> Any:
    raise ZeroDivisionError("the unused feature")


def input_fn() -> Any:
    data = tf.data.Dataset.from_generator(examples, (tf.float32, tf.float32))
    x, y = tf.compat.v1.data.make_one_shot_iterator(data).get_next()
    return {"x": x, "unused": tf.numpy_function(fail, [], tf.float32)}, y


def model_fn(features: Any, labels: tf.Tensor, mode: str) -> Any:
    weight = tf.compat.v1.get_variable("weight", [])
    loss = tf.square(features["x"] * weight - labels)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


from estimator_ext.estimator.progress import write_evaluation  # noqa: E402

strategy = estimator_ext.HostOffloadStrategy()
config = estimator_ext.RunConfig(model_dir=sys.argv[1], train_distribute=strategy)
estimator = estimator_ext.Estimator(model_fn, config=config)
estimator.train(input_fn, steps=3)
estimator.train(input_fn, max_steps=5)
estimator.train(input_fn, steps=2)
for step, loss in ((2, float("nan")), (3, 2.0), (7, 3.0)):
    write_evaluation({"global_step": step, "loss": loss, "curve": b"\\0"}, None)
