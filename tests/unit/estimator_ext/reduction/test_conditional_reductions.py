"""Reductions in branches and loops: only below predicates that are the same on all ranks.

`test_deferred_reductions.py` trains such programs on two ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

import estimator_ext
import hostopt
from estimator_ext.graphs.fingerprint import read_updates
from estimator_ext.reduction.gradient_reduction import refuse_reductions_of_some_ranks

estimator_ext.install()


def reduced(tensor: tf.Tensor) -> tf.Tensor:
    """Builds an operation that looks like a reduction."""
    dataset = tf.data.Dataset.from_tensors(tensor)
    return tf.raw_ops.DatasetToSingleElement(
        dataset=dataset._variant_tensor,
        output_types=[tensor.dtype],
        output_shapes=[tensor.shape],
        name="HostAllReduce",
    )[0]


def refused(build: Callable[[tf.Tensor], object]) -> str | None:
    """Builds a program with a predicate that differs by rank, and returns the error, if any."""
    with tf.Graph().as_default() as graph:
        differs = tf.compat.v1.placeholder(tf.bool, [], "differs")
        build(differs)
        try:
            refuse_reductions_of_some_ranks(read_updates(graph.get_operations(), {differs.op}))
        except hostopt.ConfigError as error:
            return str(error)
    return None


def loop(_: object = None) -> tf.Tensor:
    return tf.while_loop(lambda i: i < 3, lambda i: [i + reduced(i)], [tf.constant(0)])[0]


def test_a_branch_that_all_ranks_take_may_reduce() -> None:
    assert refused(lambda _: tf.cond(tf.constant(True), loop, lambda: 0)) is None


def test_a_branch_that_only_some_ranks_take_may_not_reduce() -> None:
    def build(differs: tf.Tensor) -> None:
        tf.cond(differs, lambda: reduced(tf.constant(1)), lambda: 0)

    assert "predicate 'differs:0' of a branch or loop" in str(refused(build))


def test_a_loop_in_a_branch_that_only_some_ranks_take_may_not_reduce() -> None:
    assert "'differs:0'" in str(refused(lambda differs: tf.cond(differs, loop, lambda: 0)))


def test_a_branch_without_reductions_may_differ() -> None:
    assert refused(lambda differs: tf.cond(differs, lambda: 1, lambda: 0)) is None


def test_a_loop_whose_length_differs_between_ranks_may_not_reduce() -> None:
    def build(differs: tf.Tensor) -> None:
        count = tf.cast(tf.logical_not(differs), tf.int32)
        limit = tf.constant(0)
        tf.while_loop(lambda i, n: i < n, lambda i, n: [i + reduced(i), n + count], [limit, limit])

    assert "or loop says so, which may differ by rank" in str(refused(build))


def test_a_loop_that_all_ranks_run_may_reduce() -> None:
    assert refused(loop) is None
