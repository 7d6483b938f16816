"""Trains with an uneven number of steps on each rank, until all ranks have joined.

The reference is computed in this process: each step applies the sum of the gradients of the ranks
that still have data, divided by the number of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt.tensorflow as hvd
from hostopt import process_ring

v1 = tf.compat.v1
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
STEPS = [3, 6, 5][:SIZE]  # of each rank
LAST = int(np.argmax(STEPS))
RANDOM = np.random.RandomState(0)
X = RANDOM.randn(SIZE, max(STEPS), 4, 8).astype(np.float32)
IDS = RANDOM.randint(0, 12, (SIZE, max(STEPS), 4, 3))
START = {
    "embedding": RANDOM.randn(12, 4).astype(np.float32),
    "kernel": RANDOM.randn(12, 2000).astype(np.float32) / 10,
    "head": RANDOM.randn(2000, 20).astype(np.float32) / 100,
}
RATE = 0.1


def loss_of(variables: dict[str, Any], x: Any, ids: Any) -> tf.Tensor:
    rows = tf.reduce_mean(tf.nn.embedding_lookup(variables["embedding"], ids), 1)
    hidden = tf.nn.relu(tf.matmul(tf.concat([x, rows], 1), variables["kernel"]))
    return tf.reduce_mean(tf.square(tf.matmul(hidden, variables["head"]) - 1.0))


def reference() -> dict[str, np.ndarray]:
    variables = {name: tf.Variable(value) for name, value in START.items()}
    for step in range(max(STEPS)):
        with tf.GradientTape() as tape:
            active = [rank for rank in range(SIZE) if step < STEPS[rank]]
            total = sum(loss_of(variables, X[rank, step], IDS[rank, step]) for rank in active)
        for name, gradient in tape.gradient(total, variables).items():
            variables[name].assign_sub(RATE / SIZE * tf.convert_to_tensor(gradient))
    return {name: variable.numpy() for name, variable in variables.items()}


def tape(in_function: bool, **options: Any) -> dict[str, np.ndarray]:
    variables = {name: tf.Variable(value, name=name) for name, value in START.items()}

    def train(x: Any, ids: Any) -> None:
        with tf.GradientTape() as tape_:
            loss = loss_of(variables, x, ids)
        tape_ = hvd.DistributedGradientTape(tape_, **options)
        for name, gradient in tape_.gradient(loss, variables).items():
            variables[name].assign_sub(RATE * tf.convert_to_tensor(gradient))
        hvd.allreduce(loss, name="loss")

    step_function = tf.function(train) if in_function else train
    for step in range(STEPS[RANK]):
        step_function(tf.constant(X[RANK, step]), tf.constant(IDS[RANK, step]))
    last = hvd.join()
    assert last == LAST, last
    hvd.broadcast_variables(list(variables.values()), root_rank=last)
    return {name: variable.numpy() for name, variable in variables.items()}


def session() -> dict[str, np.ndarray]:
    with tf.Graph().as_default(), v1.Session() as session_:
        variables = {name: v1.get_variable(name, initializer=START[name]) for name in START}
        inputs = [v1.placeholder(tf.float32, [4, 8]), v1.placeholder(tf.int64, [4, 3])]
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(RATE))
        train_op = optimizer.minimize(loss_of(variables, *inputs))
        join, broadcast = hvd.join(), hvd.broadcast_global_variables(LAST)
        session_.run(v1.global_variables_initializer())
        for step in range(STEPS[RANK]):
            session_.run(train_op, {inputs[0]: X[RANK, step], inputs[1]: IDS[RANK, step]})
        assert session_.run(join) == LAST
        session_.run(broadcast)
        return session_.run(variables)


def through_the_collectives() -> dict[str, np.ndarray]:
    """Passes gradients through allgather and reducescatter while ranks join."""
    for step in range(STEPS[RANK]):
        active = [rank for rank in range(SIZE) if step < STEPS[rank]]
        x = tf.Variable(np.full([RANK + 1, 2], RANK, np.float32))
        rows = tf.Variable(np.ones([7, 2], np.float32))
        with tf.GradientTape() as tape_:
            gathered = hvd.allgather(x)
            scattered = hvd.reducescatter(rows, op=hvd.Sum) * (RANK + 1.0)
            loss = tf.reduce_sum(gathered * tf.range(0.0, len(gathered))[:, None])
            loss += tf.reduce_sum(scattered)
        wanted = np.concatenate([np.full([rank + 1, 2], rank) for rank in active])
        assert np.array_equal(gathered, wanted)
        by_x, by_rows = tape_.gradient(loss, [x, rows])
        begin = sum(rank + 1 for rank in active if rank < RANK)
        positions = np.arange(begin, begin + RANK + 1)[:, None] * np.ones([1, 2])
        assert np.array_equal(by_x, len(active) * positions), (by_x, active)
        parts = np.array_split(np.ones([7, 2]), SIZE)
        wanted = [part * ((rank in active) * (rank + 1)) for rank, part in enumerate(parts)]
        assert np.array_equal(by_rows, np.concatenate(wanted)), (by_rows, active)
    assert hvd.join() == LAST
    return {}


WAYS: dict[str, Callable[[], dict[str, np.ndarray]]] = {
    "tape in a function": lambda: tape(in_function=True),
    "small buckets": lambda: tape(in_function=True, sparse_as_dense=True, bucket_cap_mb=2**-4),
    "eager tape": lambda: tape(in_function=False, compression=hvd.Compression.none),
    "session": session,
    "through the collectives": through_the_collectives,
}
EXPECTED = reference()
for way, train_ in WAYS.items():
    for name, result in train_().items():
        np.testing.assert_allclose(result, EXPECTED[name], rtol=1e-4, atol=1e-5, err_msg=way)
print("all ways are equal", flush=True)

# rank 0 joins without a step, so it has not built the gradients of the others
variable = tf.Variable([1.0], name="late")
try:
    if RANK:
        with tf.GradientTape() as tape_:
            loss_ = variable * 1.0
        hvd.DistributedGradientTape(tape_, name="late").gradient(loss_, variable)
    hvd.join()
except Exception:
    print("ended with", process_ring.current().communicator.transport.error, flush=True)
