"""Changes gradients in a graph of TensorFlow 1 between compute_gradients and apply_gradients.

Each way equals one process on the whole batch, or is refused. The ranks print which.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
import hostopt.tensorflow as hvd

v1 = tf.compat.v1
hvd.init()
X = np.random.default_rng(3).random((16, 3), np.float32)
Y = X @ np.array([[1], [2], [3]], np.float32)
PART = slice(hvd.rank(), None, hvd.size())


def in_python(gradient: Any) -> Any:
    return tf.numpy_function(lambda array: array, [gradient], tf.float32)


def stored(gradient: Any) -> Any:
    variable = v1.get_variable("stored", [3, 1], trainable=False)
    with tf.control_dependencies([variable.assign(gradient)]):
        return variable.read_value()


CHANGES = {
    "not changed": lambda gradient: gradient,
    "clipped": lambda gradient: tf.clip_by_norm(gradient, 0.5),
    "with noise": lambda gradient: gradient + 1e-9 * tf.random.normal([3, 1]),
    "in Python": in_python,
    "stored": stored,
}


def train(wrap: Any, x: Any, y: Any, change: Any, scale: float = 1.0) -> Any:
    with tf.Graph().as_default(), v1.Session() as session:
        zeros = v1.zeros_initializer()
        weights = v1.get_variable("w", [3, 1], initializer=zeros, use_resource=True)
        loss = scale * tf.reduce_mean((tf.matmul(tf.constant(x), weights) - y) ** 2)
        optimizer = wrap(v1.train.GradientDescentOptimizer(0.1))
        if change is None:
            gradient = tf.gradients(loss, weights)[0]
        else:
            ((gradient, _),) = optimizer.compute_gradients(loss)
            gradient = change(gradient)
        step = tf.cond(  # as a program that skips steps does
            tf.reduce_all(tf.math.is_finite(gradient)),
            lambda: optimizer.apply_gradients([(gradient, weights)]),
            tf.no_op,
        )
        session.run(v1.global_variables_initializer())
        for _ in range(10):
            session.run(step)
        return session.run(weights)


def check(name: str, change: Any, op: Any) -> None:
    scale = 1.0 if op is hvd.Average else hvd.size()
    same = change if name == "clipped" else CHANGES["not changed"]
    whole = train(lambda plain: plain, X, Y, same, scale)
    try:
        shared = train(
            lambda plain: hvd.DistributedOptimizer(plain, op=op), X[PART], Y[PART], change
        )
    except hostopt.ConfigError as error:
        print(f"{name}, {op.name}: refused, {str(error).partition('. ')[0]}", flush=True)
        return
    np.testing.assert_allclose(shared, whole, rtol=0, atol=1e-5, err_msg=name)
    print(f"{name}, {op.name}: equal", flush=True)


for op in (hvd.Average, hvd.Sum):
    for name, change in CHANGES.items():
        check(name, change, op)
    check("of tf.gradients", None, op)
