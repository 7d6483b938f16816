"""Optimizers of tf.contrib.opt against their rules in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from estimator_ext.compat.contrib import opt

v1 = tf.compat.v1
STEPS = 3
START = np.array([[1.0, -2.0], [3.0, 0.5], [0.0, 4.0]])
OTHER = np.array([2.0, -1.0])
ROWS = np.array([[0, 2], [0, 2], [1, 0]])  # of each step
GRADIENTS = np.random.default_rng(0).normal(size=[STEPS, 2, 2])
DENSE = np.random.default_rng(1).normal(size=[STEPS, 3, 2])


def trained(
    optimizer: Callable[[], Any], is_resource: bool, is_sparse: bool, **options: Any
) -> list[np.ndarray]:
    """Returns two variables after some steps; the gradient of the second one is all ones."""
    with tf.Graph().as_default(), v1.Session() as session:
        kind = {"use_resource": is_resource, "dtype": tf.float64}
        variables = [
            v1.get_variable(name, initializer=tf.constant(value), **kind)
            for name, value in (("rows", START), ("other", OTHER))
        ]
        step = v1.placeholder(tf.int32, [])
        gradient: Any = tf.constant(DENSE)[step]
        if is_sparse:
            gradient = tf.IndexedSlices(
                tf.constant(GRADIENTS)[step], tf.constant(ROWS)[step], START.shape
            )
        pairs = [(gradient, variables[0]), (tf.ones([2], tf.float64), variables[1])]
        if "decay" in options:
            options = {"decay_var_list": [variables[1]]}
        update = optimizer().apply_gradients(pairs, **options)
        session.run(v1.global_variables_initializer())
        for number in range(STEPS):
            session.run(update, {step: number})
        return list(session.run(variables))


RATE, BETA_1, BETA_2, EPSILON = (float(np.float32(x)) for x in (0.1, 0.9, 0.999, 1e-8))


def adam(gradients: Iterator[Any], value: np.ndarray, decay: float = 0.0) -> np.ndarray:
    """Adam with numbers that are float32 in TensorFlow; a gradient is (rows, values)."""
    value = value.copy()
    m, v = np.zeros_like(value), np.zeros_like(value)
    power_1, power_2 = np.float32(1), np.float32(1)
    for rows, gradient in gradients:
        power_1, power_2 = power_1 * np.float32(BETA_1), power_2 * np.float32(BETA_2)
        value -= decay * value
        m[rows] = BETA_1 * m[rows] + (1 - BETA_1) * gradient
        v[rows] = BETA_2 * v[rows] + (1 - BETA_2) * gradient**2
        rate = RATE * np.sqrt(1 - float(power_2)) / (1 - float(power_1))
        value[rows] -= rate * m[rows] / (np.sqrt(v[rows]) + EPSILON)
    return value


ALL = slice(None)
ONES = [(ALL, np.ones(2))] * STEPS


@pytest.mark.parametrize("is_resource", [False, True])
def test_lazy_adam_changes_only_rows_with_gradients(is_resource: bool) -> None:
    rows, other = trained(lambda: opt.LazyAdamOptimizer(0.1), is_resource, is_sparse=True)
    np.testing.assert_allclose(rows, adam(zip(ROWS, GRADIENTS), START), rtol=1e-6)
    np.testing.assert_allclose(other, adam(iter(ONES), OTHER), rtol=1e-6)


@pytest.mark.parametrize("is_resource", [False, True])
@pytest.mark.parametrize("is_limited", [False, True])
def test_weights_decay_before_the_step(is_limited: bool, is_resource: bool) -> None:
    options: dict[str, Any] = {"decay": True} if is_limited else {}
    rows, other = trained(
        lambda: opt.AdamWOptimizer(0.01, learning_rate=0.1), is_resource, False, **options
    )
    dense = adam(zip([ALL] * STEPS, DENSE), START, 0.0 if is_limited else 0.01)
    np.testing.assert_allclose(rows, dense, rtol=1e-6)
    np.testing.assert_allclose(other, adam(iter(ONES), OTHER, 0.01), rtol=1e-6)


def test_weights_decay_with_any_optimizer() -> None:
    kind = opt.extend_with_decoupled_weight_decay(v1.train.GradientDescentOptimizer)
    rows, other = trained(lambda: kind(0.01, learning_rate=0.1), True, True)
    expected, ones = START.copy(), OTHER.copy()
    for indices, gradient in zip(ROWS, GRADIENTS):
        rows_of_gradient = sorted(set(indices))
        expected[rows_of_gradient] *= 0.99
        expected[indices] -= 0.1 * gradient
        ones = 0.99 * ones - 0.1
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    np.testing.assert_allclose(other, ones, rtol=1e-6)
    momentum, _ = trained(lambda: opt.MomentumWOptimizer(0.01, 0.1, 0.0), True, True)
    np.testing.assert_allclose(momentum, expected, rtol=1e-6)
