"""Reads of the input outside of the step, which a loop of steps forbids to hooks and summaries."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from estimator_ext._tf_private import add_control_inputs

_ALLOWED = "hostopt/reads_outside_of_the_loop"


def forbid_reads(operations: Iterable[tf.Operation], message: str) -> None:
    """Makes those operations that read a batch fail, unless `allowed_reads` is fed."""
    with tf.control_dependencies(None):
        is_allowed = tf.compat.v1.placeholder_with_default(False, [], "reads_are_allowed")
        check = tf.raw_ops.Assert(condition=is_allowed, data=[message])
    tf.compat.v1.add_to_collection(_ALLOWED, is_allowed)
    for op in operations:
        if op.type.startswith("IteratorGetNext"):
            add_control_inputs(op, [check])


def allowed_reads(graph: tf.Graph) -> dict[tf.Tensor, bool]:
    """Returns a feed_dict with which a session can read a batch outside of the step."""
    return dict.fromkeys(graph.get_collection(_ALLOWED), True)
