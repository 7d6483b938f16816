"""The one door of hostopt to private names of TensorFlow, which any release may change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import config
from tensorflow.python.client import session
from tensorflow.python.eager import context, record
from tensorflow.python.ops import script_ops

from hostopt.process.child_process import ForkGuard, native_threads


def _has_threads() -> bool:
    """Returns True if TensorFlow has started threads: for eager operations, or for a session."""
    eager = context.context_safe()
    sessions = session._python_session_create_counter.get_cell().value()
    return sessions > 0 or (eager is not None and eager._initialized)


fork_guard = ForkGuard("TensorFlow", _has_threads)
if _has_threads() and len(native_threads()) == threading.active_count():
    fork_guard.mark()  # imported after the fork; TensorFlow's own threads are missing


# AutoGraph would convert this code at its first call in a `tf.function`, which takes seconds. It
# leaves Keras alone, too, but in TensorFlow 2.15 only under its other name.
config.CONVERSION_RULES += tuple(
    map(config.DoNotConvert, ("hostopt", "estimator_ext", "tf_keras"))
)


def is_recording() -> bool:
    """Returns True if a gradient tape or a forward accumulator is open in this thread."""
    return bool(record.could_possibly_record())


def is_gradient_of_control_flow(graph: Any) -> bool:
    """Returns True if a graph computes the gradient of a `tf.cond` or `tf.while_loop`."""
    return getattr(graph, "_forward_graph", None) is not None


def outermost(graph: tf.Graph) -> tf.Graph:
    """Returns the graph around all functions within which a graph is built."""
    while getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    return graph


class _PythonFunction(script_ops.EagerFunc):
    """A function whose results TensorFlow takes as they are.

    TensorFlow leaves it to an EagerFunc to convert its results; for others it does so itself.
    """

    def __init__(self, function: Callable[..., Sequence[Any] | None]) -> None:
        self._function = function

    def __call__(self, _device: Any, _token: Any, arrays: Sequence[Any]) -> list[Any]:
        return [np.asarray(each, order="C") for each in self._function(*arrays) or ()]


def call_python(
    function: Callable[..., Sequence[Any] | None],
    inputs: Sequence[Any],
    dtypes: Sequence[tf.DType],
    name: str | None = None,
) -> Any:
    """Adds an operation that calls a function, as `tf.numpy_function` does, but in half the time.

    Args:
      function: takes one array per input, and returns one array per dtype; None if there are none.

    Returns:
      The results with unknown shapes; the operation if there are none.
    """
    called = _PythonFunction(function)
    graph: Any = outermost(tf.compat.v1.get_default_graph())
    if not hasattr(graph, "_py_funcs_used_in_graph"):
        graph._py_funcs_used_in_graph = []
    graph._py_funcs_used_in_graph.append(called)  # the registry has only a weak reference
    token = script_ops._py_funcs.insert(called)
    return tf.raw_ops.PyFunc(input=list(inputs), token=token, Tout=list(dtypes), name=name)
