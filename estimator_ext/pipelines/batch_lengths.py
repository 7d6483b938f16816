"""The number of examples in a batch: as a tensor, and if known before the data are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from estimator_ext._tf_private import constant_of, variant_tensor
from estimator_ext.graphs.operation_kinds import arguments
from estimator_ext.graphs.walks import data_before, walk
from estimator_ext.pipelines.divided_pipeline import kind_of

UNKNOWN = -1  # batches may differ in length
# Their elements are batches of their input.
_PASSING: tuple[str, ...] = ("AssertCardinality", "AutoShard", "Cache", "MaxIntraOpParallelism")
_PASSING += ("Model", "Options", "Prefetch", "PrivateThreadPool", "Repeat", "Shard", "Shuffle")
_PASSING += ("ShuffleAndRepeat", "Skip", "Take")
_BATCHES = ("Batch", "MapAndBatch", "PaddedBatch", "ParallelBatch")
_SAME_NUMBER = ("Cache", "Map", "Model", "Options", "ParallelMap", "Prefetch", "Shuffle")
_ENDLESS = tf.data.INFINITE_CARDINALITY


def length_of(batch: Any) -> tf.Tensor:
    """Returns the examples of a batch, in int64: the length of `first_read`, 1 for a scalar."""
    first = first_read(tf.nest.flatten(batch))
    if isinstance(first, tf.SparseTensor):
        return tf.reduce_prod(first.dense_shape[:1])
    if isinstance(first, tf.RaggedTensor):
        return first.nrows(tf.int64)
    return tf.reduce_prod(tf.shape(first, tf.int64)[:1])


def first_read(parts: Sequence[Any]) -> Any:
    """Returns the first part of a batch that is computed from an iterator, or else the first.

    A program may return another feature that it never computes, and that cannot be computed.
    """
    return next((part for part in parts if _is_read(part)), parts[0])


def _is_read(part: Any) -> bool:
    tensors = [
        each for each in tf.nest.flatten(part, expand_composites=True) if tf.is_tensor(each)
    ]
    if tf.executing_eagerly():
        return bool(tensors)
    before = walk([tensor.op for tensor in tensors], data_before)
    return any(op.type.startswith("IteratorGetNext") for op in before)


class Lengths(NamedTuple):
    """The length of data and of their batches."""

    endless: bool  # False for what is no dataset
    batch: int  # examples; UNKNOWN if batches may differ, as the last one of an epoch does


def lengths_of(data: Any, config: tf.compat.v1.ConfigProto) -> Lengths:
    """Finds the lengths of what input_fn returned in a graph, before data are read."""
    if not isinstance(data, tf.data.Dataset):
        return Lengths(False, _static_length(data))
    static, op = _static_length(data.element_spec), variant_tensor(data).op
    while kind_of(op) in _PASSING:
        op = op.inputs[0].op
    datasets, asked = [variant_tensor(data)], []
    if static == UNKNOWN and (asked := batch_sizes(op)):
        datasets.append(op.inputs[0])  # of examples
    sizes = [constant_of(each) for each in asked]
    counts: list[Any] = [_number_of(each.op) for each in datasets]
    if any(each is None for each in (*sizes, *counts)):
        # slow with large constants, all of which a session copies
        cardinalities = [tf.raw_ops.DatasetCardinality(input_dataset=each) for each in datasets]
        with tf.compat.v1.Session(config=config) as session:
            sizes, counts = session.run([asked, cardinalities])
    for size, number in zip(sizes, counts[1:]):
        if number == _ENDLESS or (number >= 0 and number % size == 0):
            static = int(size)
    return Lengths(bool(counts[0] == _ENDLESS), static)


def batch_sizes(op: tf.Operation) -> list[tf.Tensor]:
    """Returns the batch size of a transformation that makes batches; [] for other operations."""
    if kind_of(op) not in _BATCHES:
        return []
    return [tensor for name, tensor, _ in arguments(op) if name == "batch_size"]


def _number_of(op: tf.Operation) -> int | None:
    """Returns the number of elements of a dataset as constants say it; None if they do not."""
    kind = kind_of(op)
    if kind == "TensorSlice" and op.inputs[0].dtype != tf.variant:
        return op.inputs[0].shape.as_list()[0] if op.inputs[0].shape.rank else None
    if kind in (*_SAME_NUMBER, "AutoShard", "Shard", "Repeat", "Batch"):
        number = _number_of(op.inputs[0].op)
        if "Map" in kind and not op.get_attr("preserve_cardinality"):
            return None  # the function may end the data
        if number is None or kind in _SAME_NUMBER:
            return number
        constants = [constant_of(each) for each in op.inputs[1:]]
        if kind == "Repeat":
            if constants[0] is None:
                return None
            times = int(constants[0])
            is_endless = number and times and (number == _ENDLESS or times < 0)
            return _ENDLESS if is_endless else number * times
        if kind == "Batch" and all(each is not None for each in constants) and constants[0] > 0:
            size, drops = map(int, constants)
            rest = 0 if drops else size - 1
            return _ENDLESS if number == _ENDLESS else (number + rest) // size
        return _ENDLESS if number == _ENDLESS else None
    return None


def _static_length(structure: Any) -> int:
    tensors = tf.nest.flatten(structure)
    shape = tf.TensorShape(getattr(tensors[0], "shape", None) if tensors else [])
    if shape.rank is None:
        return UNKNOWN
    length = shape.as_list()[0] if shape.rank else 1
    return UNKNOWN if length is None else int(length)
