"""Calls of one name, and gradients of the same variables, that are made several times in a step.

One rank is slower than the other at random, so calls that are not ordered meet the wrong ones.
"""

from __future__ import annotations

import random
import time

import numpy as np
import tensorflow as tf

import hostopt
import hostopt.tensorflow as hvd
from hostopt import process_ring

hvd.init()
DELAYS = random.Random(hvd.rank())
STEPS = 10


def delayed(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor, after a time that differs between calls and ranks."""

    def wait(array: np.ndarray) -> np.ndarray:
        time.sleep(DELAYS.random() / 50)
        return array

    result = tf.numpy_function(wait, [tensor], tensor.dtype, stateful=False)
    result.set_shape(tensor.shape)
    return result


@tf.function
def inner(x: tf.Tensor) -> tf.Tensor:
    return hvd.allreduce(delayed(x), op=hvd.Sum)


@tf.function
def twice() -> list[tf.Tensor]:
    return [inner(tf.constant([1.0])), inner(tf.constant([100.0]))]


VARIABLE = tf.Variable([1.0], name="shared")


@tf.function
def two_losses() -> list[tf.Tensor]:
    with tf.GradientTape(persistent=True) as tape:
        first, second = VARIABLE * 1.0, VARIABLE * 100.0
    with tf.GradientTape() as other:
        third = delayed(VARIABLE * 1.0) * 0.0 + VARIABLE * 7.0
    distributed = hvd.DistributedGradientTape(tape)
    return [
        distributed.gradient(first, VARIABLE),
        hvd.DistributedGradientTape(other).gradient(third, VARIABLE),
        distributed.gradient(second, VARIABLE),
        tape.gradient(second, VARIABLE) * (hvd.rank() + 1),  # of this rank alone
    ]


@tf.function
def waits() -> None:
    hvd.barrier(name="in a function")


@tf.function
def loop() -> tf.Tensor:
    total = tf.zeros([3])
    for i in tf.range(3):
        value = hvd.allreduce(delayed(tf.cast(i, tf.float32)), op=hvd.Sum, name="loop")
        total += tf.one_hot(i, 3) * value
    return total


for _ in range(STEPS):
    results = [each.numpy().tolist() for each in twice()]
    assert results == [[2.0], [200.0]], results
    results = [each.numpy().tolist() for each in two_losses()]
    assert results == [[1.0], [7.0], [100.0], [100.0 * (hvd.rank() + 1)]], results
    assert loop().numpy().tolist() == [0.0, 2.0, 4.0]

calls = []
named = process_ring.current().named
original, named.barrier = named.barrier, lambda name: (calls.append(name), original(name))[1]
for _ in range(3):
    waits()
assert calls == ["in a function"] * 3, calls

optimizer = hvd.DistributedOptimizer(
    tf.compat.v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2
)
other = tf.Variable([1.0])
optimizer._hostopt_unreduced = gradients = [tf.ones([1])]
step = tf.Variable(0, dtype=tf.int64)
optimizer.apply_gradients([(gradients[0], VARIABLE)], global_step=step)
assert int(step) == 1  # passes are counted
for variable, gradient in [(other, gradients[0]), (VARIABLE, tf.ones([1]))]:
    try:
        optimizer.apply_gradients([(gradient, variable)])
    except hostopt.ConfigError as error:
        assert "backward_passes_per_step" in str(error)
    else:
        raise AssertionError("not refused")
print("in order")
