"""Closing of sessions without a long wait for their input.

TensorFlow closes a session after the threads of its iterators have ended. A Python generator that
waits for data holds it up for as long. So does the thread that tunes a pipeline, for up to 60 s:
its loop (`Model::OptimizeLoop`) is woken before `CancellationManager::IsCancelled` is true, and
sleeps on if it is faster than the cancellation.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import tensorflow as tf

__all__: list[str] = []

_log = tf.get_logger()

LIMIT_S = 5.0


class SessionCloseHook(tf.compat.v1.train.SessionRunHook):
    """Makes `close` of each session return in time; see `close_in_time`."""

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Replaces `close` of the session."""
        del coord
        close_in_time(session)


def close_in_time(session: tf.compat.v1.Session, limit_s: float = LIMIT_S) -> None:
    """Replaces `close` of a session: it returns while a thread still closes a slow session.

    Args:
      session: the session.
      limit_s: time to wait for the thread.
    """
    close, reachable = session.close, weakref.ref(session)

    def replacement() -> None:
        if reachable() is None:  # the garbage collector closes it, and frees it afterwards
            close()
            return
        del session.close
        thread = threading.Thread(target=close, name="session-close", daemon=True)
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            _log.info(
                "a session has not closed within %.3g s, as threads of its input still run. The "
                "program goes on",
                limit_s,
            )

    session.close = replacement
