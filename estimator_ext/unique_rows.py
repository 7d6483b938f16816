"""Whether rows of a sparse gradient that have one index may be summed before they are used.

Optimizers of TensorFlow sum them by index, with a Unique and an UnsortedSegmentSum for each table.
If nothing but sums is made of them, they are summed before they travel, and the optimizers' sums
would only copy what comes. But a norm of the rows, as `tf.clip_by_global_norm` takes it, is
another one if rows have been summed: then all of them travel, as one worker would see them.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import tensorflow as tf

__all__: list[str] = []

# What a sum of rows may take the place of the rows for: sums by index, and what is linear in them.
_SUMS = re.compile(r"UnsortedSegmentSum|(Resource)?Scatter(Nd)?(Add|Sub)")
_LINEAR = re.compile(r"Neg|Identity|Cast|Reshape|Mul|RealDiv")
_IRRELEVANT = ("Shape", "IsFinite")


def are_only_summed(values: tf.Tensor, indices: tf.Tensor) -> bool:
    """Whether all that is made of a sparse gradient is sums of its rows by index.

    Args:
      values: the rows.
      indices: one for each row.

    Returns:
      True if sums of rows, and each index once, may be in their place.
    """
    sums: set[tf.Operation] = set()
    return _are_summed(values, sums) and _are_indices_of(indices, sums)


def _are_summed(values: tf.Tensor, sums: set[tf.Operation]) -> bool:
    """Whether rows are only summed; collects the operations that do so."""
    for op in values.consumers():
        if _SUMS.fullmatch(op.type):
            sums.add(op)
            continue
        if op.type in _IRRELEVANT:
            continue
        if not _LINEAR.fullmatch(op.type) or op.inputs[0] is not values:
            return False
        if any(each.shape.rank != 0 for each in op.inputs[1:] if op.type in ("Mul", "RealDiv")):
            return False  # each row has a factor of its own
        if not _are_summed(op.outputs[0], sums):
            return False
    return True


def _are_indices_of(indices: tf.Tensor, sums: Collection[tf.Operation]) -> bool:
    """Whether indices only say what is summed, and nobody counts them."""
    for op in indices.consumers():
        if op in sums or op.type in _IRRELEVANT:
            continue
        if op.type == "Unique" and all(each in sums for each in op.outputs[1].consumers()):
            continue
        if op.type not in ("Identity", "Cast") or not _are_indices_of(op.outputs[0], sums):
            return False
    return True


def skip_deduplication(rows: tf.IndexedSlices) -> None:
    """Has the consumers of rows use them as they are; call it when the step is built.

    Args:
      rows: a sparse gradient with each index once.
    """
    for unique in rows.indices.consumers():
        if unique.type != "Unique":
            continue
        indices, positions = unique.outputs
        for sums in positions.consumers():
            if sums.type == "UnsortedSegmentSum" and sums.inputs[0] is rows.values:
                replace_tensor(sums.outputs[0], rows.values)
        # an optimizer asks for the number of indices, too
        replace_tensor(indices, rows.indices)


def replace_tensor(old: tf.Tensor, new: tf.Tensor) -> None:
    """Has every consumer of a tensor use another one.

    Args:
      old: no operation uses it in the end.
      new: of the same dtype.
    """
    for consumer in old.consumers():
        for index, tensor in enumerate(consumer.inputs):
            if tensor is old:
                consumer._update_input(index, new)
