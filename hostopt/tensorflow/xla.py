"""Boundaries between clusters of XLA, so that gradients can leave early."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


@tf.custom_gradient
def overlap(tensor: Any) -> Any:
    """Returns the tensor, and splits the XLA cluster that it belongs to.

    An XLA cluster delivers its results when all of it has run. If a model is one cluster, its
    gradients are reduced after backward instead of beside it. This splits the cluster in forward
    and in backward. It applies to automatic clustering; a function with jit_compile=True is
    always one cluster.

    Args:
      tensor: output of a layer, for example.

    Returns:
      The same tensor.
    """

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        return _outside_clusters(upstream)

    return _outside_clusters(tensor), gradient


def _outside_clusters(tensor: Any) -> tf.Tensor:
    with tf.xla.experimental.jit_scope(compile_ops=False):
        # an identity that TensorFlow does not remove from the graph
        return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)
