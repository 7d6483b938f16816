"""One worker: trains a model in each way with one seed, and reports the test accuracy."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import tensorflow as tf

import estimator_ext
from benchmarks import common, local_ways
from benchmarks.local_quality import tasks

estimator_ext.install()

_EVAL_BATCH = 2048


def make_model_fn(task: tasks.Task) -> Any:
    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        logits = task.logits(features)
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        )
        if mode == tf.estimator.ModeKeys.EVAL:
            accuracy = tf.compat.v1.metrics.accuracy(labels, tf.argmax(logits, axis=1))
            metrics = {"accuracy": accuracy}
            return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
        step = tf.compat.v1.train.get_global_step()
        rate = tf.compat.v1.train.cosine_decay(task.learning_rate, step, task.steps)
        train_op = tf.compat.v1.train.AdamOptimizer(rate).minimize(loss, step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def make_train_input_fn(examples: tasks.Examples, task: tasks.Task, seed: list[int]) -> Any:
    """Returns an input_fn with another order of the examples in each epoch."""
    random, needed = np.random.default_rng(seed), task.steps * task.batch
    epochs = [random.permutation(examples.count) for _ in range(-(-needed // examples.count))]
    numbers = np.concatenate(epochs)[:needed].reshape(task.steps, task.batch)

    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(numbers).map(examples.pick).prefetch(4)

    return input_fn


def make_test_input_fn(examples: tasks.Examples) -> Any:
    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.range(examples.count).batch(_EVAL_BATCH).map(examples.pick)

    return input_fn


def train(name: str, task: tasks.Task, seed: int) -> None:
    """Trains once, and reports the test accuracy on rank 0.

    Args:
      name: one of the ways.
      task: the task.
      seed: of initial values and the order of examples.
    """

    def new_outer() -> Any:
        return tf.compat.v1.train.MomentumOptimizer(*task.outer, use_nesterov=True)

    options = local_ways.options_of(local_ways.WAYS[name], task.every, new_outer)
    strategy = estimator_ext.HostOffloadStrategy(**options)
    rank = strategy.cluster.rank or 0
    examples, test = task.load(rank)
    tf.keras.utils.set_random_seed(seed)  # initial values
    config = estimator_ext.RunConfig(
        train_distribute=strategy,
        tf_random_seed=seed,
        save_checkpoints_steps=task.steps,
        save_summary_steps=None,
        log_step_count_steps=None,
    )
    with tempfile.TemporaryDirectory() as model_dir:
        estimator = estimator_ext.Estimator(make_model_fn(task), model_dir, config)
        started_s = time.monotonic()
        train_input_fn = make_train_input_fn(examples, task, [seed, rank])
        estimator.train(train_input_fn, max_steps=task.steps)
        seconds = time.monotonic() - started_s
        if rank == 0:
            metrics = estimator.evaluate(make_test_input_fn(test))
            common.report(
                way=name,
                accuracy=float(metrics["accuracy"]),
                loss=float(metrics["loss"]),
                seconds=seconds,
            )
    strategy.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=tasks.TASKS, required=True)
    parser.add_argument("--ways", nargs="+", choices=local_ways.WAYS, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--outer", type=float, nargs=2, help="rate and momentum")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--every", type=int)
    parser.add_argument("--learning-rate", type=float)
    args = parser.parse_args()
    names = ("outer", "steps", "every", "learning_rate")
    chosen = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    task = dataclasses.replace(tasks.TASKS[args.task], **chosen)
    for name in args.ways:
        train(name, task, args.seed)


if __name__ == "__main__":
    main()
