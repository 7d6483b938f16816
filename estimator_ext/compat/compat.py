"""install: restores `tf.estimator` for existing programs."""

from __future__ import annotations

import importlib
import sys

from estimator_ext import tpu
from estimator_ext._tf_estimator import estimator_v1, estimator_v2
from estimator_ext._tf_estimator._loading import PACKAGES, check_keras, knows_estimator
from estimator_ext.compat._aliases import add_moved_modules
from estimator_ext.compat.contrib import add_contrib

# The compat packages are also attributes of each other.
_NESTED = {
    f"tensorflow._api.v2.compat.{outer}.compat.{inner}": f"_{inner}"
    for outer in ("v1", "v2")
    for inner in ("v1", "v2")
}


def install(contrib: bool = False) -> None:
    """Restores `tf.estimator` and `tf.compat.v1.estimator`, which TensorFlow 2.16 removed.

    Call it once, before a program uses these names. `tf.keras` becomes Keras 2 (tf_keras), unless
    it was used before. Names of modules from before TensorFlow 2.0 work as well, such as
    `tensorflow.python.estimator`. May be called again.

    Args:
      contrib: also restores those names of `tf.contrib` that still exist elsewhere. Names of
        layers and slim need the package tf-slim.

    Raises:
      hostopt.ConfigError: `tf.keras` is already Keras 3.
    """
    add_moved_modules()
    packages = {**PACKAGES, **_NESTED}
    modules = {name: importlib.import_module(name) for name in packages}
    if contrib:
        add_contrib([*modules.values()])
    if knows_estimator():
        return
    check_keras()
    estimator_v1.tpu = tpu
    for package, api in packages.items():
        estimator = {"_v1": estimator_v1, "_v2": estimator_v2}[api]
        modules[package].estimator = estimator
        # for `import tensorflow.estimator`
        sys.modules[f"{package}.estimator"] = estimator


def use_v1_api() -> None:
    """Makes `import tensorflow` import the API of TensorFlow 1, with its behavior.

    Modules that have already imported TensorFlow are not affected.
    """
    v1 = sys.modules["tensorflow.compat.v1"]
    v1.disable_v2_behavior()
    sys.modules["tensorflow"] = v1
