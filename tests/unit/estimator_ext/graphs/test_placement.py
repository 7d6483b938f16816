"""Operations of a step that move from the accelerator to the host; a second CPU stands for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from estimator_ext.graphs.placement import is_on, move_updates

v1 = tf.compat.v1
HOST, ACCELERATOR = "/device:CPU:0", "/device:CPU:1"
SHAPE = [2, 3]


def variable(shape: Any = SHAPE, trainable: bool = False) -> tf.Tensor:
    """Returns the value of a new variable, which is read on the host."""
    name = f"v{len(v1.global_variables())}"
    with tf.device(HOST):
        return v1.get_variable(name, shape, trainable=trainable, use_resource=True).read_value()


def test_what_belongs_to_updates_moves_to_the_host() -> None:
    with tf.Graph().as_default() as graph, tf.device(ACCELERATOR):
        x, w, frozen, of_critic, slot = (
            np.ones([4, 2], np.float32),
            variable(trainable=True),
            *(variable() for _ in range(3)),
        )
        logits = x @ w
        loss = tf.add(tf.reduce_mean(logits * (x @ frozen)), 1.0, name="loss")
        critic = tf.reduce_mean(tf.square(logits - x @ of_critic), name="critic")  # not reported
        gradients = [tf.gradients(each, [w])[0] for each in (loss, critic)]
        with tf.device(HOST):
            total, rate = v1.placeholder(tf.float32, SHAPE), v1.placeholder(tf.float32, [])
        moment = tf.add(0.9 * slot, gradients[0], name="moment")
        with v1.colocate_with(moment.op):
            noise = tf.ones_like(gradients[1], name="noise")
        reference = v1.Variable(np.ones(SHAPE, np.float32), trainable=False, use_resource=False)
        results = [
            *gradients,
            tf.multiply(moment, noise, name="noisy"),
            tf.multiply(reference, noise, name="of_reference"),
            tf.multiply(total, 0.5, name="clipped"),
            tf.multiply(rate, 0.1, name="rate"),
            tf.multiply(variable([7]), 2.0, name="not_a_slot"),
            tf.TensorArray(tf.float32, 1).write(0, tf.negative(total, "in_array")).stack(),
            tf.cond(rate > 0, lambda: -total, lambda: total, name="branch"),
            tf.identity(loss, "reported"),
        ]
        with tf.device(HOST):
            targets = [tf.stop_gradient(each).op for each in results]
        before = {op for op in graph.get_operations() if is_on(op, ACCELERATOR)}
        move_updates(targets, [loss, critic], [total], ACCELERATOR)
    moved = {op.name for op in before if is_on(op, HOST)}
    named = {"moment", "noisy", "clipped", "rate", "noise", "not_a_slot", "in_array", "branch"}
    named |= {"loss", "of_reference", "x"}
    assert moved & named == {"moment", "noisy", "clipped", "rate"}
    assert not [name for name in moved if name.startswith("gradients")]
    with v1.Session(
        graph=graph, config=v1.ConfigProto(device_count={"CPU": 2}, allow_soft_placement=False)
    ) as session:
        session.run(v1.variables_initializer(graph.get_collection("variables")))
        session.run(results, {total: np.ones(SHAPE), rate: 1.0})


def test_without_an_accelerator_nothing_moves() -> None:
    with tf.Graph().as_default(), tf.device(HOST):
        clipped = tf.multiply(v1.placeholder(tf.float32, SHAPE), 0.5)
    move_updates([clipped.op], [], [clipped.op.inputs[0]], HOST)
    assert is_on(clipped.op, HOST)
