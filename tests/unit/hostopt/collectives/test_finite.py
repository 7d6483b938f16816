"""Scans of arrays for NaN and Inf."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hostopt.collectives.finite import all_finite, all_within, safe_limit

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_a_single_nonfinite_value_is_found_at_any_index(dtype: Any, bad: float) -> None:
    for length in (1, 7, 1 << 16, (1 << 17) + 3):
        for place in {0, length // 2, length - 1}:
            values = np.ones(length, dtype)
            assert all_finite(values)
            values[place] = bad
            assert not all_finite(values)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_large_values_with_an_infinite_sum_are_finite(dtype: Any) -> None:
    largest = ml_dtypes.finfo(dtype).max
    for value in (largest, -largest):
        assert all_finite(np.full(1000, value, dtype))


@pytest.mark.parametrize("values", [np.empty(0, "f4"), np.empty(0, "f2"), np.ones(3, "i4")])
def test_empty_arrays_and_integers_are_finite(values: Any) -> None:
    assert all_finite(values)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_values_above_a_limit_are_found_for_both_signs(dtype: Any) -> None:
    for sign in (1, -1):
        values = np.full(100, -sign, dtype)
        values[50] = 2 * sign
        assert all_within(values, 2.0)
        assert not all_within(values, 1.5)
        values[50] = NAN * sign
        assert not all_within(values, INF)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
@pytest.mark.parametrize("size", [2, 3, 64])
def test_sums_of_values_within_the_safe_limit_are_finite(dtype: Any, size: int) -> None:
    values = np.full(1, safe_limit(np.dtype(dtype), size), dtype)
    total = values.copy()
    for _ in range(size - 1):
        total += values
    assert all_finite(total)
