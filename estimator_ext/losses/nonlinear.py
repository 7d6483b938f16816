"""Makes quotients and powers in a loss count as in one process, which has the data of all ranks.

A rank's quotient S / D may have its own D, as the number of masked words in its batch. With the
mean M of D over the ranks, the mean of S / M is the quotient of one process. In the same way, a
function f of a mean D, such as its root, has the derivative f'(M) in one process. The loss stays
as it is, as a program may read it on one rank only. Its gradient is multiplied by D / M on the way
to S, or by f'(M) / f'(D) on the way to D.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable

import tensorflow as tf

from estimator_ext._tf_private import constant_of, control_flow_context, replace_input
from estimator_ext.graphs.operation_kinds import ADDING, PRODUCTS, QUOTIENTS
from hostopt.tensorflow._tf_private import outermost

_SAME = ("Identity", "Cast", "StopGradient", "EnsureShape", "Reshape", "Squeeze", "ExpandDims")
_COUNTS = ("Sum", "Size", "StridedSlice", "Mean")
# With a constant operand, which is for all ranks together: max(D, 1), D + 1e-5, 0.5 * D
_OF_TOTALS = ("Maximum", *ADDING, *PRODUCTS, *QUOTIENTS)
_EXPONENTS = {"Sqrt": -0.5, "Square": 1.0, "Log": -1.0}  # of derivatives


def can_weigh(op: tf.Operation, degree: float | None = None) -> bool:
    """Returns True if each step runs an operation once, and a weight can correct its gradient.

    Args:
      op: a function of a mean; the mean of chosen elements; or a quotient, whose divisor has to be
        a count or a mean.
      degree: the one of the divisor in the number of examples; None if it is not known.
    """
    if is_inside(op) or not op.outputs[0].dtype.is_floating:
        return False
    if op.type == "Mean" or _is_function(op):
        return True
    if op.type not in QUOTIENTS:
        return False
    found = _count_of(op.inputs[1])
    if found is None or op.inputs[1].shape.rank != 0:
        return False
    return degree in (None, 0 if found[0].op.type == "Mean" else 1)


def is_inside(op: tf.Operation) -> bool:
    """Returns True for an operation of a function, a branch or a loop."""
    return outermost(op.graph) is not op.graph or control_flow_context(op) is not None


def factor_of_one(dtype: tf.DType) -> tf.Tensor:
    """Returns a scalar 1 of the default graph, whose input can be replaced later."""
    return tf.raw_ops.PlaceholderWithDefault(input=tf.ones([], dtype), shape=[])


class NonlinearTerms:
    """The weights of quotients and functions in losses, which are 1 until they are set."""

    def __init__(self) -> None:
        self.weights: dict[tf.Operation, tf.Operation] = {}
        self._unset: set[tf.Operation] = set()

    def prepare(self, operations: Iterable[tf.Operation]) -> None:
        """Gives operations a weight, before the backward pass of their loss is built."""
        for op in operations:
            if op in self.weights:
                continue
            operand = op.inputs[0]
            with op.graph.as_default(), tf.control_dependencies(None), tf.device(op.device):
                weight = factor_of_one(operand.dtype)
                replace_input(op, 0, _with_weighted_gradient(operand, weight))
            self.weights[op] = weight.op
            self._unset.add(op)

    def set(
        self,
        operations: Iterable[tf.Operation],
        size: int,
        mean: Callable[..., tf.Tensor],
        weights: Any,
    ) -> None:
        """Connects the weights of operations to the means over the ranks.

        Args:
          size: number of ranks.
          mean: reduces a tensor, which it is given with a name, to its mean over the ranks.
          weights: the `BatchWeights` of this rank; None if each rank counts 1.
        """
        for op in operations:
            if op not in self._unset:
                continue
            with op.graph.as_default(), tf.control_dependencies(None), tf.device(op.device):
                weight = tf.cast(_weight(op, size, mean, weights), op.inputs[0].dtype)
                replace_input(self.weights[op], 0, tf.stop_gradient(weight))
            self._unset.remove(op)


def _weight(
    op: tf.Operation, size: int, mean: Callable[..., tf.Tensor], weights: Any
) -> tf.Tensor:
    """Returns what the gradient of an operation's first input is to be multiplied by, a scalar."""
    dtype, is_mean = op.inputs[0].dtype, False
    after: list[tuple[str, tf.Tensor]] = []
    if dtype.size < tf.float32.size:  # which would round a count of all ranks, or overflow
        dtype = tf.float32
    if _is_function(op):
        own = tf.cast(op.inputs[0], dtype)
        share = own if weights is None else _times(own, weights.mean_weight)
        return _ratio_of_slopes(op, own, mean(share, f"the input of {op.name}"))
    if op.type == "Mean":  # of the elements that a mask has chosen on this rank
        results = tf.maximum(tf.size(op.outputs[0], tf.int64), 1)
        divisor = count = tf.cast(tf.size(op.inputs[0], tf.int64) // results, dtype)
    else:
        divisor, found = op.inputs[1], _count_of(op.inputs[1])
        assert found is not None  # see `can_weigh`
        count, after = found
        is_mean, count = count.op.type == "Mean", tf.cast(count, dtype)
    if weights is not None:  # a rank without data repeats its last batch
        count = _times(count, weights.mean_weight if is_mean else weights.sum_weight)
    total = mean(count, f"the divisor of {op.name}")
    for kind, constant in reversed(after):
        total = _applied(kind, constant, total, 1 if is_mean else size)
    if weights is not None and not is_mean:  # a sum is later multiplied by the weight of a mean
        total *= tf.cast(weights.mean_weight, dtype)
    return tf.math.divide_no_nan(tf.cast(divisor, dtype), total)


def _exponent(op: tf.Operation) -> float | None:
    """Returns e if the derivative of a function is x ** e but for a factor; else None."""
    if op.type != "Pow":
        return _EXPONENTS.get(op.type)
    power = constant_of(op.inputs[1])
    return None if power is None else float(power) - 1


def _is_function(op: tf.Operation) -> bool:
    return op.type == "Exp" or _exponent(op) is not None


def _ratio_of_slopes(op: tf.Operation, own: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """Returns the derivative of a function at the mean of all ranks, divided by this rank's."""
    exponent = _exponent(op)
    if exponent is None:
        return tf.exp(total - own)
    if exponent < 0:  # an infinite derivative at 0 counts as 0
        return tf.math.divide_no_nan(own, total) ** -exponent
    return tf.math.divide_no_nan(total, own) ** exponent


def _times(value: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    return tf.math.multiply_no_nan(value, tf.cast(weight, value.dtype))


def _count_of(divisor: tf.Tensor) -> tuple[tf.Tensor, list[tuple[str, tf.Tensor]]] | None:
    """Returns the count or mean that a divisor is made of; None if it is made of something else.

    It comes with the types and constants of the operations that make the divisor, last one first.
    """
    after: list[tuple[str, tf.Tensor]] = []
    while divisor.op.type not in _COUNTS:
        kind, operands = divisor.op.type, divisor.op.inputs
        if kind in _SAME:
            divisor = operands[0]
            continue
        if kind not in _OF_TOTALS or len(operands) != 2:
            return None
        divisor, constant = operands
        if constant_of(constant) is None and kind not in ("Sub", *QUOTIENTS):
            divisor, constant = constant, divisor
        if constant_of(constant) is None:
            return None
        after.append((kind, constant))
    return divisor, after


def _applied(kind: str, constant: tf.Tensor, total: tf.Tensor, size: int) -> tf.Tensor:
    """Returns what an operation makes of the mean of `size` counts, whose sum it is meant for."""
    constant = tf.cast(constant, total.dtype)
    if kind == "Maximum":
        return tf.maximum(total, constant / size)
    if kind in ADDING:
        return total - constant / size if kind == "Sub" else total + constant / size
    return total * constant if kind in PRODUCTS else total / constant


def _with_weighted_gradient(tensor: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    def weighted(each: tf.Tensor) -> Any:
        return tf.identity(each), lambda g: tf.math.multiply_no_nan(g, weight)

    return tf.custom_gradient(weighted)(tensor)
