"""Closing of sessions without a long wait for their input.

TensorFlow closes a session after the threads of its iterators have ended. A Python generator that
waits for data holds it up for as long. So does the thread that tunes a pipeline, for up to 60 s:
its loop (`Model::OptimizeLoop`) is woken before `CancellationManager::IsCancelled` is true, and
sleeps on if it is faster than the cancellation.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from typing import Any

import tensorflow as tf

_log = tf.get_logger()

LIMIT_S = 5.0
EXIT_S = 60.0  # from the end of the program to its exit, while a session is closed
_closing: list[threading.Thread] = []
_NO_FAILURE = (type(None), tf.errors.OutOfRangeError, StopIteration)  # that ends a training


class SessionCloseHook(tf.compat.v1.train.SessionRunHook):
    """Makes `close` of each session return in time; see `close_in_time`."""

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Replaces `close` of the session."""
        del coord
        close_in_time(session)


def close_in_time(session: tf.compat.v1.Session, limit_s: float = LIMIT_S) -> None:
    """Replaces `close` of a session: it returns while a thread still closes a slow session.

    Args:
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
            if isinstance(sys.exc_info()[1], _NO_FAILURE):
                _closing.append(thread)
            _log.info(
                "a session has not closed within %.3g s, as threads of its input still run. The "
                "program goes on",
                limit_s,
            )

    session.close = replacement


def exit_without_wait() -> None:
    """Cancels the wait for sessions at the exit, for a process that must end soon."""
    _closing.clear()


@atexit.register
def _wait_for_closing() -> None:
    """Waits, as Python aborts a process in which a thread leaves TensorFlow during the exit."""
    end_s = time.monotonic() + EXIT_S
    if any(thread.is_alive() for thread in _closing):
        _log.info(
            "this process exits when its sessions have closed, in %g s at the latest", EXIT_S
        )
    for thread in _closing:
        thread.join(max(0.0, end_s - time.monotonic()))
