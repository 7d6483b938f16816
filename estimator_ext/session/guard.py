"""Guards of sessions: they close without a long wait, and do not hide errors.

TensorFlow closes a session after the threads of its iterators have ended. A Python generator that
waits for data holds it up for as long. So does the thread that tunes a pipeline, for up to 60 s:
its loop (`Model::OptimizeLoop`) is woken before `CancellationManager::IsCancelled` is true, and
sleeps on if it is faster than the cancellation.

TensorFlow turns a StopIteration of a Python function in the graph into an OutOfRangeError. Both
look like the end of the data, so TensorFlow would save a checkpoint of a possibly incomplete step.
After an UnavailableError or AbortedError it creates a new session, repeatedly and on one rank
only. (From a Python function in the graph these two arrive as an UnknownError, which ends the
training.)
"""

from __future__ import annotations

import atexit
import re
import sys
import threading
import time
import weakref
from collections.abc import Collection
from typing import Any

import tensorflow as tf

_log = tf.get_logger()

LIMIT_S = 5.0
EXIT_S = 60.0  # from the end of the program to its exit, while a session is closed
_PYTHON = ("PyFunc", "EagerPyFunc")
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_NO_FAILURE = (type(None), tf.errors.OutOfRangeError, StopIteration)  # that ends a training
_closing: list[threading.Thread] = []


class SessionCloseHook(tf.compat.v1.train.SessionRunHook):
    """Makes `close` of each session return in time; see `close_in_time`."""

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Replaces `close` of the session."""
        close_in_time(session)


def close_in_time(session: tf.compat.v1.Session, limit_s: float = LIMIT_S) -> None:
    """Replaces `close` of a session: it returns while a thread still closes a slow session."""
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


class SessionGuardHook(tf.compat.v1.train.SessionRunHook):
    """Makes those errors end the training like any other error; it must be the first hook.

    Only the OutOfRangeError of `data`, the operations of the input, is the end of the data. The
    other ranks wait for this one for `wait_s`.
    """

    def __init__(self, data: Collection[tf.Operation], wait_s: float) -> None:
        self._close_s = min(LIMIT_S, wait_s / 2)
        self._data = {op.name for op in data}
        self._has_session = False
        self._closed_for: BaseException | None = None
        self._handled_before: BaseException | None = None
        self.data_have_ended = False  # valid in `end` of later hooks

    def begin(self) -> None:
        """Stores an error that the caller is handling, if any."""
        self._handled_before = sys.exc_info()[1]

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Allows the first session only."""
        if self._has_session:
            raise _error(self._closed_for, "after which TensorFlow would start a new session")
        self._has_session = True
        close_in_time(session, self._close_s)
        close = session.close

        def close_and_store_cause() -> None:
            self._closed_for = sys.exc_info()[1]
            close()

        session.close = close_and_store_cause

    def end(self, session: tf.compat.v1.Session) -> None:
        """Checks, before anything is saved, that only the end of the data ends the training."""
        error = sys.exc_info()[1]  # the error that ends the `with` block of the session
        if error in (None, self._handled_before):
            return
        if not self._is_end_of_data(error):
            raise _error(error, "which TensorFlow would mistake for the end of the data")
        self.data_have_ended = True

    def _is_end_of_data(self, error: Any) -> bool:
        if not isinstance(error, tf.errors.OutOfRangeError):
            return False
        if error.op is not None:
            return error.op.type not in _PYTHON or error.op.name in self._data
        # raised in a branch or a loop; in a loop of steps the names of the input have a prefix
        names = _NODE.findall(error.message)
        of_data = any(f"/{name}".endswith(f"/{op}") for name in names for op in self._data)
        return of_data or "StopIteration" not in error.message


def _error(cause: BaseException | None, which: str) -> RuntimeError:
    name = "an error" if cause is None else type(cause).__name__
    error = RuntimeError(f"model_fn, host_call or a hook raised {name}, {which}: {cause}")
    error.__cause__ = cause
    return error
