"""The number of examples in a batch: as a tensor, and if known before the data are read."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from estimator_ext._tf_private import variant_tensor
from estimator_ext.graphs.operation_kinds import arguments
from estimator_ext.pipelines.divided_pipeline import kind_of

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


class Lengths(NamedTuple):
    """The length of data and of their batches.

    Args:
      endless: True if the data never end; False for what is no dataset.
      batch: number of examples in each batch; UNKNOWN if batches may differ, as the last one of
        an epoch does.
    """

    endless: bool
    batch: int


def lengths_of(data: Any, config: tf.compat.v1.ConfigProto) -> Lengths:
    """Finds lengths before data are read.

    Args:
      data: the result of input_fn, in a graph.
      config: configuration of a session that asks a dataset.
    """
    if not isinstance(data, tf.data.Dataset):
        return Lengths(False, _static_length(data))
    static, op = _static_length(data.element_spec), variant_tensor(data).op
    while kind_of(op) in _PASSING:
        op = op.inputs[0].op
    asked = [tf.raw_ops.DatasetCardinality(input_dataset=variant_tensor(data))]
    if static == UNKNOWN and kind_of(op) in _BATCHES:
        asked += [tensor for name, tensor, _ in arguments(op) if name == "batch_size"]
        asked.append(tf.raw_ops.DatasetCardinality(input_dataset=op.inputs[0]))
    with tf.compat.v1.Session(config=config) as session:
        batches, *of_batch = session.run(asked)
    if of_batch:
        size, examples = of_batch
        if examples == tf.data.INFINITE_CARDINALITY or (examples >= 0 and examples % size == 0):
            static = int(size)
    return Lengths(bool(batches == tf.data.INFINITE_CARDINALITY), static)


def _static_length(structure: Any) -> int:
    tensors = tf.nest.flatten(structure)
    shape = tf.TensorShape(getattr(tensors[0], "shape", None) if tensors else [])
    if shape.rank is None:
        return UNKNOWN
    length = shape.as_list()[0] if shape.rank else 1
    return UNKNOWN if length is None else int(length)
