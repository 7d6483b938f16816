"""The end of steps that wait for data of a data worker, once the ring has failed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tensorflow as tf
from harness import until
from rings import Spawn

from estimator_ext.data_workers import service as data_watch
from hostopt.collectives.communicator import Communicator
from hostopt.errors import PeerLostError
from hostopt.options import Options


class Ticks(threading.Event):
    """Counts the looks of the watch."""

    count = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.count += 1
        return super().wait(timeout)


def test_only_a_step_ends_and_not_what_a_rank_does_between_steps(
    spawn_inproc: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_watch, "_EVERY_S", 0.01)

    def work(communicator: Communicator) -> None:
        if communicator.rank == 1:
            return
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            waits_for_ever = tf.queue.FIFOQueue(1, tf.int32).dequeue()
            constant = tf.constant(3)
            watch = data_watch.DataWatch(communicator, (), Options())
            ticks: Any = Ticks()
            watch._has_ended = ticks
            with watch:
                watch.after_create_session(session, None)
                communicator.abort(PeerLostError("another rank is gone"))
                seen = ticks.count
                until(lambda: ticks.count > seen + 5, "looks of the watch")
                assert session.run(constant) == 3  # such as saving
                watch.before_run(None)
                with pytest.raises((tf.errors.CancelledError, RuntimeError)):
                    session.run(waits_for_ever)

    spawn_inproc(2, work)
