"""Values of constants that operations of a graph compute, known while it is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

__all__: list[str] = []

# besides those of `tf.get_static_value`, as for the number of weights that are not zero
_FOLDED: dict[str, Callable[..., Any]] = {
    "Mul": np.multiply,
    "RealDiv": np.divide,
    "Div": np.divide,
    "DivNoNan": np.divide,
    "Equal": np.equal,
    "Select": np.where,
    "SelectV2": np.where,
    "Sum": np.sum,
    **dict.fromkeys(("Identity", "Cast", "Neg", "StopGradient"), np.asarray),
}


def number_of(tensor: tf.Tensor) -> float:
    """Returns the absolute value of a constant; NaN if it is not known, or has several.

    Args:
      tensor: tensor of any shape.
    """
    value = _constant(tensor)
    numbers = np.unique(np.abs(np.asarray(np.nan if value is None else value, np.float64)))
    return float(numbers[0]) if numbers.size == 1 else float("nan")


def _constant(tensor: tf.Tensor) -> Any:
    """Returns the value of a constant as an array; None if it is not known."""
    value, op = tf.get_static_value(tensor), tensor.op
    if value is not None or op.type not in _FOLDED:
        return value
    if op.type == "Sum" and op.outputs[0].shape.rank != 0:
        return None
    values = [_constant(each) for each in (op.inputs[:1] if op.type == "Sum" else op.inputs)]
    return None if any(each is None for each in values) else _FOLDED[op.type](*values)
