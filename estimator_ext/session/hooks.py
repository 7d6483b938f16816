"""Session hooks: all ranks start with the same values, and each process has its events file."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

import hostopt
from estimator_ext.reduction.divided_slots import DividedSlots
from estimator_ext.variables.sync_on_read import assign, initial_local_value
from hostopt.tensorflow.checksums import has_numbers, in_parts

_log = tf.get_logger()


class BroadcastVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcasts the variables of rank 0 once the session is initialized or restored.

    It must come before hooks that read global_step. It first checks that all ranks have the same
    variables. Collective: all ranks must have it.

    Args:
      communicator: the ring.
      divided: slots, of which each rank gets its parts instead; None for none.
    """

    def __init__(
        self, communicator: hostopt.Communicator, divided: DividedSlots | None = None
    ) -> None:
        self._communicator = communicator
        self._divided = DividedSlots(communicator) if divided is None else divided
        self._variables: list[tf.Variable] = []

    def begin(self) -> None:
        """Collects the variables of the graph: slots, global_step and all trainable ones."""
        variables = tf.compat.v1.global_variables() + tf.compat.v1.trainable_variables()
        by_name = {variable.op.name: variable for variable in variables}
        self._variables = [by_name[name] for name in sorted(by_name)]

    def after_create_session(
        self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
    ) -> None:
        """Compares names, shapes and dtypes of the variables, then broadcasts their values."""
        descriptions = {v.op.name: f"{v.shape} {v.dtype.base_dtype.name}" for v in self._variables}
        self._communicator.check_same(descriptions, "the variables")
        numbers = list(filter(has_numbers, self._variables))
        for variable in set(self._variables).difference(numbers):
            _log.warning("%s holds no numbers and is not broadcast", variable.op.name)
        for part in in_parts([v for v in numbers if v.op.name not in self._divided.names]):
            self._broadcast(session, part)
        self._divided.divide(session)

    def _broadcast(self, session: tf.compat.v1.Session, part: Sequence[tf.Variable]) -> None:
        rank = self._communicator.rank
        values = [
            self._communicator.broadcast(value, name=f"variable {variable.op.name!r}")
            for variable, value in zip(part, session.run(list(part)))
        ]
        if rank != 0:
            assign(
                session,
                part,
                [initial_local_value(v, value, rank) for v, value in zip(part, values)],
            )


class EventsFilePerProcessHook(tf.compat.v1.train.SessionRunHook):
    """Makes the process ID part of the name of the events file.

    TensorFlow names the file after the second and the host. Two processes that evaluate the last
    checkpoint at the same time would write into one file and corrupt it.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def end(self, session: tf.compat.v1.Session) -> None:
        """Creates and caches the writer that TensorFlow would create without the process ID."""
        writers = tf.compat.v1.summary.FileWriterCache
        with writers._lock:
            if self._directory not in writers._cache:
                writers._cache[self._directory] = tf.compat.v1.summary.FileWriter(
                    self._directory, filename_suffix=f".{os.getpid()}"
                )
