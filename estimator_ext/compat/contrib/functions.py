"""Functions of several modules of tf.contrib that TensorFlow has in another form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v2 as tf

from estimator_ext import _tf_private


def list_devices() -> list[str]:
    """Returns the names of the logical devices."""
    return [device.name for device in tf.config.list_logical_devices()]


def batch_and_drop_remainder(batch_size: Any) -> Callable[[Any], Any]:
    """Returns a transformation of a dataset to full batches."""
    return lambda dataset: dataset.batch(batch_size, drop_remainder=True)


def index_table_from_tensor(mapping: Any, *arguments: Any, **options: Any) -> Any:
    """Returns a table from strings to their indices in `mapping`."""
    return _tf_private.index_table_from_tensor(mapping, *arguments, **options)


def index_to_string_table_from_tensor(mapping: Any, *arguments: Any, **options: Any) -> Any:
    """Returns a table from indices to the strings in `mapping`."""
    return _tf_private.index_to_string_table_from_tensor(mapping, *arguments, **options)


def tile_batch(t: Any, multiplier: int, name: str | None = None) -> Any:
    """Repeats each example of a batch, such as the states of an encoder for a beam search.

    Args:
      t: a tensor [batch, ...], or a structure of them.
      multiplier: number of copies of each example, which follow each other.
    """
    with tf.name_scope(name or "tile_batch"):
        return tf.nest.map_structure(lambda each: tf.repeat(each, multiplier, 0), t)


def sequence_loss(
    logits: Any,
    targets: Any,
    weights: Any,
    average_across_timesteps: bool = True,
    average_across_batch: bool = True,
    softmax_loss_function: Callable[..., Any] | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """Returns the weighted cross-entropy of sequences.

    Args:
      logits: [batch, time, classes].
      targets: integers [batch, time].
      weights: [batch, time].
      average_across_timesteps: divides the sum over time by the sum of the weights.
      average_across_batch: the same over the batch.
      softmax_loss_function: gets `labels` [batch * time] and `logits` [batch * time, classes].
    """
    with tf.name_scope(name or "sequence_loss"):
        shape = tf.shape(logits)
        entropy = softmax_loss_function or tf.nn.sparse_softmax_cross_entropy_with_logits
        flat = tf.reshape(logits, [-1, shape[2]])
        losses = entropy(labels=tf.reshape(targets, [-1]), logits=flat)
        losses = tf.reshape(losses * tf.reshape(weights, [-1]), shape[:2])
        averaged = (average_across_batch, average_across_timesteps)
        axes = [axis for axis, is_averaged in enumerate(averaged) if is_averaged]
        if not axes:
            return losses
        return tf.math.divide_no_nan(tf.reduce_sum(losses, axes), tf.reduce_sum(weights, axes))
