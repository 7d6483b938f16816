"""Trains, evaluates and predicts like programs for the stock Estimator; prints the results."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import arguments
import numpy as np
import tensorflow as tf

import estimator_ext

estimator_ext.install()

SETTINGS = {
    "model_dir": "",
    "steps": 5,
    "tensors": True,  # or datasets
    "then": [],  # after training: "evaluate", "predict"
    "stop": None,  # early-stopping hook: the function that makes it, and its arguments
    "counts": True,  # whether model_fn increments global_step
}
ROWS, RATE = 12, 0.125
X = np.random.RandomState(0).standard_normal((ROWS, 3))
Y = X @ [[1.0], [-2.0], [0.5]] + 0.1


def input_fn_of(settings: dict[str, Any], features_only: bool = False) -> Any:
    def input_fn(input_context: tf.distribute.InputContext) -> Any:
        part = slice(input_context.input_pipeline_id, None, input_context.num_input_pipelines)
        batch = tf.constant(X[part]), tf.constant(Y[part])
        if not settings["tensors"]:
            return tf.data.Dataset.from_tensors(batch[0] if features_only else batch).repeat()
        return batch[0] if features_only else batch

    return input_fn


def model_fn_of(settings: dict[str, Any]) -> Any:
    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        weights = tf.compat.v1.get_variable(
            "w", [3, 1], tf.float64, tf.compat.v1.zeros_initializer()
        )
        outputs = features @ weights
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions=outputs)
        loss = tf.reduce_mean((outputs - labels) ** 2)
        step = tf.compat.v1.train.get_global_step() if settings["counts"] else None
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(RATE)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, step))

    return model_fn


def stopping_hook(estimator: Any, call: str, arguments: dict[str, Any], is_chief: bool) -> Any:
    if call == "make_early_stopping_hook":  # in the third call of rank 0
        answers = iter([False, False, True])
        arguments = {**arguments, "should_stop_fn": lambda: is_chief and next(answers, True)}
    return getattr(tf.estimator.experimental, call)(estimator, **arguments)


def main(settings: dict[str, Any]) -> None:
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
    strategy = estimator_ext.HostOffloadStrategy(collective_timeout_s=60)
    with contextlib.closing(strategy):
        config = estimator_ext.RunConfig(train_distribute=strategy, save_checkpoints_steps=100)
        estimator = estimator_ext.Estimator(
            model_fn_of(settings), settings["model_dir"] or None, config
        )
        hooks = []
        if settings["stop"]:  # it has a variable, which restored checkpoints must contain
            never = tf.estimator.experimental.make_early_stopping_hook(estimator, lambda: False)
            hooks.append(never)
        estimator.train(input_fn_of(settings), hooks=hooks, max_steps=settings["steps"])
        result = {}
        if "evaluate" in settings["then"]:
            result["metrics"] = estimator.evaluate(input_fn_of(settings), steps=1)
        if "predict" in settings["then"]:
            predictions = estimator.predict(input_fn_of(settings, features_only=True))
            result["predictions"] = [next(predictions).tolist() for _ in range(ROWS)]
        if settings["stop"]:
            hook = stopping_hook(estimator, *settings["stop"], strategy.cluster.is_chief)
            estimator.train(input_fn_of(settings), hooks=[hook], max_steps=100_000)
            result["stopped"] = estimator.get_variable_value("global_step")
        print("FOUND", json.dumps(result, default=lambda value: value.item()), flush=True)


if __name__ == "__main__":
    main({**SETTINGS, **arguments.chosen()})
