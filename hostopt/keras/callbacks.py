"""Callbacks for `fit` of Keras 3, with Horovod's names."""

from __future__ import annotations

import importlib
from typing import Any

from hostopt.errors import ConfigError
from hostopt.tensorflow._keras_api import callbacks_for

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

(
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
) = callbacks_for(keras, __name__)
