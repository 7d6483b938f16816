"""A program for tf.estimator that prints the elements it has trained with; argument: the kind."""

import random
import sys
import time

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
data = tf.data.Dataset
ROWS, BATCH = 64, 4


def slowly(x):
    time.sleep(random.SystemRandom().random() / 100)
    return x


def ordered():
    return data.range(ROWS)


def part(i):
    numbers = data.range(8 * i, 8 * i + 8)
    return numbers.map(lambda x: tf.ensure_shape(tf.numpy_function(slowly, [x], tf.int64), []))


def kept(x):
    return tf.random.uniform([]) < 0.5, x


def generate():
    yield from np.random.default_rng().permutation(ROWS)


def queue():
    rows = {"x": np.random.default_rng().permutation(ROWS)}
    return v1.estimator.inputs.numpy_input_fn(rows, batch_size=BATCH, shuffle=False)()


def seeded_by_time():
    tf.random.set_seed(time.time_ns() % 2**31)
    return data.range(ROWS).shuffle(ROWS)


KINDS = {
    "range": ordered,
    "generator of NumPy": lambda: data.from_tensor_slices(
        np.random.default_rng().permutation(ROWS)
    ),
    "generator of Python": lambda: data.from_tensor_slices(
        random.Random().sample(range(ROWS), ROWS)
    ),
    "from_generator": lambda: data.from_generator(generate, tf.int64, []),
    "interleave": lambda: data.range(8).interleave(
        part, cycle_length=4, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False
    ),
    "seed": lambda: data.range(ROWS).shuffle(ROWS, seed=time.time_ns() % 2**31),
    "global seed": seeded_by_time,
    "filter": lambda: (
        data.range(ROWS)
        .repeat(4)
        .map(kept, num_parallel_calls=4)
        .filter(lambda keep, _: keep)
        .map(lambda _, x: x)
        .take(ROWS)
    ),
    "no seed": lambda: data.range(ROWS).shuffle(ROWS),
    "iterator": lambda: v1.data.make_one_shot_iterator(
        data.from_tensor_slices(np.random.default_rng().permutation(ROWS)).batch(BATCH)
    ).get_next(),
    "queue": queue,
}


class Print(v1.train.SessionRunHook):
    def __init__(self):
        self._seen = []

    def before_run(self, context):
        return v1.train.SessionRunArgs(v1.get_collection("x"))

    def after_run(self, context, values):
        self._seen += values.results[0].tolist()

    def end(self, session):
        print("SEEN", self._seen, flush=True)


def input_fn():
    made = KINDS[sys.argv[1]]()
    return made.batch(BATCH) if isinstance(made, data) else made


def model_fn(features, labels, mode):
    x = features["x"] if isinstance(features, dict) else features
    v1.add_to_collection("x", x)
    w = v1.get_variable("w", [])
    loss = tf.reduce_mean((w - tf.cast(x, tf.float32)) ** 2)
    step = v1.train.get_global_step()
    train_op = v1.train.GradientDescentOptimizer(0.01).minimize(loss, step)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


tf.estimator.Estimator(model_fn, sys.argv[2]).train(input_fn, [Print()])
