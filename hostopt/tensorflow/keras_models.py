"""Models and optimizers of Keras 2 and Keras 3, by what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hostopt.errors import ConfigError
from hostopt.tensorflow.compression import Compression
from hostopt.tensorflow.optimizer import DistributedOptimizer


def check_kind(model: Any, is_keras_3: bool) -> None:
    """Raises ConfigError unless a model is of the Keras that its callback is made for.

    Args:
      is_keras_3: True if the callback is made for Keras 3.
    """
    if hasattr(model, "stateless_call") != is_keras_3:
        wanted, module = ("3", "hostopt.tensorflow.keras")
        if not is_keras_3:
            wanted, module = ("2", "hostopt.keras")
        raise ConfigError(
            f"a callback for Keras {wanted} is given to a model of {type(model).__module__}. "
            f"Import {module} instead"
        )


def check_execution(model: Any) -> None:
    """Raises ConfigError if reductions cannot be a part of the training step of a model."""
    if not tf.executing_eagerly():
        raise ConfigError(
            "eager execution is disabled, and the callbacks for Keras need it. Enable it, or use "
            "BroadcastGlobalVariablesHook in a session"
        )
    if model.jit_compile:
        raise ConfigError(
            "the model is compiled by XLA, which cannot compile reductions over ranks. Call "
            "model.compile with jit_compile=False"
        )


def is_built(model: Any) -> bool:
    """Returns True if a model and its optimizer have all their variables, which this creates."""
    if not model.built:
        return False
    optimizer = model.optimizer
    if hasattr(optimizer, "build"):
        optimizer.build(model.trainable_variables)
    else:
        optimizer._create_all_weights(model.trainable_variables)
    return True


def variables_of(model: Any) -> list[Any]:
    """Returns the variables of a model and of its optimizer, but no seeds of random numbers."""
    of_optimizer = model.optimizer.variables
    if callable(of_optimizer):  # in Keras 2
        of_optimizer = of_optimizer()
    return [*model.weights, *of_optimizer]


def load_model(
    keras: Any,
    filepath: Any,
    custom_optimizers: Sequence[type] | None,
    custom_objects: dict[str, Any] | None,
    compression: Any = Compression.none,
) -> Any:
    """Loads a model, and makes its optimizer a `DistributedOptimizer`.

    Args:
      keras: the Keras that has saved the model.
      filepath: file or directory of the model.
      custom_optimizers: classes of optimizers that are not part of Keras.
      custom_objects: other objects by the names that the file has for them.
      compression: as for `DistributedOptimizer`.

    Returns:
      The model.
    """
    objects = {each.__name__: each for each in custom_optimizers or []}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
