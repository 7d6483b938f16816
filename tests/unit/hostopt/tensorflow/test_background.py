"""Calls of Python functions: on a thread of the pool, and beside it so that they may wait."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hostopt.tensorflow._tf_private import call_python
from hostopt.tensorflow.background import call_in_background

ONE_THREAD = tf.compat.v1.ConfigProto(
    inter_op_parallelism_threads=1, intra_op_parallelism_threads=1, use_per_session_threads=True
)


def test_calls_that_wait_for_each_other_finish_in_a_pool_of_one_thread() -> None:
    count = 40
    barrier = threading.Barrier(count)

    def meet(value: np.ndarray) -> list[np.ndarray]:
        barrier.wait(60)  # breaks, and fails the test, unless all calls are under way at once
        return [value + 1, np.float64(value.sum())]

    with tf.Graph().as_default():
        start = tf.random.uniform([3], maxval=9, dtype=tf.int32)
        results = [
            call_in_background(meet, [start + i], [tf.int32, tf.float64], "Meet")
            for i in range(count)
        ]
        with tf.compat.v1.Session(config=ONE_THREAD) as session:
            for _ in range(2):
                own, result = session.run([start, results])
                for i, (array, total) in enumerate(result):
                    np.testing.assert_array_equal(array, own + i + 1)
                    assert total == own.sum() + 3 * i


def test_a_step_raises_the_error_of_the_function() -> None:
    def fail(value: np.ndarray) -> Any:
        raise RuntimeError(f"no such value: {value}")

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        (result,) = call_in_background(fail, [tf.constant(7)], [tf.int32], "Fail")
        with pytest.raises(tf.errors.OpError, match="no such value: 7"):
            session.run(result)


def test_a_call_runs_on_the_host_in_any_device_scope() -> None:
    config = tf.compat.v1.ConfigProto(device_count={"CPU": 2}, allow_soft_placement=False)
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        with tf.device("/device:CPU:1"):
            value = tf.random.uniform([4])
            (result,) = call_in_background(lambda v: [v * 2], [value], [tf.float32], "Double")
        assert tf.DeviceSpec.from_string(result.device).device_index == 0
        given, actual = session.run([value, result])
        np.testing.assert_array_equal(actual, given * 2)


def test_a_function_may_return_views_numbers_or_nothing() -> None:
    seen: list[Any] = []
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        value = tf.random.uniform([3, 4])
        dtypes = [tf.float32, tf.float32, tf.bool]
        results = call_python(lambda v: [v.T[::2], v.max(), True], [value], dtypes)
        noted = call_python(seen.append, [value], [])
        gc.collect()  # the graph keeps the functions
        given, (view, number, flag), _ = session.run([value, results, noted])
    np.testing.assert_array_equal(view, given.T[::2])
    assert flag and number == given.max()
    np.testing.assert_array_equal(seen, [given])
