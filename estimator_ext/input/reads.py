"""Reads of the input: before the step, and outside of it.

A loop of steps forbids the latter to hooks and summaries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from estimator_ext._tf_private import add_control_inputs
from hostopt.tensorflow.background import HOST_DEVICE

_ALLOWED = "hostopt/reads_outside_of_the_loop"


def prefetched(data: Any, depth: int) -> tf.data.Dataset:
    """Adds prefetching, on the host, to the end of a dataset."""
    if not isinstance(data, tf.data.Dataset):
        raise ValueError(
            f"RunConfig.prefetch_depth is {depth} and input_fn returned a {type(data).__name__}, "
            "wanted a tf.data.Dataset: only a dataset can be prefetched. Return a dataset, or "
            "leave prefetch_depth out"
        )
    with tf.device(HOST_DEVICE):
        return data.prefetch(depth)


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
