"""Sums rows of a sparse gradient that have the same index, if its consumers would do so anyway.

Optimizers of TensorFlow sum such rows, with a Unique and an UnsortedSegmentSum for each table. If
all consumers only make sums, the rows are summed before they travel, and the optimizers' sums are
left out. Any other consumer needs all rows: the norm that `tf.clip_by_global_norm` computes, for
example, changes if rows are summed.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import tensorflow as tf

from estimator_ext._tf_private import replace_tensor

# Sums by index, and operations that are linear in each row.
_SUMS = re.compile(r"UnsortedSegmentSum|(Resource)?Scatter(Nd)?(Add|Sub)")
_LINEAR = re.compile(r"Neg|Identity|Cast|Reshape|Mul|RealDiv")
_IRRELEVANT = ("Shape", "IsFinite")


def are_only_summed(values: tf.Tensor, indices: tf.Tensor) -> bool:
    """Returns True if the consumers of a sparse gradient only sum its rows by index.

    Args:
      indices: the index of each row.

    Returns:
      True if sums of rows, with unique indices, can replace the rows.
    """
    sums: set[tf.Operation] = set()
    return _are_summed(values, sums) and _are_indices_of(indices, sums)


def _are_summed(values: tf.Tensor, sums: set[tf.Operation]) -> bool:
    """Returns True if rows are only summed; adds the operations that sum them to `sums`."""
    for op in values.consumers():
        if _SUMS.fullmatch(op.type):
            sums.add(op)
            continue
        if op.type in _IRRELEVANT:
            continue
        if not _LINEAR.fullmatch(op.type) or op.inputs[0] is not values:
            return False
        if any(each.shape.rank != 0 for each in op.inputs[1:] if op.type in ("Mul", "RealDiv")):
            return False  # the rows have different factors
        if not _are_summed(op.outputs[0], sums):
            return False
    return True


def _are_indices_of(indices: tf.Tensor, sums: Collection[tf.Operation]) -> bool:
    """Returns True if indices are used only by `sums`, and not counted, for example."""
    for op in indices.consumers():
        if op in sums or op.type in _IRRELEVANT:
            continue
        if op.type == "Unique" and all(each in sums for each in op.outputs[1].consumers()):
            continue
        if op.type not in ("Identity", "Cast") or not _are_indices_of(op.outputs[0], sums):
            return False
    return True


def skip_deduplication(rows: tf.IndexedSlices) -> None:
    """Connects the consumers of the optimizers' sums to the rows; call it when the step is built.

    Args:
      rows: sparse gradient with unique indices.
    """
    for unique in rows.indices.consumers():
        if unique.type != "Unique":
            continue
        indices, positions = unique.outputs
        for sums in positions.consumers():
            if sums.type == "UnsortedSegmentSum" and sums.inputs[0] is rows.values:
                replace_tensor(sums.outputs[0], rows.values)
        # an optimizer uses the number of indices, too
        replace_tensor(indices, rows.indices)
