"""Callbacks for `fit` of Keras 2, with Horovod's names."""

from __future__ import annotations

from typing import Any

from hostopt.tensorflow import keras_callbacks, learning_rates
from hostopt.tensorflow.keras._keras_2 import keras
from hostopt.tensorflow.keras_models import check_kind

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class _Callback(keras.callbacks.Callback):
    def set_model(self, model: Any) -> None:
        """Takes the model."""
        check_kind(model, is_keras_3=False)
        super().set_model(model)


class BroadcastGlobalVariablesCallback(keras_callbacks.BroadcastVariables, _Callback):
    """Gives all ranks the variables of one rank; see `BroadcastVariables`."""


class MetricAverageCallback(keras_callbacks.AverageMetrics, _Callback):
    """Averages metrics over the ranks; see `AverageMetrics`."""


class LearningRateScheduleCallback(learning_rates.LearningRateSchedule, _Callback):
    """Sets the learning rate; see `LearningRateSchedule`."""


class LearningRateWarmupCallback(learning_rates.LearningRateWarmup, _Callback):
    """Raises the learning rate at the start; see `LearningRateWarmup`."""
