"""Callbacks for `fit` of Keras 3, with Horovod's names."""

from __future__ import annotations

import importlib
from typing import Any

from hostopt.errors import ConfigError
from hostopt.tensorflow import keras_callbacks

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

keras: Any = importlib.import_module("keras")
if not hasattr(keras, "ops"):  # which Keras 3 has
    raise ConfigError(
        f"keras {keras.__version__} is installed, but hostopt.keras needs Keras 3. Import "
        "hostopt.tensorflow.keras instead"
    )
if keras.backend.backend() != "tensorflow":
    raise ConfigError(
        f"the backend of Keras is {keras.backend.backend()}, but hostopt.keras needs tensorflow. "
        "Set KERAS_BACKEND=tensorflow in the environment"
    )


class _Callback(keras.callbacks.Callback):
    def set_model(self, model: Any) -> None:
        """Takes the model."""
        keras_callbacks.check_kind(model, is_keras_3=True)
        super().set_model(model)


class BroadcastGlobalVariablesCallback(keras_callbacks.BroadcastVariables, _Callback):
    """Gives all ranks the variables of one rank; see `BroadcastVariables`."""


class MetricAverageCallback(keras_callbacks.AverageMetrics, _Callback):
    """Averages metrics over the ranks; see `AverageMetrics`."""


class LearningRateScheduleCallback(keras_callbacks.LearningRateSchedule, _Callback):
    """Sets the learning rate; see `LearningRateSchedule`."""


class LearningRateWarmupCallback(keras_callbacks.LearningRateWarmup, _Callback):
    """Raises the learning rate at the start; see `LearningRateWarmup`."""
