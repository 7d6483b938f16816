"""Reads of variables: those cached on the accelerator for a step, and those that do not read.

TensorFlow returns the same cached tensor for each read. That tensor is older than any
GradientTape, so the tape would not know it as the value of the variable, and the gradient would be
None. It is also older than any update, so a read after an update would return the old value.
Within a branch, a loop or a function, a tape of the graph around it would see only the old tensor.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from estimator_ext._tf_private import (
    ResourceVariable,
    control_dependencies_of,
    could_possibly_record,
    record_operation,
    variable_accessed,
)


def read_where_needed(variable: Any, always_cached: bool) -> None:
    """Makes tapes record each read of a variable, and reads it again under control dependencies.

    Args:
      always_cached: True if the program has chosen the caching device. It then gets the cached
        value under control dependencies too, as in TensorFlow.
    """
    cached_value = variable.value

    def value() -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        if not always_cached and control_dependencies_of(graph):
            return variable.read_value()
        if could_possibly_record() and graph is not variable.handle.graph:
            return variable.read_value()
        cached = cached_value()
        if not could_possibly_record():
            return cached
        variable_accessed(variable)
        with tf.device(cached.device):
            result = tf.identity(cached)  # a tape needs a new tensor for each read
        record_operation(
            "ReadVariableOp",
            [result],
            [variable.handle],
            backward_function=lambda gradient: [gradient],
            forward_function=lambda tangent: [tangent],
        )
        return result

    variable.value = value


class _TrueVariable(ResourceVariable):
    """A variable that is true, as a reference variable of TensorFlow 1 is, without being read."""

    def __bool__(self) -> bool:
        return True


def true_in_version_1(variable: Any) -> Any:
    """Makes `average if average else variable` choose in TensorFlow 1 as it does without ranks.

    A strategy always creates resource variables, whose truth is that of their value.
    """
    if not tf.compat.v1.resource_variables_enabled() and type(variable) is ResourceVariable:
        variable.__class__ = _TrueVariable
    return variable
