"""The one door of hostopt to private names of TensorFlow, which any release may change."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.eager import context, record

from hostopt.child_process import ForkGuard, native_threads

__all__: list[str] = []


def _has_threads() -> bool:
    """Returns True if TensorFlow has started threads: for eager operations, or for a session."""
    eager = context.context_safe()
    sessions = session._python_session_create_counter.get_cell().value()
    return sessions > 0 or (eager is not None and eager._initialized)


fork_guard = ForkGuard("TensorFlow", _has_threads)
if _has_threads() and len(native_threads()) == threading.active_count():
    fork_guard.mark()  # imported after the fork; TensorFlow's own threads are missing


def is_recorded(tensors: Sequence[tf.Tensor]) -> bool:
    """Returns True if a gradient tape that is open watches one of the tensors.

    Args:
      tensors: eager tensors.
    """
    return bool(record.should_record_backprop(list(tensors)))
