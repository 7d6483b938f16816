"""Gradients of several steps that are summed before they are applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hostopt.errors import ConfigError


class GradientAccumulator:
    """Sums the gradients of `steps` steps on this rank, and applies them in the last of these.

    Args:
      steps: number of steps.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._count: Any = None
        self._sums: list[Any] = []
        self._variables: list[Any] = []

    def add_and_apply(
        self,
        grads_and_vars: Any,
        apply: Callable[[Any], Any],
        count_step: Callable[[], Any],
    ) -> Any:
        """Adds gradients, and applies the sums if this is the last step of a group.

        Args:
          grads_and_vars: gradients and variables, the same in each call.
          apply: applies pairs of sums and variables.
          count_step: counts a step in which nothing is applied, as `apply` counts the others.

        Returns:
          In a graph the operation that does this; None if called eagerly.

        Raises:
          ConfigError: the variables differ from those of the first call.
        """
        pairs = [(gradient, v) for gradient, v in grads_and_vars if gradient is not None]
        variables = [variable for _, variable in pairs]
        if self._count is None:
            self._variables = variables
            with tf.init_scope():
                self._count = _local_variable(tf.zeros([], tf.int64))
                self._sums = [
                    _local_variable(tf.zeros(v.shape, tf.as_dtype(v.dtype).base_dtype))
                    for _, v in pairs
                ]
        if [id(each) for each in variables] != [id(each) for each in self._variables]:
            raise ConfigError(
                f"gradients of {len(variables)} variables are added to those of "
                f"{len(self._variables)} others, as backward_passes_per_step is {self._steps}. "
                "Give each call the gradients of the same variables, or use 1"
            )
        additions = [
            total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
            for total, (gradient, _) in zip(self._sums, pairs)
        ]
        with tf.control_dependencies(additions):
            count = self._count.assign_add(1)

        def apply_sums() -> Any:
            values = [tf.identity(total) for total in self._sums]
            operations = [apply(list(zip(values, (v for _, v in pairs))))]
            with tf.control_dependencies([each for each in operations if _is_in_graph(each)]):
                resets = [total.assign(tf.zeros_like(total)) for total in self._sums]
            with tf.control_dependencies(resets):
                return tf.constant(True)

        def apply_nothing() -> Any:
            counted = count_step()
            with tf.control_dependencies([counted] if _is_in_graph(counted) else []):
                return tf.constant(False)

        with tf.control_dependencies([count]):
            is_last = tf.equal(count % self._steps, 0)
        done = tf.cond(is_last, apply_sums, apply_nothing)
        return None if tf.executing_eagerly() else done.op


def _local_variable(initial: tf.Tensor) -> Any:
    return tf.Variable(initial, trainable=False, name="accumulated_gradients")


def _is_in_graph(value: Any) -> bool:
    return value is not None and not tf.executing_eagerly()
