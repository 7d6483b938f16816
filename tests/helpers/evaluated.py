"""A model of one weight, its evaluation, and a metric that cannot be summed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import one_weight
import tensorflow as tf

import estimator_ext


def data(input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(([[1.0]], [[1.0]]))


def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
    spec = one_weight.model_fn(features, labels, mode)
    if mode != tf.estimator.ModeKeys.EVAL:
        return spec
    return spec._replace(eval_metric_ops={"largest_loss": largest(spec.loss)})


def evaluate(
    api: Any, strategy: estimator_ext.HostOffloadStrategy | None, model_dir: Path, *specs: Any
) -> Any:
    config = estimator_ext.RunConfig(train_distribute=strategy)
    estimator = estimator_ext.Estimator(model_fn, str(model_dir), config)
    eval_spec = specs[0] if len(specs) == 1 else list(specs)
    return api.train_and_evaluate(estimator, tf.estimator.TrainSpec(data, 1), eval_spec)


def local(name: str, dtype: tf.DType = tf.float32, **options: Any) -> tf.Variable:
    kinds = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
    zeros = tf.compat.v1.zeros_initializer()
    return tf.compat.v1.get_variable(name, [], dtype, zeros, collections=kinds, **options)


def largest(value: tf.Tensor) -> tuple[tf.Tensor, Any]:
    variable = local("largest")
    return tf.identity(variable), variable.assign(tf.maximum(variable, value))
