"""Trains, evaluates and predicts on a Python generator that waits after its examples.

Settings, as JSON in the first argument:
  model_dir: directory of checkpoints
  examples: number of examples, by rank
  is_released: true ends the wait of the generator while the program exits
  exit_s: limit of the wait for sessions at the exit
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import one_weight
import tensorflow as tf


# registered before the import of estimator_ext, so that it is called after the exit's own wait
@atexit.register
def report() -> None:
    is_closing = any(thread.name == "session-close" for thread in threading.enumerate())
    print("a session is being closed" if is_closing else "all sessions are closed")


import estimator_ext  # noqa: E402
from estimator_ext.session import guard  # noqa: E402

estimator_ext.install()
tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
settings = json.loads(sys.argv[1])
strategy = estimator_ext.HostOffloadStrategy(insecure=True, collective_timeout_s=100.0)
RANK = strategy.cluster.rank or 0
released = threading.Event()
guard.EXIT_S = settings["exit_s"]


def generate() -> Iterator[np.ndarray]:
    for number in range(settings["examples"][RANK]):
        yield np.full([1], number, np.float32)
    released.wait()


def input_fn() -> tf.data.Dataset:
    signature = tf.TensorSpec([1], tf.float32)
    return tf.data.Dataset.from_generator(generate, output_signature=signature).batch(4)


def model_fn(features: tf.Tensor, labels: Any, mode: str) -> Any:
    return one_weight.model_fn(features, features, mode)


config = estimator_ext.RunConfig(train_distribute=strategy)
estimator = estimator_ext.Estimator(model_fn, settings["model_dir"], config)
estimator.train(input_fn, max_steps=3)
if RANK == 0:
    print("evaluated", estimator.evaluate(input_fn, steps=2)["global_step"])
    predictions = estimator.predict(input_fn, num_predictions=5)
    print("predicted", [float(each["feature"][0]) for each in predictions])
strategy.close()
if settings["is_released"]:
    atexit.register(released.set)  # called first
