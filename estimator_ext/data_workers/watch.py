"""Watches the data workers, as TensorFlow waits for them without a deadline."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hostopt
from hostopt.transport.addresses import greets, wait_for

_log = tf.get_logger()

_EVERY_S = 1.0
_ANSWER_S = 1.0
# For a rank to end once its session is closed. One that needs longer is stuck in TensorFlow, which
# cannot cancel the initialization of such an iterator.
_END_S = 10.0
_EXIT_S = 5.0  # for the functions that a program calls at its end


class DataWatch(tf.compat.v1.train.SessionRunHook):
    """Ends the training on all ranks once a data worker has been gone for too long.

    A thread asks each data worker for a sign of life once a second. If the ring is aborted, by
    this rank or another, it closes the session, which ends a step that waits for its input. A rank
    that does something else, such as saving, continues until its next step.
    """

    def __init__(
        self,
        communicator: hostopt.Communicator,
        tasks: Sequence[hostopt.Task],
        options: hostopt.Options,
    ) -> None:
        self._communicator = communicator
        self._transport = communicator.transport
        self._tasks = tasks
        self._started: Sequence[hostopt.Task] = ()  # all of them, once all have answered
        self._limit_s = options.rendezvous_timeout_s
        self._session: tf.compat.v1.Session | None = None
        self._may_wait = threading.Event()  # for data: in a step, and before the first session
        self._may_wait.set()
        self._silent_since_s: dict[hostopt.Task, float] = {}
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hostopt-data-watch", daemon=True)

    def __enter__(self) -> DataWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def wait_for_all(self) -> None:
        """Waits until all data workers have started; raises the error of a ring that aborts."""
        until_s = time.monotonic() + self._limit_s
        for task in self._tasks:
            if not wait_for(task.address, until_s, self._raise_error_of_ring):
                raise hostopt.RendezvousTimeoutError(
                    f"data worker {task} did not start within {self._limit_s:g} s. Check its "
                    "output, or raise rendezvous_timeout_s if it needs longer to start",
                    task=task.name,
                    address=task.address,
                )
        self._started = self._tasks

    def _raise_error_of_ring(self) -> None:
        if self._transport.error is not None:
            raise self._transport.error

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Makes the thread close this session if the ring is aborted."""
        del coord
        self._session = session
        self._may_wait.clear()

    def before_run(self, run_context: Any) -> None:
        """Notes that a step begins."""
        del run_context
        self._may_wait.set()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Notes that a step has ended; hooks that save come later."""
        del run_context, run_values
        self._may_wait.clear()

    def _run(self) -> None:
        while self._transport.error is None and not self._has_ended.wait(_EVERY_S):
            for task in self._started:
                try:
                    self._look_at(task)
                except hostopt.HostOptError as error:  # no descriptor is left
                    self._communicator.abort(error)
        # other parts of the step may report the error first
        while not self._has_ended.wait(_EVERY_S):
            if self._may_wait.is_set():
                self._end_step()
                return

    def _end_step(self) -> None:
        if self._session is not None:  # closing blocks as long as the session is stuck
            threading.Thread(target=self._session.close, daemon=True).start()
        if not self._has_ended.wait(_END_S) and self._transport.error is not None:
            _end_process(self._transport.error)

    def _look_at(self, task: hostopt.Task) -> None:
        now_s = time.monotonic()
        if greets(task.address, _ANSWER_S):
            if self._silent_since_s.pop(task, None) is not None:
                _log.info("data worker %s answers again", task)
            return
        if task not in self._silent_since_s:
            self._silent_since_s[task] = now_s
            _log.warning(
                "data worker %s does not answer. If it has restarted, elements that it had "
                "taken, and those in its shuffle buffers, are lost. The training waits for it for "
                "up to %g s",
                task,
                self._limit_s,
            )
        if now_s - self._silent_since_s[task] >= self._limit_s and self._transport.error is None:
            self._communicator.abort(
                hostopt.PeerLostError(
                    f"data worker {task} has not answered for {self._limit_s:g} s. Check its "
                    "output, or raise rendezvous_timeout_s if it needs longer to restart",
                    task=task.name,
                    address=task.address,
                )
            )


def _end_process(error: hostopt.HostOptError) -> None:
    """Ends this process with an error, although its main thread is stuck."""
    last_resort = threading.Timer(_EXIT_S, os._exit, [error.exit_code])
    last_resort.daemon = True
    last_resort.start()
    sys.excepthook(type(error), error, error.__traceback__)
