"""Trains a digit classifier for a few steps; evaluators measure it on 10,000 images."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arguments
import numpy as np
import tensorflow as tf
from session_hooks import AfterStep, stop_here

import estimator_ext

estimator_ext.install()

IMAGES, BATCH, STEPS = 10_000, 100, 20
SETTINGS = {
    "model_dir": "",
    "specs": "slices",  # or "named", one for each evaluator
    "metric": "",  # "largest": adds a metric that cannot be summed; "accuracy": only accuracy
    "stop": False,  # this evaluator blocks after its first batch, to be killed
    "end": "",  # ways to end after the first batch (evaluator) or step (chief)
    "end_before": False,  # or before training
    "images": IMAGES,  # number of images
}
DATA_PY = Path(__file__).parents[2] / "examples" / "mnist" / "data.py"


def load_images() -> tuple[np.ndarray, np.ndarray]:
    """Loads the test images of MNIST from MNIST_DIR; noise of that shape if it is not set."""
    directory = os.environ.get("MNIST_DIR")
    if not directory:
        random = np.random.default_rng(1)
        images = random.integers(0, 256, (IMAGES, 28, 28), dtype=np.uint8)
        return images, random.integers(0, 10, IMAGES, dtype=np.uint8)
    spec = importlib.util.spec_from_file_location("mnist_data", DATA_PY)
    data = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)
    digits = data.load_idx(Path(directory))
    return digits.x_test, digits.y_test


def batches(images: np.ndarray, labels: np.ndarray) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH)
    return dataset.map(lambda x, y: (tf.cast(x, tf.float32) / 255.0, tf.cast(y, tf.int64)))


def slices_of(images: np.ndarray, labels: np.ndarray) -> Callable[..., tf.data.Dataset]:
    def input_fn(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        pipelines, index = input_context.num_input_pipelines, input_context.input_pipeline_id
        return batches(images, labels).shard(pipelines, index)

    return input_fn


def local(name: str, shape: list[int], dtype: tf.DType) -> tf.Variable:
    kinds = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES, tf.compat.v1.GraphKeys.METRIC_VARIABLES]
    zeros = tf.compat.v1.zeros_initializer()
    return tf.compat.v1.get_variable(name, shape, dtype, zeros, trainable=False, collections=kinds)


def measure(labels: tf.Tensor, logits: tf.Tensor, settings: dict) -> dict[str, Any]:
    metrics = tf.compat.v1.metrics
    digit, chances = tf.argmax(logits, 1), tf.nn.softmax(logits)
    if settings["metric"] == "accuracy":
        return {"accuracy": metrics.accuracy(labels, digit)}
    is_three, taken_for_three = tf.equal(labels, 3), tf.equal(digit, 3)
    confusion = local("confusion", [10, 10], tf.int64)
    matrix = tf.math.confusion_matrix(labels, digit, 10, dtype=tf.int64)
    certainty = tf.keras.metrics.Mean()
    certainty.update_state(tf.reduce_max(chances, 1))
    measured = {
        "accuracy": metrics.accuracy(labels, digit),
        "mean": metrics.mean(chances),
        "auc": metrics.auc(is_three, chances[:, 3]),
        "precision": metrics.precision(is_three, taken_for_three),
        "recall": metrics.recall(is_three, taken_for_three),
        "true_positives": metrics.true_positives(is_three, taken_for_three),
        "per_class": metrics.mean_per_class_accuracy(labels, digit, 10),
        "confusion": (tf.identity(confusion), confusion.assign_add(matrix)),
        "certainty": certainty,
    }
    if settings["metric"] == "largest":
        largest = local("largest", [], tf.float32)
        update = largest.assign(tf.maximum(largest, tf.reduce_max(chances)))
        measured["largest_chance"] = (tf.identity(largest), update)
    return measured


def make_model_fn(settings: dict) -> Callable[..., Any]:
    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        logits = tf.keras.layers.Dense(10)(tf.keras.layers.Flatten()(features))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        loss = tf.reduce_mean(losses)
        if mode == tf.estimator.ModeKeys.EVAL:
            measured = measure(labels, logits, settings)
            return estimator_ext.EstimatorSpec(mode, loss=loss, eval_metric_ops=measured)
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def end(how: str) -> None:
    """Ends this process in the ways of the setting "end", one after the other until it is gone."""
    print("ends", flush=True)
    for each in how.split():
        if each == "raise":
            raise ZeroDivisionError("of this process")
        if each == "os-exit":
            os._exit(0)
        if each.startswith("exit"):
            sys.exit(int(each[4:]))
        os.kill(os.getpid(), getattr(signal, each))


class MeasureAlone(tf.estimator.Exporter):
    """Evaluates all data in one process, and exports nothing."""

    name = "alone"

    def __init__(self, input_fn: Callable[..., tf.data.Dataset]) -> None:
        self._input_fn = input_fn

    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: Any,
        is_the_final_export: bool,
    ) -> Any:
        return estimator.evaluate(self._input_fn, checkpoint_path=checkpoint_path, name=self.name)


def eval_specs(settings: dict, images: np.ndarray, labels: np.ndarray, end_here: AfterStep) -> Any:
    common = {
        "steps": None,
        "start_delay_secs": 0,
        "throttle_secs": 1,
        "hooks": [AfterStep(1, stop_here)] if settings["stop"] else [end_here],
    }
    if settings["specs"] == "slices":
        input_fn = slices_of(images, labels)
        return tf.estimator.EvalSpec(input_fn, exporters=MeasureAlone(input_fn), **common)
    return [
        tf.estimator.EvalSpec(lambda: batches(images[:300], labels[:300]), name="few", **common),
        tf.estimator.EvalSpec(lambda: batches(images, labels), name="all", **common),
    ]


def main(settings: dict) -> None:
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
    tf.keras.utils.set_random_seed(1)
    images, labels = load_images()
    if settings["end_before"]:
        end(settings["end"])
    config = estimator_ext.RunConfig(train_distribute=estimator_ext.HostOffloadStrategy())
    estimator = estimator_ext.Estimator(make_model_fn(settings), settings["model_dir"], config)
    # acts once, in training or in evaluation, or never
    end_here = AfterStep(1 if settings["end"] else 0, lambda _: end(settings["end"]))
    result = estimator_ext.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(lambda: batches(images, labels), max_steps=STEPS, hooks=[end_here]),
        eval_specs(settings, images, labels, end_here),
    )
    print("RESULT", json.dumps(result, default=lambda array: array.tolist()), flush=True)


if __name__ == "__main__":
    chosen = arguments.chosen()
    assert not set(chosen) - set(SETTINGS), chosen
    main({**SETTINGS, **chosen})
