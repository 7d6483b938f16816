"""Trains a model of some megabytes with Adam, and prints the memory of its own of each rank.

Arguments: megabytes of the variables.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import estimator_ext

estimator_ext.install()
train = tf.compat.v1.train
WIDTH = 1024  # 4 MiB for each variable


class PrintsMemory(tf.estimator.SessionRunHook):
    """Prints the memory that no other process shares, in bytes, after each step."""

    def after_run(self, run_context: Any, run_values: Any) -> None:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        private = [line.split()[1] for line in lines if line.startswith("Private_")]
        print("PRIVATE", 1024 * sum(map(int, private)), flush=True)


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
    for index in range(params["megabytes"] // 4):
        weights = tf.compat.v1.get_variable(f"weights{index}", [WIDTH, WIDTH])
        features = tf.tanh(features @ weights)
    loss = tf.reduce_mean(features**2)
    train_op = train.AdamOptimizer(0.001).minimize(loss, train.get_global_step())
    hooks = [PrintsMemory()]
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=hooks)


def input_fn() -> Any:
    return tf.data.Dataset.from_tensors(np.ones((2, WIDTH), np.float32)).repeat()


config = estimator_ext.RunConfig(
    train_distribute=estimator_ext.HostOffloadStrategy(),
    save_checkpoints_steps=None,
    save_checkpoints_secs=None,
)
estimator = estimator_ext.Estimator(model_fn, None, config, {"megabytes": int(sys.argv[1])})
estimator.train(input_fn, steps=3)
