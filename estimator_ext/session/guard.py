"""Guard against errors that TensorFlow would mistake for the end of the data or retry.

TensorFlow turns a StopIteration of a Python function in the graph into an OutOfRangeError. Both
look like the end of the data, so TensorFlow would save a checkpoint of a possibly incomplete step.
After an UnavailableError or AbortedError it creates a new session, repeatedly and on one rank
only. (From a Python function in the graph these two arrive as an UnknownError, which ends the
training.)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from typing import Any

import tensorflow as tf

from estimator_ext.session.close import LIMIT_S, close_in_time

_PYTHON = ("PyFunc", "EagerPyFunc")
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")


class SessionGuardHook(tf.compat.v1.train.SessionRunHook):
    """Makes such errors end the training like any other error; it must be the first hook.

    Args:
      data: operations of the input; only their OutOfRangeError is the end of the data.
      wait_s: time for which the other ranks wait for this one.
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
        """Allows the first session only.

        Raises:
          RuntimeError: TensorFlow has created a new session after an error.
        """
        del coord
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
        """Checks, before anything is saved, that only the end of the data ends the training.

        Raises:
          RuntimeError: another error has ended the training.
        """
        del session
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
