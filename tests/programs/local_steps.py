"""Trains a linear model whose ranks synchronise every few steps; writes what tests compare."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from session_hooks import AfterStep, Dump

import estimator_ext
from estimator_ext.variables.sync_on_read import assign

estimator_ext.install()

SETTINGS: dict[str, Any] = {
    "model_dir": "",
    "dump_dir": "",
    "strategy": {},  # options of the strategy
    "inner": "sgd",
    "outer": None,
    "steps": 20,
    "batches": [],  # of each rank; none for endless data
    "rows": 4,
    "dtype": "float64",
    "checkpoint_steps": 100,
    "nan_at": [],  # rank and step with a NaN in the data
    "ask": [],  # rank and step after which a hook requests a stop
    "shapeless": False,
    "counter": "",  # "trainable", as tf.Variable(0) is, or "not trainable"
    "infinite": False,  # a variable that has no finite value before the first step
    "kill": [],  # rank and step after which it gets a signal
    "signal": "SIGKILL",
    "uneven_data": "join",
    "stuck": [],  # rank and step after which a hook never returns
    "busy": [],  # rank and step after which a hook returns only once the ring has failed
    "change": [],  # rank and step after which a variable is changed that no step changes
}
train = tf.compat.v1.train
OPTIMIZERS = {
    "sgd": lambda: train.GradientDescentOptimizer(0.1),
    "momentum": lambda: train.MomentumOptimizer(0.05, 0.9),
    "adam": lambda: train.AdamOptimizer(0.05),
    "ftrl": lambda: train.FtrlOptimizer(0.5),
    "adagrad_da": lambda: train.AdagradDAOptimizer(0.5, train.get_global_step()),
    "outer sgd": lambda: train.GradientDescentOptimizer(1.0),
    "nesterov": lambda: train.MomentumOptimizer(0.7, 0.9, use_nesterov=True),
    "outer adam": lambda: train.AdamOptimizer(0.02),
}


def batch(rank: int, step: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns features and labels of a rank in a step, from 0."""
    random = np.random.RandomState([rank, step])
    x = random.standard_normal((rows, 5))
    return x, x.sum(axis=1, keepdims=True) + 0.1 * random.standard_normal((rows, 1)) + rank


def make_input_fn(settings: dict[str, Any]) -> Any:
    def input_fn(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        rank, rows = input_context.input_pipeline_id, settings["rows"]
        count = settings["batches"][rank] if settings["batches"] else settings["steps"] + 100
        count = min(count, 10_000)
        steps = [batch(rank, step, rows) for step in range(count)]
        if rank == (settings["nan_at"] or [-1])[0]:
            steps[settings["nan_at"][1]][0][0, 0] = np.nan
        x, y = (np.stack(each).astype(settings["dtype"]) for each in zip(*steps))
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        if settings["shapeless"]:
            kinds = (tf.TensorSpec(None, x.dtype), tf.TensorSpec(None, y.dtype))
            dataset = tf.data.Dataset.from_generator(lambda: zip(x, y), output_signature=kinds)
        return dataset

    return input_fn


def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str, params: dict[str, Any]) -> Any:
    def get(name: str, shape: list[int], trainable: bool = True) -> tf.Variable:
        zeros = tf.compat.v1.zeros_initializer()
        return tf.compat.v1.get_variable(name, shape, features.dtype, zeros, trainable=trainable)

    features, labels = tf.ensure_shape(features, [None, 5]), tf.ensure_shape(labels, [None, 1])
    weights, bias = get("weights", [5, 1]), get("bias", [1])
    get("frozen", [2], trainable=False)
    moving = get("moving", [5], trainable=False)
    loss = tf.reduce_mean((tf.matmul(features, weights) + bias - labels) ** 2)
    optimizer = OPTIMIZERS[params["inner"]]()
    update = moving.assign(0.9 * moving + 0.1 * tf.reduce_mean(features, 0))
    updates = [update]
    if params["counter"]:
        trainable = params["counter"] == "trainable"
        counter = tf.compat.v1.get_variable("counter", [], tf.int64, trainable=trainable)
        tf.compat.v1.get_variable("still", [], tf.int64, trainable=trainable)
        with tf.control_dependencies([features]):  # not in a step without data
            updates.append(counter.assign_add(1))
    if params["infinite"]:
        least = tf.compat.v1.Variable(np.inf, trainable=False, name="least")
        updates.append(least.assign(tf.minimum(least, tf.cast(loss, least.dtype))))
    with tf.control_dependencies(updates):
        train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def change_frozen(context: Any) -> None:
    frozen = next(v for v in tf.compat.v1.global_variables() if v.op.name == "frozen")
    assign(context.session, [frozen], [np.ones(2)])


def wait_for_failure(strategy: estimator_ext.HostOffloadStrategy) -> None:
    deadline_s = time.monotonic() + 60
    while strategy.communicator.transport.error is None:
        if time.monotonic() > deadline_s:
            raise TimeoutError("the ring has not failed")
        time.sleep(0.01)
    print("the ring has failed in the background", flush=True)


def _outer(name: str) -> Any:
    create = OPTIMIZERS[name.removesuffix(" functions")]
    return create if name.endswith(" functions") else create()


def run(chosen: dict[str, Any]) -> None:
    settings = {**SETTINGS, **chosen}
    outer = settings["outer"]
    strategy = estimator_ext.HostOffloadStrategy(
        accelerator="/device:CPU:1",
        outer_optimizer=_outer(outer) if outer else None,
        **settings["strategy"],
    )
    rank = strategy.cluster.rank or 0
    hooks: list[Any] = [Dump(Path(settings["dump_dir"]) / f"variables-{rank}.npz")]
    number = signal.Signals[settings["signal"]]
    calls = {
        "ask": lambda context: context.request_stop(),
        "change": change_frozen,
        "stuck": lambda _: threading.Event().wait(1000),
        "busy": lambda _: wait_for_failure(strategy),
        "kill": lambda _: os.kill(os.getpid(), number),
    }
    for name, call in calls.items():
        if settings[name] and settings[name][0] == rank:
            hooks.append(AfterStep(settings[name][1], call))
    config = estimator_ext.RunConfig(
        train_distribute=strategy,
        save_checkpoints_steps=settings["checkpoint_steps"],
        keep_checkpoint_max=100,
        tf_random_seed=1,
        uneven_data=settings["uneven_data"],
    )
    estimator = estimator_ext.Estimator(model_fn, settings["model_dir"], config, settings)
    steps = None if settings["batches"] else settings["steps"]
    traffic = strategy.communicator.transport.traffic
    estimator.train(make_input_fn(settings), hooks, max_steps=steps)
    strategy.close()
    print(json.dumps({"payload_bytes": traffic.payload_bytes}), flush=True)


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        run(each)
