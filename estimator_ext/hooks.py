"""Session hooks: all ranks begin alike, and each process writes events of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext.sync_on_read import assign, in_parts, own_part

__all__: list[str] = []

_log = tf.get_logger()

_NO_NUMBERS = (tf.string, tf.resource, tf.variant)


class BroadcastVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives every rank the variables of rank 0, once the session is initialised or restored.

    Put it before hooks that read global_step. All ranks must have the same variables, which is
    checked first.

    Args:
      communicator: the ring.
    """

    def __init__(self, communicator: hostopt.Communicator) -> None:
        self._communicator = communicator
        self._variables: list[tf.Variable] = []

    def begin(self) -> None:
        """Note the variables of the graph: slots, global_step and all trainable ones."""
        variables = tf.compat.v1.global_variables() + tf.compat.v1.trainable_variables()
        by_name = {variable.op.name: variable for variable in variables}
        self._variables = [by_name[name] for name in sorted(by_name)]

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Compare the variables' names, shapes and dtypes, then take over their values.

        Args:
          session: the session of this rank.
          coord: not used.

        Raises:
          hostopt.CollectiveMismatchError: two ranks have different variables.
          hostopt.HostOptError: a rank failed, left or timed out.
        """
        del coord
        facts = {v.op.name: f"{v.shape} {v.dtype.base_dtype.name}" for v in self._variables}
        self._communicator.check_same(facts, "the variables")
        numbers = [v for v in self._variables if v.dtype.base_dtype not in _NO_NUMBERS]
        for variable in set(self._variables).difference(numbers):
            _log.warning("%s holds no numbers and is not broadcast", variable.op.name)
        for part in in_parts(numbers):
            self._broadcast(session, part)

    def _broadcast(self, session: tf.compat.v1.Session, part: Sequence[tf.Variable]) -> None:
        rank = self._communicator.rank
        values = [
            self._communicator.broadcast(own, what=f"variable {variable.op.name!r}")
            for variable, own in zip(part, session.run(list(part)))
        ]
        if rank != 0:
            assign(session, part, [own_part(v, value, rank) for v, value in zip(part, values)])


class OwnEventsFileHook(tf.compat.v1.train.SessionRunHook):
    """Keeps what this process reports at the end out of the events files of all others.

    TensorFlow names a file after second and host, so that two processes that evaluate the last
    checkpoint at the same moment would write into one file and corrupt it.

    Args:
      directory: where the events go.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def end(self, session: tf.compat.v1.Session) -> None:
        """Make the writer that TensorFlow would make, with the process in its file's name."""
        del session
        writers = tf.compat.v1.summary.FileWriterCache
        with writers._lock:
            if self._directory not in writers._cache:
                writers._cache[self._directory] = tf.compat.v1.summary.FileWriter(
                    self._directory, filename_suffix=f".{os.getpid()}"
                )
