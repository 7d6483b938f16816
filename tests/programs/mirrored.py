"""Trains with TensorFlow's own strategy, through `estimator_ext.train_and_evaluate`."""

from __future__ import annotations

import sys

import tensorflow as tf

import estimator_ext

estimator_ext.install()


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(([[1.0]], [[2.0]])).repeat()


def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> tf.estimator.EstimatorSpec:
    weight = tf.compat.v1.get_variable("w", [1, 1])
    loss = tf.reduce_mean((features @ weight - labels) ** 2)
    step = tf.compat.v1.train.get_global_step()
    train_op = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def main(model_dir: str) -> None:
    strategy = tf.distribute.experimental.MultiWorkerMirroredStrategy()
    config = estimator_ext.RunConfig(train_distribute=strategy)
    estimator = estimator_ext.Estimator(model_fn, model_dir, config)
    estimator_ext.train_and_evaluate(
        estimator, tf.estimator.TrainSpec(data, max_steps=5), tf.estimator.EvalSpec(data, steps=2)
    )
    print("ENDED at step", estimator.get_variable_value("global_step"), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
