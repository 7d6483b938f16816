"""Trains small models with hostopt.tensorflow in several ways, and saves the variables of each.

Usage: api_training.py DIRECTORY. Ranks start from different values, and share each batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt.tensorflow as hvd

v1 = tf.compat.v1
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
STEPS, BATCH, TOKENS = 20, 16, 3
RANDOM = np.random.RandomState(0)
X = RANDOM.randn(STEPS, BATCH, 8).astype(np.float32)
IDS = RANDOM.randint(0, 12, (STEPS, BATCH, TOKENS))
Y = X.sum(-1, keepdims=True) + IDS.sum(-1, keepdims=True).astype(np.float32)
START = {
    "embedding": RANDOM.randn(12, 4).astype(np.float32),
    "kernel": RANDOM.randn(12, 300).astype(np.float32) / 10,
    "head": RANDOM.randn(300, 1).astype(np.float32) / 10,
}


def start(name: str) -> np.ndarray:
    """Rank 0 starts as a single process does; the others start elsewhere."""
    return START[name] + RANK


def part(step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """This rank's part of a batch."""
    return X[step, RANK::SIZE], IDS[step, RANK::SIZE], Y[step, RANK::SIZE]


def loss_of(variables: dict[str, Any], x: Any, ids: Any, y: Any) -> tf.Tensor:
    rows = tf.reduce_mean(tf.nn.embedding_lookup(variables["embedding"], ids), 1)
    hidden = tf.nn.relu(tf.matmul(tf.concat([x, rows], 1), variables["kernel"]))
    return tf.reduce_mean(tf.square(tf.matmul(hidden, variables["head"]) - y))


def session(wrap: Callable[[Any], Any], clip: bool = False) -> dict[str, np.ndarray]:
    with tf.Graph().as_default(), v1.Session() as session:
        variables = {name: v1.get_variable(name, initializer=start(name)) for name in START}
        inputs = [
            v1.placeholder(tf.as_dtype(each.dtype), [None, each.shape[1]]) for each in part(0)
        ]
        optimizer = wrap(v1.train.AdamOptimizer(0.01))
        pairs = optimizer.compute_gradients(loss_of(variables, *inputs))
        if clip:
            gradients, _ = tf.clip_by_global_norm([g for g, _ in pairs], 0.5)
            pairs = list(zip(gradients, [v for _, v in pairs]))
        train_op = optimizer.apply_gradients(pairs)
        broadcast = hvd.broadcast_global_variables(0)
        session.run(v1.global_variables_initializer())
        session.run(broadcast)
        for step in range(STEPS):
            session.run(train_op, dict(zip(inputs, part(step))))
        return session.run(variables)


def session_of_some_gradients() -> dict[str, np.ndarray]:
    """Most steps train the head alone, so the session computes no other gradients."""
    with tf.Graph().as_default(), v1.Session() as session:
        variables = {name: v1.get_variable(name, initializer=START[name]) for name in START}
        inputs = [
            v1.placeholder(tf.as_dtype(each.dtype), [None, each.shape[1]]) for each in part(0)
        ]
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(0.01), sparse_as_dense=True, bucket_cap_mb=2**-8
        )
        pairs = optimizer.compute_gradients(loss_of(variables, *inputs))
        train_all = optimizer.apply_gradients(pairs)
        train_head = optimizer.apply_gradients([p for p in pairs if p[1] is variables["head"]])
        session.run(v1.global_variables_initializer())
        for step in range(STEPS):
            train_op = train_head if step % 4 else train_all
            session.run(train_op, dict(zip(inputs, part(step))))
        return session.run(variables)


def tape(in_function: bool, signature: Any = None, **options: Any) -> dict[str, np.ndarray]:
    variables = {name: tf.Variable(start(name), name=name) for name in START}
    hvd.broadcast_variables(list(variables.values()), root_rank=0)

    def train(x: Any, ids: Any, y: Any) -> None:
        with tf.GradientTape() as tape_:
            loss = loss_of(variables, x, ids, y)
        tape_ = hvd.DistributedGradientTape(tape_, **options)
        gradients = tape_.gradient(loss, variables)
        for name, variable in variables.items():
            if isinstance(gradients[name], tf.IndexedSlices):
                variable.scatter_sub(
                    tf.IndexedSlices(0.02 * gradients[name].values, gradients[name].indices)
                )
            else:
                variable.assign_sub(0.02 * gradients[name])

    step_function = tf.function(train, input_signature=signature) if in_function else train
    for step in range(STEPS):
        step_function(*map(tf.constant, part(step)))
    return {name: variable.numpy() for name, variable in variables.items()}


def by_hand() -> dict[str, np.ndarray]:
    """Reduces each gradient eagerly, by itself."""
    variables = {name: tf.Variable(START[name], name=name) for name in START}
    for step in range(STEPS):
        with tf.GradientTape() as tape_:
            loss = loss_of(variables, *map(tf.constant, part(step)))
        for name, gradient in tape_.gradient(loss, variables).items():
            reduced = tf.convert_to_tensor(hvd.allreduce(gradient, name=name))
            variables[name].assign_sub(0.02 * reduced)
    return {name: variable.numpy() for name, variable in variables.items()}


def through_the_collectives() -> dict[str, np.ndarray]:
    """Computes the loss from gathered outputs, so that gradients pass through the collectives."""
    head = tf.Variable(START["head"])
    kernel = tf.Variable(START["kernel"])
    for step in range(STEPS):
        x, ids, y = part(step)
        with tf.GradientTape() as tape_:
            rows = tf.reduce_mean(tf.gather(START["embedding"], ids), 1)
            hidden = tf.nn.relu(tf.matmul(tf.concat([x, rows], 1), kernel))
            outputs = hvd.allgather(tf.matmul(hidden, head) - y)
            loss = tf.reduce_mean(tf.square(outputs)) / SIZE  # every rank computes it
        gradients = tape_.gradient(loss, [kernel, head])
        for variable, gradient in zip([kernel, head], gradients):
            variable.assign_sub(0.02 * hvd.allreduce(gradient, op=hvd.Sum))
    return {"kernel": kernel.numpy(), "head": head.numpy()}


def keep(optimizer: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer)


WAYS: dict[str, Callable[[], dict[str, np.ndarray]]] = {
    "session": lambda: session(keep),
    "session, clipped": lambda: session(keep, clip=True),
    "session, dense": lambda: session(
        lambda o: hvd.DistributedOptimizer(o, sparse_as_dense=True, bucket_cap_mb=2**-8)
    ),
    "session, predivided": lambda: session(
        lambda o: hvd.DistributedOptimizer(o, gradient_predivide_factor=2.0)
    ),
    "session, two passes": lambda: session(
        lambda o: hvd.DistributedOptimizer(
            o, backward_passes_per_step=2, average_aggregated_gradients=True
        )
    ),
    "session, some gradients": session_of_some_gradients,
    "tape in a function": lambda: tape(in_function=True),
    "tape of any shape": lambda: tape(
        in_function=True, signature=[tf.TensorSpec([None, None], each.dtype) for each in part(0)]
    ),
    "eager tape": lambda: tape(in_function=False),
    "dense tape": lambda: tape(in_function=True, sparse_as_dense=True),
    "by hand": by_hand,
    "through the collectives": through_the_collectives,
}

for way, train_ in WAYS.items():
    np.savez(f"{sys.argv[1]}/{way}-{RANK}.npz", **train_())
    print("trained", way, flush=True)
