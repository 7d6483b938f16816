"""Results of the steps of Keras 2 that `Model.fit`, `evaluate` and `predict` make.

Keras joins the results of replicas in one process. It joins the results of ranks only for the
strategies of TensorFlow. So `predict` would return the predictions of one rank, and a `train_step`
that returns a loss instead of metrics would report the loss of one rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_MODULE = "engine.training"  # in keras.src of TensorFlow 2.15, and in tf_keras.src
_STEPS = ("predict_step", "train_step", "test_step")


def join_results(strategy: Any, fn: Callable[..., Any], results: Any) -> Any:
    """Returns results of a step for all ranks.

    Returns:
      Predictions of all ranks, joined along the first dimension, in rank order. Means over the
      ranks, if the model overrides its training or test step. All others are unchanged.
    """
    fn = getattr(fn, "python_function", fn)  # of a function with jit_compile
    if not getattr(fn, "__module__", "").endswith(_MODULE):
        return results
    # by what it calls: Keras converts it with AutoGraph or not, depending on the version
    called = next((step for step in _STEPS if step in fn.__code__.co_names), None)
    with strategy.scope():
        if called == "predict_step":
            return tf.nest.map_structure(lambda each: strategy.gather(each, 0), results)
        if called is not None and _is_own(fn, called):
            return tf.nest.map_structure(lambda each: _mean(strategy, each), results)
    return results


def _is_own(fn: Callable[..., Any], step: str) -> bool:
    method = getattr(type(inspect.getclosurevars(fn).nonlocals.get("model")), step, None)
    return not getattr(method, "__module__", "").endswith(_MODULE)


def _mean(strategy: Any, value: Any) -> Any:
    value = tf.convert_to_tensor(value)
    if not value.dtype.is_floating:
        return value
    return strategy.reduce(tf.distribute.ReduceOp.MEAN, value, axis=None)
