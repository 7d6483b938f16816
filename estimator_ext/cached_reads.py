"""Reads of variables whose value is cached on the accelerator for a step.

TensorFlow returns the same cached tensor for each read. That tensor is older than any
GradientTape, so a tape does not know that it is the variable's value, and the gradient would be
None. It is older than any update, too: a read after an update would return the value before it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops.resource_variable_ops import variable_accessed

__all__: list[str] = []


def read_where_needed(variable: Any, always_cached: bool) -> None:
    """Makes tapes record each read of a variable, and re-reads it behind control dependencies.

    Args:
      variable: one with a caching device.
      always_cached: True if the program has chosen a caching device: then it gets cached values
        whatever the control dependencies, as in TensorFlow.
    """
    cached_value = variable.value

    def value() -> tf.Tensor:
        if not always_cached and tf.compat.v1.get_default_graph()._current_control_dependencies():
            return variable.read_value()
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
