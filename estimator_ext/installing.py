"""install: gives existing programs `tf.estimator` back."""

from __future__ import annotations

import importlib
import sys

from estimator_ext._tf_estimator import estimator_v1, estimator_v2
from estimator_ext._tf_estimator._loading import PACKAGES, check_keras, knows_estimator

__all__: list[str] = []


def install() -> None:
    """Put `tf.estimator` and `tf.compat.v1.estimator` back where TensorFlow had them.

    For programs written for `tf.estimator` that run on TensorFlow 2.16 or later: call it once,
    before they use the name. `tf.keras` becomes Keras 2 (tf_keras), if nothing has used it before.
    On TensorFlow 2.15, which has these names, nothing is done. May be called again.

    Raises:
      hostopt.ConfigError: `tf.keras` is Keras 3 already.
    """
    if knows_estimator():
        return
    check_keras()
    for package, api in PACKAGES.items():
        estimator = {"_v1": estimator_v1, "_v2": estimator_v2}[api]
        importlib.import_module(package).estimator = estimator
        # so that `import tensorflow.estimator` finds it too
        sys.modules[f"{package}.estimator"] = estimator
