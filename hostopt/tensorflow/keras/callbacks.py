"""Callbacks for `fit` of Keras 2, with Horovod's names."""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

from hostopt.tensorflow._keras_api import callbacks_for

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

keras: Any = tf.keras
if hasattr(keras, "ops"):  # which Keras 3 has
    keras = importlib.import_module("tf_keras")

(
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
) = callbacks_for(keras, __name__)
