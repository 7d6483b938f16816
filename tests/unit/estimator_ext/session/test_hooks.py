"""Hooks of the session, in a program without Estimator."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from rings import Spawn

import estimator_ext
from hostopt import Communicator


def test_a_session_of_the_program_starts_with_the_values_of_rank_0(spawn_inproc: Spawn) -> None:
    def read(communicator: Communicator) -> list[float]:
        first = np.arange(3, dtype=np.float32) + 10 * communicator.rank
        with tf.Graph().as_default():
            weights = tf.compat.v1.get_variable("weights", initializer=first, use_resource=True)
            hook = estimator_ext.BroadcastVariablesHook(communicator)
            with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
                return list(session.run(weights).tolist())

    assert spawn_inproc(2, read) == [[0.0, 1.0, 2.0]] * 2
