"""Reduces lists of gradients as the graph of a training step does, without TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hostopt import Communicator
from hostopt.gradients.bucket import TensorSpec, plan_buckets
from hostopt.gradients.reducer import InlineReducer, open_reducer


class Gradients:
    """Gradients of one step, in buckets.

    Args:
      communicator: communicator of the ranks.
      arrays: gradients of float32, in variable order, the same shapes on all ranks.
    """

    def __init__(self, communicator: Communicator, arrays: Sequence[np.ndarray]) -> None:
        specs = [TensorSpec(f"part_{i}", a.shape, a.dtype) for i, a in enumerate(arrays)]
        self._buckets = plan_buckets(specs, communicator.transport.options.bucket_bytes)
        self._parts = [[arrays[i] for i in bucket.indices] for bucket in self._buckets]
        self._reducer = open_reducer(communicator, self._buckets)

    def reduce(self) -> list[list[np.ndarray]]:
        """Sums all gradients over the ranks.

        Returns:
          The sums by bucket. They are views of buffers that are not reused while the views exist.
        """
        reducer = self._reducer
        if isinstance(reducer, InlineReducer):
            return [reducer.reduce(i, parts) for i, parts in enumerate(self._parts)]
        for number, parts in enumerate(self._parts):
            reducer.launch(number, parts)
        return [reducer.wait(number) for number in range(len(self._parts))]
