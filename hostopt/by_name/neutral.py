"""Arrays that change nothing in a collective, for a rank that has run out of data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from hostopt.collectives.call import Array
from hostopt.collectives.reduce_op import ReduceOp


def describe_arrays(arrays: Sequence[Array]) -> list[tuple[str, tuple[int, ...]]]:
    """Returns dtypes and shapes of arrays, in types that JSON supports."""
    return [(_name_of(array.dtype), array.shape) for array in arrays]


def neutral_arrays(
    described: Sequence[tuple[str, Sequence[int]]], op: ReduceOp, rows: int | None = None
) -> list[Array]:
    """Returns arrays that do not change the results of a reduction.

    Args:
      described: dtypes and shapes of the arrays of another rank, from `describe_arrays`.
      op: the operator; an AVERAGE counts them as zeros.
      rows: number of rows, if it is not that of the other rank.

    Returns:
      Arrays filled with the neutral element of the operator.
    """
    arrays = []
    for name, shape in described:
        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name, name))
        own_shape = shape if rows is None else [rows, *shape[1:]]
        arrays.append(np.full(own_shape, neutral_value(dtype, op), dtype))
    return arrays


def neutral_value(dtype: np.dtype[Any], op: ReduceOp) -> Any:
    """Returns the value that does not change the result of an operator."""
    if op is ReduceOp.PRODUCT:
        return 1
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return np.zeros((), dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.max if op is ReduceOp.MIN else limits.min
    return np.inf if op is ReduceOp.MIN else -np.inf


def _name_of(dtype: np.dtype[Any]) -> str:
    """Returns the name of a dtype of ml_dtypes, or numpy's code, which any other dtype has."""
    return dtype.name if hasattr(ml_dtypes, dtype.name) else dtype.str
