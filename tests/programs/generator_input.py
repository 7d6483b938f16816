"""Trains on a Python generator, records each batch, and may be killed in the middle.

Settings, as JSON in the first argument:
  model_dir, records: directories of checkpoints, and of a file of batches per rank
  pipeline: name of a function of `PIPELINES`
  length: number of examples of the generator
  steps, max_steps: arguments of each `train`
  trains: number of calls of `train`
  kill: null, or [rank, step]: the rank ends with SIGKILL before the step, counted from 0
  is_noisy: true multiplies the loss by a number of a tf.random.Generator
  run_config, strategy: arguments
  by_rank: settings of single ranks
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from session_hooks import BeforeStep

import estimator_ext

estimator_ext.install()
tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)

DEFAULTS: dict[str, Any] = {
    "pipeline": "documentation",
    "length": 26,
    "steps": None,
    "max_steps": None,
    "trains": 1,
    "kill": None,
    "is_noisy": False,
    "run_config": {"resume_data": "skip"},
    "strategy": {},
    "by_rank": {},
}
strategy = estimator_ext.HostOffloadStrategy(
    insecure=True, **json.loads(sys.argv[1]).get("strategy", {})
)
RANK, SIZE = strategy.cluster.rank or 0, strategy.cluster.size
settings = {**DEFAULTS, **json.loads(sys.argv[1])}
settings.update(settings["by_rank"].get(str(RANK), {}))


def examples() -> Iterator[np.ndarray]:
    """The examples of this rank, each a number that no other rank has."""
    for number in range(settings["length"]):
        yield np.array([1000 * RANK + number], np.float32)


def generated(generator: Any = examples) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(
        generator, output_signature=tf.TensorSpec([1], tf.float32)
    )


def documentation() -> tf.data.Dataset:
    """The pipeline of the IPU documentation: a generator, repeated, in full batches."""
    return generated().repeat().batch(4, drop_remainder=True).prefetch(2)


def random() -> tf.data.Dataset:
    """Random numbers in the order of a generator, a shuffle and a map."""

    def permuted() -> Iterator[np.ndarray]:
        yield from np.random.RandomState(4).permutation([*examples()])

    def noisy(example: tf.Tensor) -> tf.Tensor:
        return example + tf.random.uniform([1], seed=7)

    data = generated(permuted).shuffle(10, seed=3).map(noisy).repeat().batch(4)
    return data.map(lambda batch: batch + tf.random.normal([1]))


def finite() -> tf.data.Dataset:
    return generated().batch(4)


def stored() -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices(np.stack([*examples()]))
    return data.shuffle(10, seed=3).repeat().batch(4)


def tensors() -> tf.Tensor:
    return tf.compat.v1.data.make_one_shot_iterator(finite().repeat()).get_next()


def queue() -> tf.Tensor:
    """Tensors of a queue of TensorFlow 1, without an iterator."""
    rows = np.reshape([*examples()], [-1, 1])
    return tf.compat.v1.train.batch(
        [tf.compat.v1.train.input_producer(rows, shuffle=False).dequeue()], 4
    )


def slow() -> tf.data.Dataset:
    """Batches of which each takes some time on this rank."""

    def examples_of_time() -> Iterator[np.ndarray]:
        for example in itertools.cycle(examples()):
            time.sleep(settings["example_s"])
            yield example

    return generated(examples_of_time).batch(4)


def unstable() -> tf.data.Dataset:
    """Another order in each process."""

    def permuted() -> Iterator[np.ndarray]:
        yield from np.random.RandomState(os.getpid()).permutation([*examples()])

    return generated(permuted).repeat().batch(4)


PIPELINES = {
    each.__name__: each
    for each in (documentation, random, finite, stored, tensors, queue, slow, unstable)
}


def record(batch: np.ndarray) -> np.ndarray:
    with Path(settings["records"], f"{RANK}.jsonl").open("a") as file:
        file.write(json.dumps(batch.ravel().tolist()) + "\n")
    return batch


def model_fn(features: tf.Tensor, labels: Any, mode: str) -> Any:
    recorded = tf.numpy_function(record, [features], tf.float32)
    recorded.set_shape([None, 1])
    weight = tf.compat.v1.get_variable("weight", [1], initializer=tf.zeros_initializer())
    loss = tf.reduce_mean((weight - recorded) ** 2)
    if settings["is_noisy"]:
        loss *= tf.random.Generator.from_seed(3).uniform([])
    step = tf.compat.v1.train.get_global_step()
    train_op = tf.compat.v1.train.GradientDescentOptimizer(0.01).minimize(loss, step)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def kill(run_context: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    Path(settings["records"]).mkdir(parents=True, exist_ok=True)
    fields = {"save_checkpoints_steps": 3, "save_summary_steps": None, "tf_random_seed": 1}
    config = estimator_ext.RunConfig(
        train_distribute=strategy, **{**fields, **settings["run_config"]}
    )
    estimator = estimator_ext.Estimator(model_fn, settings["model_dir"], config)
    rank, step = settings["kill"] or (None, 0)
    for _ in range(settings["trains"]):
        estimator.train(
            PIPELINES[settings["pipeline"]],
            hooks=[BeforeStep(step + 1, kill)] if rank == RANK else [],
            steps=settings["steps"],
            max_steps=settings["max_steps"],
        )
    strategy.close()


main()
