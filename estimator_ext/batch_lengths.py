"""The number of examples in a batch: as a tensor, and if known before the data are read."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from estimator_ext._tf_private import variant_tensor
from estimator_ext.divided_pipeline import kind_of
from estimator_ext.operation_kinds import arguments

__all__: list[str] = []

UNKNOWN = -1  # batches may differ in length
# Their elements are batches of their input.
_PASSING = ("AssertCardinality", "AutoShard", "Cache", "MaxIntraOpParallelism", "Model", "Options")
_PASSING += ("Prefetch", "PrivateThreadPool", "Repeat", "Shard", "Shuffle", "ShuffleAndRepeat")
_PASSING += ("Skip", "Take")
_BATCHES = ("Batch", "MapAndBatch", "PaddedBatch", "ParallelBatch")


def length_of(batch: Any) -> tf.Tensor:
    """Returns the number of examples of a batch.

    Args:
      batch: features, and labels if there are any.

    Returns:
      Scalar of int64: the length of the first tensor, or 1 if it is a scalar.
    """
    first = tf.nest.flatten(batch)[0]
    if isinstance(first, tf.SparseTensor):
        return tf.reduce_prod(first.dense_shape[:1])
    if isinstance(first, tf.RaggedTensor):
        return first.nrows(tf.int64)
    return tf.reduce_prod(tf.shape(first, tf.int64)[:1])


def fixed_length(data: Any, config: tf.compat.v1.ConfigProto) -> int:
    """Finds the number of examples that each batch has.

    Args:
      data: the result of input_fn, in a graph.
      config: configuration of a session that reads the length of a dataset.

    Returns:
      The number; UNKNOWN if batches may differ, as the last one of an epoch does.
    """
    is_dataset = isinstance(data, tf.data.Dataset)
    tensors = tf.nest.flatten(data.element_spec if is_dataset else data)
    shape = tf.TensorShape(getattr(tensors[0], "shape", None) if tensors else [])
    if shape.rank == 0:
        return 1
    length = shape.as_list()[0] if shape.rank else None
    if length is not None:
        return int(length)
    return _length_of_batches(data, config) if is_dataset else UNKNOWN


def _length_of_batches(data: tf.data.Dataset, config: tf.compat.v1.ConfigProto) -> int:
    op = variant_tensor(data).op
    while kind_of(op) in _PASSING:
        op = op.inputs[0].op
    if kind_of(op) not in _BATCHES:
        return UNKNOWN
    (size,) = (tensor for name, tensor, _ in arguments(op) if name == "batch_size")
    examples = tf.raw_ops.DatasetCardinality(input_dataset=op.inputs[0])
    with tf.compat.v1.Session(config=config) as session:
        size, examples = session.run([size, examples])
    is_full = examples == tf.data.INFINITE_CARDINALITY or (examples >= 0 and examples % size == 0)
    return int(size) if is_full else UNKNOWN
