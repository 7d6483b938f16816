"""Callbacks for `fit` of Keras 2, with Horovod's names."""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

from hostopt.tensorflow import keras_callbacks

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

keras: Any = tf.keras
if hasattr(keras, "ops"):  # which Keras 3 has
    keras = importlib.import_module("tf_keras")


class _Callback(keras.callbacks.Callback):
    def set_model(self, model: Any) -> None:
        """Takes the model."""
        keras_callbacks.check_kind(model, is_keras_3=False)
        super().set_model(model)


class BroadcastGlobalVariablesCallback(keras_callbacks.BroadcastVariables, _Callback):
    """Gives all ranks the variables of one rank; see `BroadcastVariables`."""


class MetricAverageCallback(keras_callbacks.AverageMetrics, _Callback):
    """Averages metrics over the ranks; see `AverageMetrics`."""


class LearningRateScheduleCallback(keras_callbacks.LearningRateSchedule, _Callback):
    """Sets the learning rate; see `LearningRateSchedule`."""


class LearningRateWarmupCallback(keras_callbacks.LearningRateWarmup, _Callback):
    """Raises the learning rate at the start; see `LearningRateWarmup`."""
