"""Loads tensorflow_estimator on every TensorFlow, also on those that no longer know it.

tensorflow_estimator 2.15.0 is the last release, made for TensorFlow 2.15, the last TensorFlow
with `tf.estimator`. Whatever lies between it and a later TensorFlow is dealt with here and nowhere
else. Nothing is written to disk, no import hook is installed, and what TensorFlow's own packages
lack they lack again afterwards.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types
from typing import Any, Callable, NoReturn

import tensorflow as tf

import hostopt
from estimator_ext._tf_estimator import _coordinator

__all__: list[str] = []

_OLDEST, _TOO_NEW = (2, 15), (2, 22)
_COORDINATOR = "tensorflow.python.distribute.estimator_training"
_EXPORT = "tensorflow_estimator.python.estimator.estimator_export"
# the parts of the API in which there is nothing but TPU
_TPU = (
    "tensorflow_estimator._api.v1.estimator.tpu",
    "tensorflow_estimator.python.estimator.api._v1.estimator.tpu",
)
_KERAS_SWITCH = "TF_USE_LEGACY_KERAS"


def load(name: str) -> types.ModuleType:
    """Import a module of tensorflow_estimator, with stand-ins for what TensorFlow has not.

    Args:
      name: of the module, within `tensorflow_estimator.python.estimator`.

    Returns:
      The module.

    Raises:
      hostopt.ConfigError: TensorFlow is older or newer than supported, or no matching tf_keras is
        installed.
    """
    if "tensorflow_estimator" not in sys.modules:
        _check_version()
        if knows_estimator():
            importlib.import_module("tensorflow_estimator")
        else:
            _use_keras_2()
            _load_with_stand_ins()
            try:
                check_keras()
            except hostopt.ConfigError as error:  # no harm to a model_fn without Keras
                tf.get_logger().warning("%s", error)
    return importlib.import_module(f"tensorflow_estimator.python.estimator.{name}")


def _load_with_stand_ins() -> None:
    # These lie in tensorflow_estimator's own namespace and are for good: its other modules look
    # there when a program imports them later.
    sys.modules[_EXPORT] = _export_module()
    for name in _TPU:
        sys.modules[name] = _TpuModule(name)
    # This one lies in TensorFlow's, and is gone when its importers, all loaded here, have it.
    sys.modules[_COORDINATOR] = _coordinator
    try:
        importlib.import_module("tensorflow_estimator")
    finally:
        del sys.modules[_COORDINATOR]


def knows_estimator() -> bool:
    """Say whether this TensorFlow has Estimator of itself, as 2.15 has."""
    return importlib.util.find_spec(_COORDINATOR) is not None


def check_keras() -> None:
    """Find out whether `tf.keras` is the Keras that works in an Estimator's graphs.

    Raises:
      hostopt.ConfigError: it is Keras 3 already, which cannot be changed in this process.
    """
    if not tf.keras.layers.__name__.startswith("tf_keras."):
        raise hostopt.ConfigError(
            "tf.keras is Keras 3 in this process already, whose layers do not work in the graphs "
            f"of Estimator; wanted Keras 2 (tf_keras). Set {_KERAS_SWITCH}=1 in the environment "
            "before Python starts (`hostopt run` does so), or import estimator_ext before "
            "tf.keras is used for the first time"
        )


def _check_version() -> None:
    found = tuple(int(part) for part in tf.__version__.split(".")[:2])
    if not _OLDEST <= found < _TOO_NEW:
        raise hostopt.ConfigError(
            f"TensorFlow {tf.__version__} is installed, wanted 2.15 to 2.21: tensorflow_estimator "
            "was made for 2.15 and is known to work on what TensorFlow kept until 2.21. Run "
            "pip install 'tensorflow>=2.15,<2.22'"
        )


def _use_keras_2() -> None:
    """Let `tf.keras` become tf_keras when it is first used: Keras 3 knows no graphs.

    TensorFlow decides at the first use, by an environment variable; `import tensorflow.keras`
    looks at TensorFlow's search path, which was fixed when TensorFlow was imported.
    """
    if os.environ.setdefault(_KERAS_SWITCH, "1") not in ("1", "true", "True"):
        return  # the user wants Keras 3
    wanted = ".".join(tf.__version__.split(".")[:2])
    try:
        found = importlib.metadata.version("tf_keras")
    except importlib.metadata.PackageNotFoundError:
        found = "missing"
    if not found.startswith(f"{wanted}."):
        raise hostopt.ConfigError(
            f"tf_keras is {found}, wanted {wanted}, the version of TensorFlow: model functions "
            f"need Keras 2. Run pip install 'tf_keras=={wanted}.*'"
        )
    root = os.path.dirname(importlib.util.find_spec("tf_keras").origin)
    for package, version in ((tf, "_v2"), (tf.compat.v2, "_v2"), (tf.compat.v1, "_v1")):
        package.__path__.insert(0, os.path.join(root, "api", version))


def _export_module() -> types.ModuleType:
    """A stand-in for tensorflow_estimator's decorator, which adds to tables of TensorFlow.

    Those tables, from which TensorFlow's public API was generated, have no place for Estimator
    any more.
    """
    module = types.ModuleType(_EXPORT, "Decorator of public symbols, which does nothing.")
    module.estimator_export = _Export
    return module


class _Export:
    def __init__(self, *names: str, v1: Any = None) -> None:
        del names, v1

    def __call__(self, symbol: Callable[..., Any]) -> Callable[..., Any]:
        return symbol

    def export_constant(self, module_name: str, name: str) -> None:
        del module_name, name


class _TpuModule(types.ModuleType):
    """Stands for the TPU part of the API, whose foundations TensorFlow 2.16 removed."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself asks of a module
            raise AttributeError(name)
        raise AttributeError(
            f"tf.compat.v1.estimator.tpu.{name} does not exist on TensorFlow {tf.__version__}, "
            "which no longer has the TPU embeddings below it; it needs TensorFlow 2.15"
        )
