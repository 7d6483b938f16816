"""Whether values are finite, at the speed of the cache, and which gradients are not."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from hostopt.ring import Array

__all__: list[str] = []

PIECE = 1 << 17  # elements; fewer would cost calls, and more would leave the cache
_SIGNED = {2: np.int16, 4: np.int32, 8: np.int64}
_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def all_finite(values: Array) -> bool:
    """Whether there is neither NaN nor Inf in an array.

    Args:
      values: contiguous array of any shape; whole numbers are finite.

    Returns:
      True where all of it is finite.
    """
    flat = values.reshape(-1)
    if _is_whole(flat.dtype):
        return True
    infinity = _magnitude(flat.dtype, math.inf)
    return all(
        _largest(flat[start : start + PIECE]) < infinity for start in range(0, flat.size, PIECE)
    )


def all_within(values: Array, limit: float) -> bool:
    """Whether no value is above a limit, whatever its sign; a NaN is above all.

    Args:
      values: contiguous array of shape [n]; whole numbers are within every limit.
      limit: a number above 0.

    Returns:
      True where all of it is.
    """
    if not values.size or _is_whole(values.dtype):
        return True
    return _largest(values) <= _magnitude(values.dtype, limit)


def safe_limit(dtype: np.dtype[Any], size: int) -> float:
    """How large values may be whose sum is finite for certain.

    Args:
      dtype: in which they are added and sent.
      size: how many are added.

    Returns:
      The limit; half of it leaves room for rounding.
    """
    return math.inf if _is_whole(dtype) else _largest_finite(dtype) / (2 * size)


@functools.cache
def _largest_finite(dtype: np.dtype[Any]) -> float:
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(info.max)


def _is_whole(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iub"


def _largest(flat: Array) -> int:
    """The largest magnitude as its bits, which sort as numbers do, with Inf and NaN behind."""
    # The bits as whole numbers with sign: those of negative values come before all others. Without
    # sign: they come behind. numpy finds both in less time than one look at each value by itself.
    size = flat.itemsize
    positive = int(np.maximum.reduce(flat.view(_SIGNED[size])))
    either = int(np.maximum.reduce(flat.view(_UNSIGNED[size])))
    return max(positive, either & _without_sign(size))


def _without_sign(itemsize: int) -> int:
    return (1 << (8 * itemsize - 1)) - 1


@functools.cache
def _magnitude(dtype: np.dtype[Any], value: float) -> int:
    return int(np.array(value, dtype).view(_UNSIGNED[dtype.itemsize]))


def troubles(names: Sequence[str], arrays: Sequence[Array]) -> dict[str, str]:
    """Which gradients are not finite.

    Args:
      names: the names of their variables.
      arrays: the gradients.

    Returns:
      "NaN" or "Inf" by name, for those which hold one.
    """
    return {
        name: "NaN" if np.isnan(array).any() else "Inf"
        for name, array in zip(names, arrays)
        if not all_finite(array)
    }


def explain(
    what: str,
    step: int,
    found: Mapping[str, Mapping[str, str]],
    sums: Mapping[str, str],
    travels_as: str | None = None,
) -> str:
    """Say whose gradients are not finite; the same text on all ranks.

    Args:
      what: what was reduced.
      step: number of the step, from 0.
      found: by the name of a rank, what `troubles` found in its own gradients.
      sums: what it finds in the sums.
      travels_as: the wire format, where sums may overflow in it.

    Returns:
      Text for an error or a warning.
    """
    blamed = [
        f"{rank} has {', '.join(f'{kind} for {name!r}' for name, kind in names.items())}"
        for rank, names in found.items()
        if names
    ]
    text = f"not finite in step {step} (counted from 0), summing {what}: "
    if blamed:
        return text + "; ".join(blamed)
    wire = f", or their {travels_as} form on the wire," if travels_as else ""
    overflown = ", ".join(f"{kind} for {name!r}" for name, kind in sums.items())
    return (
        f"{text}the gradients of every rank are finite, but their sum{wire} has overflowed: "
        f"{overflown}"
    )
