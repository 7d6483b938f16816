"""Keras 2: `tf.keras` if it is that, or else tf_keras."""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf


def _find() -> Any:
    if not hasattr(tf.keras, "ops"):  # which Keras 3 has
        return tf.keras
    return importlib.import_module("tf_keras")


keras = _find()
