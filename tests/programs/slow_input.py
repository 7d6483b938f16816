"""Trains a model on batches that take much longer to make than to learn from."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from one_weight import model_fn

import estimator_ext

estimator_ext.install()

STEPS = 20


def batches() -> Iterator[Any]:
    while True:
        time.sleep(0.05)  # what this input costs
        yield [[1.0]] * 8, [[1.0]] * 8


def input_fn() -> tf.data.Dataset:
    batch = tf.TensorSpec([8, 1], tf.float32)
    return tf.data.Dataset.from_generator(batches, output_signature=(batch, batch))


strategy = estimator_ext.HostOffloadStrategy()
config = estimator_ext.RunConfig(model_dir=sys.argv[1], train_distribute=strategy)
estimator_ext.Estimator(model_fn, config=config).train(input_fn, max_steps=STEPS)
