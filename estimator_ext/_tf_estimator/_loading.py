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

_OLDEST, _NEWEST = (2, 15), (2, 21)
_COORDINATOR = "tensorflow.python.distribute.estimator_training"
_EXPORT = "tensorflow_estimator.python.estimator.estimator_export"
# the parts of the API in which there is nothing but TPU
_TPU = (
    "tensorflow_estimator._api.v1.estimator.tpu",
    "tensorflow_estimator.python.estimator.api._v1.estimator.tpu",
)
# Where programs look for estimator and keras, and which of two APIs they find. `tf.compat.v1` and
# what `import tensorflow.compat.v1` finds can be two modules.
PACKAGES = {
    "tensorflow": "_v2",
    "tensorflow.compat.v1": "_v1",
    "tensorflow.compat.v2": "_v2",
    "tensorflow._api.v2.compat.v1": "_v1",
    "tensorflow._api.v2.compat.v2": "_v2",
}
_KERAS_SWITCH = "TF_USE_LEGACY_KERAS"


def load(name: str) -> types.ModuleType:
    """Import a module of tensorflow_estimator, with stand-ins for what TensorFlow has not.

    Args:
      name: of the module, within `tensorflow_estimator.python.estimator`.

    Returns:
      The module.

    Raises:
      hostopt.ConfigError: TensorFlow is older or newer than supported, or tensorflow_estimator or
        tf_keras does not match it.
    """
    _check_versions()
    if not knows_estimator() and "tensorflow_estimator" not in sys.modules:
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
      hostopt.ConfigError: a part of it is Keras 3 already, for the rest of the process.
    """
    keras_3 = [
        f"{package}.{name}"
        for package in PACKAGES
        for name, part in vars(importlib.import_module(package)).items()
        if _is_keras_3(part)
    ]
    if not keras_3 and not tf.keras.layers.Layer.__module__.startswith("tf_keras."):
        keras_3 = ["tensorflow.keras"]  # which was imported by that name
    if keras_3:
        remedy = (
            f"Set {_KERAS_SWITCH}=1 in the environment before Python starts (`hostopt run` does "
            "so), or import estimator_ext before anything of tf.keras, tf.metrics or tf.layers is "
            "used"
        )
        if not _keras_2_is_wanted():
            value = os.environ[_KERAS_SWITCH]
            remedy = f"{_KERAS_SWITCH} is {value} in the environment: set it to 1"
        raise hostopt.ConfigError(
            f"{', '.join(keras_3)} is Keras 3 in this process already, which is not made for the "
            f"graphs of Estimator; wanted Keras 2 (tf_keras). {remedy}"
        )


def _keras_2_is_wanted() -> bool:
    return os.environ.get(_KERAS_SWITCH, "1") in ("1", "true", "True")


def _is_keras_3(part: Any) -> bool:
    """Whether an attribute of tensorflow is a part of Keras that has become Keras 3.

    Each of them (keras, layers, metrics, ...) is decided by itself when it is first used, and has
    no name before.
    """
    name = vars(part).get("__name__", "") if isinstance(part, types.ModuleType) else ""
    return name.startswith("keras.")


def _check_versions() -> None:
    found = tuple(int(part) for part in tf.__version__.split(".")[:2])
    if not _OLDEST <= found <= _NEWEST:
        too_new = (_NEWEST[0], _NEWEST[1] + 1)
        oldest, newest, too_new = (".".join(map(str, v)) for v in (_OLDEST, _NEWEST, too_new))
        raise hostopt.ConfigError(
            f"TensorFlow {tf.__version__} is installed, wanted {oldest} to {newest}: "
            f"tensorflow_estimator was made for {oldest} and is known to work on what TensorFlow "
            f"kept until {newest}. Run pip install 'tensorflow>={oldest},<{too_new}'"
        )
    _check_package("tensorflow_estimator", "2.15")
    if not knows_estimator():
        _check_package("tf_keras", ".".join(tf.__version__.split(".")[:2]))


def _check_package(name: str, wanted: str) -> None:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found = "missing"
    if not found.startswith(f"{wanted}."):
        raise hostopt.ConfigError(
            f"{name} is {found}, wanted {wanted} for TensorFlow {tf.__version__}. Run "
            f"pip install '{name}=={wanted}.*'"
        )


def _use_keras_2() -> None:
    """Let `tf.keras` become tf_keras when it is first used: Keras 3 knows no graphs.

    TensorFlow decides at the first use, by an environment variable; `import tensorflow.keras`
    looks at TensorFlow's search path, which was fixed when TensorFlow was imported.
    """
    if not _keras_2_is_wanted():
        return
    os.environ.setdefault(_KERAS_SWITCH, "1")
    root = os.path.dirname(importlib.util.find_spec("tf_keras").origin)
    for package, api in PACKAGES.items():
        importlib.import_module(package).__path__.insert(0, os.path.join(root, "api", api))


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
