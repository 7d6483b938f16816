"""Loads tensorflow_estimator on every supported TensorFlow, also on releases without Estimator.

tensorflow_estimator 2.15.0 is the last release. It was made for TensorFlow 2.15, the last release
with `tf.estimator`. All differences to later releases are handled in this module. It writes
nothing to disk and installs no import hook. Modules that it adds to TensorFlow's packages are
removed after the import.
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

_OLDEST, _NEWEST = (2, 15), (2, 21)
_COORDINATOR = "tensorflow.python.distribute.estimator_training"
_EXPORT = "tensorflow_estimator.python.estimator.estimator_export"
# the modules of the API that contain only TPU classes, whose basis TensorFlow 2.16 removed
_TPU = (
    "tensorflow_estimator._api.v1.estimator.tpu",
    "tensorflow_estimator.python.estimator.api._v1.estimator.tpu",
)
# The packages in which programs look for estimator and keras, and the API that they find there.
# `tf.compat.v1` and the result of `import tensorflow.compat.v1` can be two modules.
PACKAGES = {
    "tensorflow": "_v2",
    "tensorflow.compat.v1": "_v1",
    "tensorflow.compat.v2": "_v2",
    "tensorflow._api.v2.compat.v1": "_v1",
    "tensorflow._api.v2.compat.v2": "_v2",
}
_KERAS_SWITCH = "TF_USE_LEGACY_KERAS"


def load(name: str) -> types.ModuleType:
    """Imports a module of tensorflow_estimator, with stand-ins for removed parts of TensorFlow."""
    _check_versions()
    if not knows_estimator() and "tensorflow_estimator" not in sys.modules:
        _use_keras_2()
        _load_with_stand_ins()
        try:
            check_keras()
        except hostopt.ConfigError as error:  # harmless for a model_fn without Keras
            tf.get_logger().warning("%s", error)
    return importlib.import_module(f"tensorflow_estimator.python.estimator.{name}")


def _load_with_stand_ins() -> None:
    # These are in tensorflow_estimator's namespace and stay: its other modules need them when a
    # program imports them later. The decorator would add symbols to tables of TensorFlow, which
    # have no entry for Estimator any more.
    export = sys.modules[_EXPORT] = types.ModuleType(_EXPORT)
    vars(export)["estimator_export"] = lambda *names, v1=None: lambda symbol: symbol
    for name in _TPU:
        sys.modules[name] = stand_in(name, _refuse_tpu)
    # This one is in TensorFlow's namespace. It is removed when all its importers are loaded.
    sys.modules[_COORDINATOR] = _coordinator
    try:
        importlib.import_module("tensorflow_estimator")
    finally:
        del sys.modules[_COORDINATOR]


def knows_estimator() -> bool:
    """Returns True if this TensorFlow contains Estimator, as 2.15 does."""
    return importlib.util.find_spec(_COORDINATOR) is not None


def check_keras() -> None:
    """Checks that `tf.keras` is Keras 2; a part that is Keras 3 already cannot be undone."""
    keras_3 = [
        f"{package}.{name}"
        for package in PACKAGES
        for name, part in vars(importlib.import_module(package)).items()
        if _is_keras_3(part)
    ]
    if not keras_3 and not tf.keras.layers.Layer.__module__.startswith("tf_keras."):
        keras_3 = ["tensorflow.keras"]  # imported as a module
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
            f"{', '.join(keras_3)} is Keras 3 in this process already, which does not support the "
            f"graphs of Estimator; wanted Keras 2 (tf_keras). {remedy}"
        )


def _keras_2_is_wanted() -> bool:
    return os.environ.get(_KERAS_SWITCH, "1") in ("1", "true", "True")


def _is_keras_3(part: Any) -> bool:
    """Returns True if an attribute of tensorflow is a part of Keras 3.

    Each part (keras, layers, metrics, ...) is loaded separately at its first use, and has no name
    before.
    """
    name = vars(part).get("__name__", "") if isinstance(part, types.ModuleType) else ""
    return name.startswith("keras.")


def _check_versions() -> None:
    installed = tuple(int(part) for part in tf.__version__.split(".")[:2])
    if not _OLDEST <= installed <= _NEWEST:
        versions = (_OLDEST, _NEWEST, (_NEWEST[0], _NEWEST[1] + 1))
        oldest, newest, too_new = (".".join(map(str, version)) for version in versions)
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
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = "missing"
    if not version.startswith(f"{wanted}."):
        raise hostopt.ConfigError(
            f"{name} is {version}, wanted {wanted} for TensorFlow {tf.__version__}. Run "
            f"pip install '{name}=={wanted}.*'"
        )


def _use_keras_2() -> None:
    """Makes `tf.keras` load tf_keras at its first use, as Keras 3 does not support graphs.

    The attribute `tf.keras` reads an environment variable at its first use. The statement
    `import tensorflow.keras` uses TensorFlow's search path instead, so that is changed too.
    """
    if not _keras_2_is_wanted():
        return
    os.environ.setdefault(_KERAS_SWITCH, "1")
    root = str(importlib.metadata.distribution("tf_keras").locate_file("tf_keras"))
    for package, api in PACKAGES.items():
        importlib.import_module(package).__path__.insert(0, os.path.join(root, "api", api))


def stand_in(name: str, find: Callable[[str], Any]) -> types.ModuleType:
    """Returns a module for which a function finds attributes, once each, or raises an error."""
    module = types.ModuleType(name)

    def find_once(attribute: str) -> Any:
        if attribute.startswith("__"):  # attributes that Python itself reads
            raise AttributeError(attribute)
        value = vars(module)[attribute] = find(attribute)
        return value

    vars(module)["__getattr__"] = find_once
    return module


def _refuse_tpu(name: str) -> NoReturn:
    raise AttributeError(
        f"tf.compat.v1.estimator.tpu.{name} does not exist on TensorFlow {tf.__version__}, "
        "which no longer has the TPU embeddings below it; it needs TensorFlow 2.15"
    )
