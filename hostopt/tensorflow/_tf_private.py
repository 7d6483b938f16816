"""The one door of hostopt to private names of TensorFlow, which any release may change."""

from __future__ import annotations

import threading
from typing import Any

from tensorflow.python.autograph.core import config
from tensorflow.python.client import session
from tensorflow.python.eager import context, record

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
