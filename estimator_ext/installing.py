"""install: gives existing programs `tf.estimator` back."""

from __future__ import annotations

import importlib
import sys

from estimator_ext import tpu
from estimator_ext._aliases import add_moved_modules
from estimator_ext._tf_estimator import estimator_v1, estimator_v2
from estimator_ext._tf_estimator._loading import PACKAGES, check_keras, knows_estimator
from estimator_ext.contrib import add_contrib

__all__: list[str] = []

# the same packages once more, as attributes of each other
_NESTED = {
    f"tensorflow._api.v2.compat.{outer}.compat.{inner}": f"_{inner}"
    for outer in ("v1", "v2")
    for inner in ("v1", "v2")
}


def install(contrib: bool = False) -> None:
    """Put `tf.estimator` and `tf.compat.v1.estimator` back where TensorFlow had them.

    For programs written for `tf.estimator` that run on TensorFlow 2.16 or later: call it once,
    before they use the name. `tf.keras` becomes Keras 2 (tf_keras), if nothing has used it before.
    Modules that programs import by names from before TensorFlow 2.0, such as
    `tensorflow.python.estimator`, are found too. May be called again.

    Args:
      contrib: True gives names of `tf.contrib` back that still exist elsewhere; those of layers
        and slim need the package tf-slim.

    Raises:
      hostopt.ConfigError: `tf.keras` is Keras 3 already.
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
        # so that `import tensorflow.estimator` finds it too
        sys.modules[f"{package}.estimator"] = estimator


def use_v1_api() -> None:
    """Has `import tensorflow` give a program the API and the behavior of TensorFlow 1.

    Modules that have imported TensorFlow already keep what they have.
    """
    v1 = sys.modules["tensorflow.compat.v1"]
    v1.disable_v2_behavior()
    sys.modules["tensorflow"] = v1
