"""Read access to a flat buffer whose values are stored in several arrays."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from hostopt.collectives.call import Array


class TensorListView:
    """Values of a flat buffer, stored in several arrays in order, with possible gaps.

    Args:
      arrays: arrays of one dimension.
      starts: position of the first element of each array in the buffer, ascending.
    """

    def __init__(self, arrays: Sequence[Array], starts: Sequence[int]) -> None:
        self._arrays = arrays
        self._starts = starts

    def between(self, begin: int, end: int) -> Iterator[tuple[Array, slice]]:
        """Iterates over the values of a range of the buffer.

        Args:
          begin: position of the first element of the range.
          end: position after the last element.

        Yields:
          A view of values, and the slice of the range that they fill.
        """
        for index in range(max(bisect.bisect(self._starts, begin) - 1, 0), len(self._arrays)):
            start, array = self._starts[index], self._arrays[index]
            if start >= end:
                return
            low, high = max(start, begin), min(start + array.size, end)
            if low < high:
                yield array[low - start : high - start], slice(low - begin, high - begin)

    def copy_to(self, flat: Array) -> None:
        """Copies the values to a buffer; gaps are not written."""
        for values, target in self.between(0, flat.size):
            flat[target] = values
