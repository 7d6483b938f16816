"""Flat buffers whose values are stored in several arrays."""

from __future__ import annotations

import numpy as np
import pytest

from hostopt.collectives.shared_memory import TensorListView

ARRAYS = [np.arange(3.0), np.arange(10.0, 11.0), np.arange(20.0, 24.0)]
STARTS = [0, 4, 8]  # gaps at 3, 5, 6 and 7
FLAT = np.array([0, 1, 2, -1, 10, -1, -1, -1, 20, 21, 22, 23, -1])


@pytest.mark.parametrize("begin", range(13))
@pytest.mark.parametrize("length", [0, 1, 2, 5, 13])
def test_ranges(begin: int, length: int) -> None:
    end = min(begin + length, len(FLAT))
    part = np.full(end - begin, -1.0)
    for values, target in TensorListView(ARRAYS, STARTS).between(begin, end):
        assert any(np.shares_memory(values, array) for array in ARRAYS)
        part[target] = values
    np.testing.assert_array_equal(part, FLAT[begin:end])


def test_gaps_are_not_written() -> None:
    flat = np.full(13, -1.0)
    TensorListView(ARRAYS, STARTS).copy_to(flat)
    np.testing.assert_array_equal(flat, FLAT)
