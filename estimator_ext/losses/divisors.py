"""Makes quotients in a loss count as in one process: a sum over all ranks by a sum over all ranks.

A rank's quotient S / D may have its own D, as the number of masked words in its batch. The mean
over the ranks of S / mean(D) is the quotient of one process. The loss stays as it is, as a program
may read it on one rank only; its gradient is multiplied by D / mean(D) on the way to S.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable

import tensorflow as tf

from estimator_ext._tf_private import control_flow_context, replace_input
from hostopt.tensorflow._tf_private import outermost


def divisor_of(op: tf.Operation) -> tf.Tensor:
    """Returns by what a quotient divides; for a mean the number of elements of each result."""
    if op.type != "Mean":
        return op.inputs[1]
    size = tf.size(op.inputs[0], tf.int64) // tf.maximum(tf.size(op.outputs[0], tf.int64), 1)
    return tf.cast(size, op.outputs[0].dtype)


def can_weigh(op: tf.Operation) -> bool:
    """Returns True if each step runs a quotient once, and its divisor is one number."""
    is_number = op.type == "Mean" or op.inputs[1].shape.rank == 0
    is_outside = outermost(op.graph) is op.graph and control_flow_context(op) is None
    return is_number and is_outside and op.outputs[0].dtype.is_floating


class Divisors:
    """The weights of the quotients in the losses of a graph, which are 1 until they are set."""

    def __init__(self) -> None:
        self.weights: dict[tf.Operation, tf.Operation] = {}  # by quotient
        self._unset: set[tf.Operation] = set()

    def prepare(self, quotients: Iterable[tf.Operation]) -> None:
        """Gives quotients a weight, before the backward pass of their loss is built."""
        for op in quotients:
            if op in self.weights:
                continue
            dividend = op.inputs[0]
            with op.graph.as_default(), tf.control_dependencies(None), tf.device(op.device):
                one = tf.ones([], dividend.dtype)
                weight = tf.raw_ops.PlaceholderWithDefault(input=one, shape=[])
                replace_input(op, 0, _with_weighted_gradient(dividend, weight))
            self.weights[op] = weight.op
            self._unset.add(op)

    def set(
        self, quotients: Iterable[tf.Operation], mean: Callable[..., tf.Tensor], weights: Any
    ) -> None:
        """Connects the weights of quotients to their divisors.

        Args:
          mean: reduces a tensor, which it is given with a name, to its mean over the ranks.
          weights: the `BatchWeights` of this rank; None if each rank counts 1.
        """
        for op in self._unset.intersection(quotients):
            with op.graph.as_default(), tf.control_dependencies(None), tf.device(op.device):
                divisor = tf.stop_gradient(divisor_of(op))
                if weights is not None:  # a rank without data repeats its last batch
                    divisor *= tf.cast(weights.sum_weight, divisor.dtype)
                total = mean(divisor, f"the divisor of {op.name}")
                if weights is not None:  # by which the gradient is multiplied later
                    total *= tf.cast(weights.mean_weight, divisor.dtype)
                replace_input(self.weights[op], 0, tf.math.divide_no_nan(divisor, total))
            self._unset.remove(op)


def _with_weighted_gradient(tensor: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    weighted = tf.custom_gradient(lambda each: (tf.identity(each), lambda g: g * weight))
    return weighted(tensor)
