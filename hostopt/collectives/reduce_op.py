"""Reduction operators, and the dtypes that they support."""

from __future__ import annotations

import enum
import functools
from typing import Any

import numpy as np

from hostopt.errors import ConfigError

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")


class ReduceOp(enum.Enum):
    """Reduction operators."""

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    @property
    def ufunc(self) -> np.ufunc:
        """The binary numpy function; an AVERAGE is a sum, divided at the end."""
        return _UFUNCS[self]


_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVERAGE: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


@functools.cache  # reading the name of a dtype takes longer than a small reduction
def check_dtype(dtype: np.dtype[Any], op: ReduceOp = ReduceOp.SUM) -> None:
    """Raises ConfigError unless arrays of a dtype can be reduced."""
    if dtype.name not in DTYPES:
        raise ConfigError(
            f"arrays of dtype {dtype.name} cannot be reduced, wanted one of {', '.join(DTYPES)}"
        )
    if op is ReduceOp.AVERAGE and dtype.kind in "iu":
        raise ConfigError(f"the AVERAGE of {dtype.name} is not exact: reduce with SUM and divide")


def mean_of_integers(total: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """Divides int64 sums exactly, and truncates the means towards zero."""
    floor = total // count
    means: np.ndarray[Any, Any] = floor + ((total < 0) & (floor * count != total))
    return means
