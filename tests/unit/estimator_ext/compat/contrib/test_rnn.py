"""Cells of tf.contrib.rnn against BasicLSTMCell and LSTMCell of TensorFlow."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from estimator_ext.compat.contrib import rnn

v1 = tf.compat.v1
TIME, BATCH, DEPTH, UNITS = 5, 3, 2, 4
INPUTS = np.random.default_rng(0).normal(size=[TIME, BATCH, DEPTH]).astype(np.float32)
LENGTHS = [5, 2, 0]


def computed(build: Callable[[tf.Tensor], tuple[Any, Any]]) -> tuple[Any, Any, Any, Any]:
    """Returns outputs and state, variables, and the gradients of a loss, with equal variables."""
    with tf.Graph().as_default(), v1.Session() as session:
        inputs = tf.constant(INPUTS)
        with v1.variable_scope("rnn"):
            outputs, state = build(inputs)
        variables = v1.trainable_variables()
        loss = tf.reduce_sum(outputs**2) + sum(tf.reduce_sum(e**3) for e in tf.nest.flatten(state))
        slopes = tf.gradients(loss, [*variables, inputs])
        session.run(v1.global_variables_initializer())
        for variable in variables:
            random = np.random.default_rng(zlib.crc32(variable.op.name.split("/")[-1].encode()))
            variable.load(random.normal(size=variable.shape), session)
        values = session.run([outputs, state, slopes])
        return (*values[:2], [each.op.name for each in variables], values[2])


def dynamic(cell: Any, **options: Any) -> Callable[[tf.Tensor], tuple[Any, Any]]:
    return lambda inputs: v1.nn.dynamic_rnn(
        cell(), inputs, time_major=True, dtype=tf.float32, scope="cell", **options
    )


def check_equal(actual: Any, expected: Any) -> None:
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, expected
    )


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("bias", [1.0, 0.5])
def test_a_fused_cell_is_a_loop_over_a_basic_cell(bias: float, lengths: Any) -> None:
    fused = computed(
        lambda inputs: rnn.LSTMBlockFusedCell(UNITS, bias)(
            inputs, dtype=tf.float32, sequence_length=lengths
        )
    )
    basic = computed(
        dynamic(lambda: v1.nn.rnn_cell.BasicLSTMCell(UNITS, bias), sequence_length=lengths)
    )
    assert fused[2] == ["rnn/lstm_fused_cell/kernel", "rnn/lstm_fused_cell/bias"]
    for index in (0, 1, 3):
        check_equal(fused[index], basic[index])


@pytest.mark.parametrize("peephole", [False, True])
def test_a_block_cell_is_an_lstm_cell(peephole: bool) -> None:
    clip = 0.3
    block = computed(dynamic(lambda: rnn.LSTMBlockCell(UNITS, 1.0, clip, peephole)))
    stock = computed(
        dynamic(lambda: v1.nn.rnn_cell.LSTMCell(UNITS, use_peepholes=peephole, cell_clip=clip))
    )
    assert sorted(block[2]) == sorted(stock[2])
    for index in (0, 1):
        check_equal(block[index], stock[index])


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_a_reversed_cell_reads_each_sequence_from_its_end(lengths: Any) -> None:
    start = [np.full([BATCH, UNITS], value, np.float32) for value in (0.1, 0.2)]
    reverse = computed(
        lambda inputs: rnn.TimeReversedFusedRNN(rnn.LSTMBlockFusedCell(UNITS))(
            inputs, initial_state=tuple(map(tf.constant, start)), sequence_length=lengths
        )
    )

    def by_bidirectional(inputs: tf.Tensor) -> tuple[Any, Any]:
        cells = [v1.nn.rnn_cell.BasicLSTMCell(UNITS) for _ in "fb"]
        with v1.variable_scope("both"):
            outputs, states = v1.nn.bidirectional_dynamic_rnn(
                *cells,
                inputs,
                sequence_length=lengths,
                initial_state_bw=rnn.LSTMStateTuple(*map(tf.constant, start)),
                dtype=tf.float32,
                time_major=True,
            )
        v1.get_collection_ref("trainable_variables")[:] = v1.trainable_variables(".*bw/")
        return outputs[1], states[1]

    both = computed(by_bidirectional)
    for index in (0, 1, 3):
        check_equal(reverse[index], both[index])
