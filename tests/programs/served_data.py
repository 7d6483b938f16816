"""Trains on numbers that data workers prepare; writes the batches that each rank has seen."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import estimator_ext
from estimator_ext.data_workers import worker

estimator_ext.install()
tf.get_logger().setLevel("INFO")

SETTINGS: dict[str, Any] = {
    "directory": "",
    "count": 100,  # of elements, from 1
    "epochs": 1,  # 0 for endless data
    "batch": 4,
    "is_sparse": False,  # batches of sparse tensors
    "takes_context": False,
    "by_rank": "",  # each rank has a part of the elements: "source", or "nested" with shard()
    "config": {},  # options of RunConfig
    "strategy": {},  # options of HostOffloadStrategy
    "max_steps": None,
    "evaluates": False,
    "rounds": 0,  # of training and evaluation in all tasks, instead of one training
    "step_s": 0.0,  # pause of a step
    "die_at": [],  # index of a data worker that fails at once, and its exit code
    "gone_s": 30.0,  # without an answer of the chief, after which a data worker ends
}


def note(directory: Path, task: str, *values: Any) -> None:
    """Appends a line of JSON to a file of the process."""
    with open(directory / f"{task}.{os.getpid()}", "a") as file:
        file.write(json.dumps(values) + "\n")


def numbers(settings: dict[str, Any]) -> tf.data.Dataset:
    data = tf.data.Dataset.range(1, settings["count"] + 1)
    data = data.repeat(settings["epochs"] or None).batch(settings["batch"])
    return data.map(tf.sparse.from_dense) if settings["is_sparse"] else data


def main(chosen: dict[str, Any]) -> None:
    settings = {**SETTINGS, **chosen}
    worker.GONE_S = settings["gone_s"]
    directory = Path(settings["directory"])
    strategy = estimator_ext.HostOffloadStrategy(**settings["strategy"])
    task = strategy.cluster.task
    note(directory, f"started-{task.name.replace(':', '-')}")
    if settings["die_at"] and task.name == f"data:{settings['die_at'][0]}":
        os._exit(settings["die_at"][1])

    def plain_input_fn() -> tf.data.Dataset:
        rank, size = strategy.cluster.rank, strategy.cluster.size
        if settings["by_rank"] == "source":
            return tf.data.Dataset.range(rank, 100, size)
        if settings["by_rank"] == "nested":  # data workers read that of rank 0 only
            tens = tf.data.Dataset.range(0, 100, 10)
            return tens.flat_map(lambda x: tf.data.Dataset.range(x, x + 10).shard(size, rank))
        return numbers(settings)

    def context_input_fn(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        parts = input_context.num_input_pipelines, input_context.input_pipeline_id
        note(directory, "context", *parts, input_context.num_replicas_in_sync)
        data = numbers(settings).unbatch().shard(*parts)
        return data.batch(input_context.get_per_replica_batch_size(2 * settings["batch"]))

    def saw(batch: Any) -> Any:
        time.sleep(settings["step_s"])
        note(directory, task.name.replace(":", "-"), *batch.tolist())
        return batch

    def model_fn(features: tf.Tensor, labels: Any, mode: str) -> Any:
        weight = tf.compat.v1.get_variable("weight", [])
        loss = weight * weight
        if mode == tf.estimator.ModeKeys.EVAL:
            count = tf.compat.v1.metrics.mean(features)
            return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops={"mean": count})
        if settings["is_sparse"]:
            features = features.values
        seen = tf.numpy_function(saw, [features], tf.int64)
        with tf.control_dependencies([seen]):
            step = tf.compat.v1.train.get_global_step()
            train_op = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    config = estimator_ext.RunConfig(train_distribute=strategy, **settings["config"])
    estimator = estimator_ext.Estimator(model_fn, str(directory / "model"), config)
    input_fn = context_input_fn if settings["takes_context"] else plain_input_fn
    if settings["evaluates"]:
        specs = (
            tf.estimator.TrainSpec(input_fn, settings["max_steps"]),
            tf.estimator.EvalSpec(lambda: numbers({**settings, "epochs": 1}), steps=None),
        )
        metrics, _ = estimator_ext.train_and_evaluate(estimator, *specs)
        print("metrics", metrics, flush=True)
    elif settings["rounds"]:
        for _ in range(settings["rounds"]):
            estimator.train(input_fn)
            saw(np.array([0]))  # between batches of two rounds, which may be equal
            metrics = estimator.evaluate(lambda: numbers(settings))
            print("mean", metrics["mean"], flush=True)
    else:
        estimator.train(input_fn, max_steps=settings["max_steps"])
    print(f"{task.name} has ended", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
