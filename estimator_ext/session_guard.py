"""Errors that TensorFlow would take for the end of the data, or answer with a new session.

A StopIteration of a Python function in the graph becomes an OutOfRangeError, and both end a
training as the end of its data does: a checkpoint is saved, of a step that may be torn. After an
UnavailableError or AbortedError the session is made anew, again and again, on one rank only. (Out
of a Python function in the graph those two come as an UnknownError, which ends the training.)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from typing import Any

import tensorflow as tf

__all__: list[str] = []

_PYTHON = ("PyFunc", "EagerPyFunc")
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")


class SessionGuardHook(tf.compat.v1.train.SessionRunHook):
    """Has such errors end the training as others do; the first of all hooks.

    Args:
      data: operations of the input, whose end is the end of the data.
    """

    def __init__(self, data: Collection[tf.Operation]) -> None:
        self._data = {op.name for op in data}
        self._has_session = False
        self._closed_for: BaseException | None = None
        self._handled_before: BaseException | None = None
        self.data_have_ended = False  # known in `end` of the hooks that come after

    def begin(self) -> None:
        """Note an error that the caller is handling."""
        self._handled_before = sys.exc_info()[1]

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Let the first session pass only.

        Args:
          session: its `close` notes why it is called.
          coord: not used.

        Raises:
          RuntimeError: TensorFlow has made a new session after an error.
        """
        del coord
        if self._has_session:
            raise _error(self._closed_for, "after which TensorFlow would begin again")
        self._has_session = True
        close = session.close

        def noting_close() -> None:
            self._closed_for = sys.exc_info()[1]
            close()

        session.close = noting_close

    def end(self, session: tf.compat.v1.Session) -> None:
        """Let only the end of the data pass, before anything is saved.

        Args:
          session: not used.

        Raises:
          RuntimeError: the training has ended with another error.
        """
        del session
        error = sys.exc_info()[1]  # what ends the `with` block of the session
        if error in (None, self._handled_before):
            return
        if not self._is_end_of_data(error):
            raise _error(error, "which TensorFlow would take for the end of the data")
        self.data_have_ended = True

    def _is_end_of_data(self, error: Any) -> bool:
        if not isinstance(error, tf.errors.OutOfRangeError):
            return False
        if error.op is not None:
            return error.op.type not in _PYTHON or error.op.name in self._data
        # in a branch or a loop; in one of several steps the names of the input are behind others
        names = _NODE.findall(error.message)
        of_data = any(f"/{name}".endswith(f"/{op}") for name in names for op in self._data)
        return of_data or "StopIteration" not in error.message


def _error(cause: BaseException | None, which: str) -> RuntimeError:
    name = "an error" if cause is None else type(cause).__name__
    error = RuntimeError(f"model_fn, host_call or a hook has raised {name}, {which}: {cause}")
    error.__cause__ = cause
    return error
