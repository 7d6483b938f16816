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
    """Returns True if a contiguous array contains neither NaN nor Inf."""
    flat = values.reshape(-1)
    if _is_integer(flat.dtype):
        return True
    infinity = _magnitude(flat.dtype, math.inf)
    return all(
        _largest(flat[start : start + PIECE]) < infinity for start in range(0, flat.size, PIECE)
    )


def all_within(values: Array, limit: float) -> bool:
    """Returns True if no magnitude is above a limit, as a NaN is; integers are always within."""
    if not values.size or _is_integer(values.dtype):
        return True
    return _largest(values) <= _magnitude(values.dtype, limit)


def safe_limit(dtype: np.dtype[Any], size: int) -> float:
    """Returns the magnitude up to which a sum of `size` values is certain to be finite."""
    if _is_integer(dtype):
        return math.inf
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(info.max) / (2 * size)  # a factor of 2 to spare for rounding


def _is_integer(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iub"


def _largest(flat: Array) -> int:
    """Returns the bits of the largest magnitude. They sort as values do; Inf and NaN come last."""
    # As signed integers, negative values sort below all others, so the maximum is the largest
    # positive value. As unsigned integers they sort above all others, so the maximum is the
    # largest negative one, if there is any. Two reductions are faster than taking magnitudes.
    size = flat.itemsize
    positive = int(np.maximum.reduce(flat.view(_SIGNED[size])))
    either = int(np.maximum.reduce(flat.view(_UNSIGNED[size])))
    magnitude_mask = (1 << (8 * size - 1)) - 1
    return max(positive, either & magnitude_mask)


@functools.cache
def _magnitude(dtype: np.dtype[Any], value: float) -> int:
    return int(np.array(value, dtype).view(_UNSIGNED[dtype.itemsize]))
