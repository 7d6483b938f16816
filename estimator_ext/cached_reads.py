"""Variables whose value is cached on the accelerator for a step, as a GradientTape sees them.

TensorFlow hands out one cached tensor at each read. That tensor is older than any tape, so a tape
does not learn that it is the variable's value, and the gradient would be None.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops.resource_variable_ops import variable_accessed

__all__: list[str] = []


def show_reads_to_tapes(variable: Any) -> None:
    """Has tapes record each read of a variable.

    Args:
      variable: one with a caching device.
    """
    cached_value = variable.value

    def value() -> tf.Tensor:
        cached = cached_value()
        if not record.could_possibly_record():
            return cached
        variable_accessed(variable)
        with tf.device(cached.device):
            result = tf.identity(cached)  # one for each read, as a tape follows tensors
        record.record_operation(
            "ReadVariableOp",
            [result],
            [variable.handle],
            backward_function=lambda gradient: [gradient],
            forward_function=lambda tangent: [tangent],
        )
        return result

    variable.value = value
