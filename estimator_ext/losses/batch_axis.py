"""Finds which dimension of a tensor counts the examples of a batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection

import tensorflow as tf

from estimator_ext._tf_private import constant_of
from estimator_ext.graphs.walks import data_before, walk
from estimator_ext.pipelines.batch_lengths import batch_sizes


class BatchAxis:
    """The dimension of the examples: of the length of a batch, or of unknown size.

    Args:
      data: the operations that read the data of this rank.
    """

    def __init__(self, data: Collection[tf.Operation]) -> None:
        self._data = data

    @functools.cached_property
    def lengths(self) -> set[int]:
        """Numbers of examples in a batch of this rank, as far as they are static."""
        result: set[int] = set()
        batched = [op for op in self._data if batch_sizes(op)]
        # a dataset may be batched twice, as into sequences: the last one counts
        earlier = walk(itertools.chain(*map(data_before, batched)), data_before)
        for op in set(batched).difference(earlier):
            sizes = map(constant_of, batch_sizes(op))
            result |= {int(size) for size in sizes if size is not None}
        return result | {length for length in self._of_tensors if length is not None}

    @functools.cached_property
    def _of_tensors(self) -> set[int | None]:
        """First dimensions of what pipelines return; None if not static."""
        sources = [op for op in self._data if op.type.startswith(("Iterator", "QueueDequeue"))]
        tensors = [each for op in sources for each in op.outputs if each.dtype != tf.variant]
        return {each.shape.as_list()[0] for each in tensors if each.shape.rank}

    def of(self, tensor: tf.Tensor) -> int | None:
        """Returns the likeliest one of the `candidates`; None if there are none."""
        found = self.candidates(tensor)
        return found[0] if found else None

    def candidates(self, tensor: tf.Tensor) -> list[int]:
        """Returns the dimensions that may count the examples, the likeliest one first."""
        shape = tensor.shape.as_list() if tensor.shape.rank else []
        unknown = [axis for axis, n in enumerate(shape) if n is None]
        static = [axis for axis, n in enumerate(shape) if n in self.lengths and n > 1]
        if unknown and None in self._of_tensors:
            return unknown  # all batches are of unknown length
        if 0 in static:
            return static
        if not static and not unknown and any(shape and shape[0] % n == 0 for n in self.lengths):
            return [0]  # a multiple, as after a reshape
        return unknown + static

    def is_length(self, op: tf.Operation) -> bool:
        """Returns True for a number of examples that is taken from a static shape."""
        if op.type != "StridedSlice" or op.outputs[0].shape.rank != 0:
            return False
        shape, begin = map(tf.get_static_value, op.inputs[:2])
        is_known = shape is not None and begin is not None
        is_shape = op.inputs[0].op.name.rpartition("/")[2].startswith("Shape")
        return is_known and is_shape and int(shape[begin[0]]) in self.lengths
