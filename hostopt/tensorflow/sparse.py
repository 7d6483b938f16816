"""Dense and sparse gradients handled alike: `tf.Tensor` and `tf.IndexedSlices`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def values_of(gradient: Any) -> tf.Tensor:
    """Returns the values of a sparse gradient, or a dense gradient itself."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def parts_of(gradient: Any) -> list[tf.Tensor]:
    """Returns the values and indices of a sparse gradient, or a list of the dense gradient."""
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [gradient]


def map_values(fn: Callable[[tf.Tensor], tf.Tensor], gradient: Any) -> Any:
    """Applies a function, which keeps the number of rows, to the values of a gradient."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(fn(gradient.values), gradient.indices, gradient.dense_shape)
    return fn(gradient)


def set_shape_of(gradient: Any, shape: Any) -> None:
    """Sets the static shape of a gradient, unknown to TensorFlow for data of any shape."""
    shape = tf.TensorShape(shape)
    if isinstance(gradient, tf.IndexedSlices):
        shape = tf.TensorShape([None]).concatenate(shape[1:])
    values_of(gradient).set_shape(shape)


def slices_of(dense: tf.Tensor, index_dtype: tf.DType) -> tf.IndexedSlices:
    """Returns all rows of a dense gradient as a sparse one, in their order."""
    shape = tf.shape(dense)
    return tf.IndexedSlices(dense, tf.cast(tf.range(shape[0]), index_dtype), shape)


def sum_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums the rows that have the same index."""
    indices, positions = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, positions, tf.size(indices))
    values.set_shape([None, *slices.values.shape[1:]])
    return tf.IndexedSlices(values, indices, slices.dense_shape)
