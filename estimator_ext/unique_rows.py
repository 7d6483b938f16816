"""Leaves out what optimizers do for indices that occur twice, as sums over the ranks have none.

Optimizers of TensorFlow sum the rows of a sparse gradient by index before they use them, with a
Unique and an UnsortedSegmentSum for each table. The sums over the ranks come with each index once,
so both would only copy them.
"""

from __future__ import annotations

import tensorflow as tf

__all__: list[str] = []


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
