"""Trains with TensorFlow's own strategy, through `estimator_ext.train_and_evaluate`."""

from __future__ import annotations

import sys

import tensorflow as tf
from one_weight import model_fn

import estimator_ext

estimator_ext.install()


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(([[1.0]], [[2.0]])).repeat()


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
