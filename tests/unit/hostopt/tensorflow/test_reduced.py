"""Which gradients are known to be reduced, however they are changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from hostopt.tensorflow.reduced import Origin, mark, origins_of

v1 = tf.compat.v1


class Program:
    """Tensors of a program: a reduced gradient, data of this rank, and variables."""

    def __init__(self) -> None:
        self.weights = v1.get_variable("weights", [2], use_resource=True)
        self.stored = v1.get_variable("sum", [2], use_resource=True, trainable=False)
        self.scale = v1.get_variable("scale", [], use_resource=True, trainable=False)
        self.data = v1.placeholder(tf.float32, [2])
        self.reduced = self.data * 0.5
        mark([self.reduced])


CHANGES: dict[str, tuple[Callable[[Program], Any], Origin]] = {
    "none": (lambda p: p.reduced, Origin.REDUCED),
    "clipped": (lambda p: tf.clip_by_global_norm([p.reduced], 1.0)[0][0], Origin.REDUCED),
    "checked": (lambda p: tf.debugging.check_numerics(p.reduced, "bad"), Origin.REDUCED),
    "decayed": (lambda p: p.reduced + 0.1 * p.weights, Origin.REDUCED),
    "scaled": (lambda p: p.reduced / p.scale, Origin.REDUCED),
    "in a branch": (
        lambda p: tf.cond(p.scale > 0, lambda: p.reduced * 2, lambda: p.reduced),
        Origin.REDUCED,
    ),
    "sparse": (
        lambda p: tf.IndexedSlices(p.reduced * 2.0, tf.constant([0, 1])),
        Origin.REDUCED,
    ),
    "local": (lambda p: p.data * 2, Origin.LOCAL),
    "with local": (lambda p: p.reduced + p.data, Origin.REDUCED | Origin.LOCAL),
    "with noise": (lambda p: p.reduced + tf.random.normal([2]), Origin.REDUCED | Origin.LOCAL),
    "in Python": (
        lambda p: tf.numpy_function(lambda x: x, [p.reduced], tf.float32),
        Origin.REDUCED | Origin.LOCAL,
    ),
    "stored": (lambda p: p.stored * 2, Origin.STORED),
    "array": (lambda p: tf.constant([1.0, 2.0]), Origin.LOCAL),
    "number": (lambda p: tf.fill([2], 1.0), Origin.NOTHING),
}


@pytest.mark.parametrize("change", CHANGES)
def test_origins_in_a_graph(change: str) -> None:
    with tf.Graph().as_default():
        program = Program()
        make, origin = CHANGES[change]
        assert origins_of([(None, program.weights), (make(program), program.weights)]) == {
            1: origin
        }


def test_a_branch_of_a_function_takes_a_gradient_from_outside() -> None:
    weights, seen = tf.Variable([1.0]), []

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        reduced = x * 0.5
        mark([reduced])
        bound = tf.constant(2.0)

        def apply() -> Any:
            clipped = tf.minimum(reduced, bound) + weights
            seen.extend([origins_of([(each, weights)])[0] for each in (reduced, clipped, x + 1)])
            return clipped

        return tf.cond(x[0] > 0, apply, lambda: x)

    step(tf.ones([1]))
    assert seen == [Origin.REDUCED, Origin.REDUCED, Origin.LOCAL]


def test_a_gradient_that_is_computed_eagerly_is_known_by_itself() -> None:
    variable = tf.Variable([1.0])
    reduced = tf.constant([1.0]) * 2.0
    mark([None, reduced])
    assert origins_of([(reduced, variable)]) == {0: Origin.REDUCED}
    assert origins_of([(reduced * 2.0, variable)]) == {0: Origin.LOCAL}
