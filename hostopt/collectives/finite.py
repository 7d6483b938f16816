"""Scans of arrays for NaN and Inf, in pieces that fit the cache."""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np

from hostopt.collectives.call import Array

PIECE = 1 << 17  # elements; smaller pieces cost more calls, larger ones leave the cache
_SIGNED = {2: np.int16, 4: np.int32, 8: np.int64}
_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def all_finite(values: Array) -> bool:
    """Returns True if an array contains neither NaN nor Inf.

    Args:
      values: contiguous array of any shape. Integers and booleans are always finite.
    """
    flat = values.reshape(-1)
    if _is_integer(flat.dtype):
        return True
    infinity = _magnitude(flat.dtype, math.inf)
    return all(
        _largest(flat[start : start + PIECE]) < infinity for start in range(0, flat.size, PIECE)
    )


def all_within(values: Array, limit: float) -> bool:
    """Returns True if no magnitude in an array is above a limit.

    Args:
      values: contiguous array of shape [n]. A NaN is above any limit; integers and booleans are
        always within it.
    """
    if not values.size or _is_integer(values.dtype):
        return True
    return _largest(values) <= _magnitude(values.dtype, limit)


def safe_limit(dtype: np.dtype[Any], size: int) -> float:
    """Returns the magnitude up to which a sum of `size` values is certain to be finite."""
    # a factor of 2 to spare for rounding
    return math.inf if _is_integer(dtype) else _largest_finite(dtype) / (2 * size)


@functools.cache
def _largest_finite(dtype: np.dtype[Any]) -> float:
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(info.max)


def _is_integer(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iub"


def _largest(flat: Array) -> int:
    """Returns the bits of the largest magnitude.

    The bits of magnitudes sort as their values do, and Inf and NaN come last.
    """
    # As signed integers, negative values sort below all others, so the maximum is the largest
    # positive value. As unsigned integers they sort above all others, so the maximum is the
    # largest negative one, if there is any. Two reductions are faster than taking magnitudes.
    size = flat.itemsize
    positive = int(np.maximum.reduce(flat.view(_SIGNED[size])))
    either = int(np.maximum.reduce(flat.view(_UNSIGNED[size])))
    return max(positive, either & _magnitude_mask(size))


def _magnitude_mask(itemsize: int) -> int:
    return (1 << (8 * itemsize - 1)) - 1


@functools.cache
def _magnitude(dtype: np.dtype[Any], value: float) -> int:
    return int(np.array(value, dtype).view(_UNSIGNED[dtype.itemsize]))
