"""Names and gradients of the calls of hostopt.tensorflow in graphs, in a single process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import hostopt
import hostopt.tensorflow as hvd
from hostopt.tensorflow.calls import call_name

v1 = tf.compat.v1


pytestmark = pytest.mark.usefixtures("ring")


def test_a_name_that_is_used_again_gets_a_number_if_calls_have_no_order() -> None:
    def names() -> list[str]:
        return [call_name("allreduce", name) for name in ["x", "y", "x", "x"]]

    with tf.Graph().as_default():
        assert names() == ["x", "y", "x (2)", "x (3)"]
    with tf.Graph().as_default():
        assert names()[0] == "x"  # counted in each graph
    traced: list[str] = []
    tf.function(lambda: traced.extend(names()), autograph=False)()
    assert traced == names() == ["x", "y", "x", "x"]


class Noting:
    """A compressor that notes the directories of the functions that call it."""

    callers: ClassVar[set[str]] = set()

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, None]:
        return cls.decompress(tensor), None

    @classmethod
    def decompress(cls, tensor: Any, context: Any = None) -> Any:
        del context
        cls.callers.add(Path(sys._getframe(1).f_code.co_filename).parent.name)
        return tensor


def test_autograph_converts_neither_this_package_nor_keras() -> None:
    layer = tf_keras.layers.Dense(1, activation=Noting.decompress)

    @tf.function
    def step(x: tf.Tensor) -> Any:
        return hvd.allreduce(layer(x), compression=Noting)

    step(tf.ones([1, 2]))
    # hostopt/tensorflow and tf_keras/src/layers/core, not the files that AutoGraph writes
    assert Noting.callers == {"tensorflow", "core"}


def branch(x: tf.Tensor) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0, lambda: hvd.allreduce(x, name="branch"), lambda: x)


def loop(x: tf.Tensor) -> Any:
    def body(i: Any, y: Any) -> Any:
        return i + 1, hvd.allreduce(2 * y, name="loop")

    return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]


@pytest.mark.parametrize(("build", "expected"), [(branch, 1), (loop, 8)])
def test_gradient_through_a_branch_or_a_loop(build: Callable[..., Any], expected: int) -> None:
    @tf.function
    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(build(x))
        return tape.gradient(total, x)

    assert gradient(tf.ones([2])).numpy().tolist() == [expected] * 2


@pytest.mark.parametrize("splits", [None, [2]])
def test_gradient_of_alltoall_in_a_graph(splits: Any) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        x = tf.constant([1.0, 2.0])
        result = hvd.alltoall(x, splits=splits)
        rows = result if splits is None else result[0]
        np.testing.assert_array_equal(session.run(tf.gradients(rows * 3.0, x)), [[3.0, 3.0]])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: hvd.alltoall(tf.constant(1.0)), "alltoall has a scalar"),
        (lambda: hvd.alltoall(tf.ones([2]), splits=[2.5]), "splits of dtype float32"),
        (lambda: hvd.alltoall(tf.ones([2]), splits=[[2]]), "shape (1, 1), wanted integers"),
    ],
)
def test_splits_that_are_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(hostopt.ConfigError) as caught:
        call()
    assert text in str(caught.value)


class Halved:
    """A compressor that has the two methods, and no base class."""

    @staticmethod
    def compress(tensor: Any) -> Any:
        return tensor / 2, None

    @staticmethod
    def decompress(tensor: Any, _: Any) -> Any:
        return tensor * 2


def test_a_compressor_without_a_base_class() -> None:
    assert hvd.allreduce(tf.constant([3.0]), compression=Halved).numpy() == [3.0]
    assert hvd.reducescatter(tf.constant([3.0]), compression=Halved).numpy() == [3.0]


def test_generic_names_of_gradients() -> None:
    x = tf.Variable([1.0])
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(2.0 * x)
    tape = hvd.DistributedGradientTape(tape)
    assert tape.gradient(loss, [x], use_generic_names=True)[0].numpy() == 2
    assert tape.get_local_and_global_gradients(loss, [x], None, True)[1][0][1].numpy() == 2
    with pytest.raises(hostopt.ConfigError, match="Give unconnected_gradients by name"):
        tape.gradient(loss, [x], None, tf.UnconnectedGradients.ZERO)
