"""Reductions of tensors that are not gradients of variables: norms, counts and the loss.

A reduction has the gradient of an `all_reduce`: the cotangents of all ranks, reduced in the same
way. If the ranks' batches differ in size, each rank's loss counts by its number of examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import replace_input
from estimator_ext.reduction.deferred import DeferredReductions
from estimator_ext.reduction.uneven_data import BatchWeights
from hostopt.tensorflow import ops
from hostopt.tensorflow.background import HOST_DEVICE
from hostopt.tensorflow.reductions import Reduction


class ValueReduction:
    """Reduces tensors and the loss of one graph."""

    def __init__(
        self, strategy: Any, deferred: DeferredReductions | None, flags: ops.StopSaveFlags
    ) -> None:
        self._strategy = strategy
        self._size = strategy.cluster.size
        self._deferred = deferred
        self._flags = flags
        self.weights: BatchWeights | None = None  # None if each rank counts 1
        self._loss_weight: tf.Tensor | None = None

    def weight(self, is_mean: bool) -> tf.Tensor | None:
        """Returns the factor of this rank's gradients and loss in a step; None if all count 1."""
        if self.weights is None:
            return None
        return self.weights.mean_weight if is_mean else self.weights.sum_weight

    @property
    def share(self) -> Any:
        """1 / number of ranks that take part in a sum: a number, or a tensor if their data end."""
        return 1 / self._size if self.weights is None else self.weights.share

    def reduce(self, tensor: tf.Tensor, name: str, is_mean: bool) -> tf.Tensor:
        """Reduces a tensor over the ranks, differentiably if its dtype is floating."""
        if not tensor.dtype.is_floating:
            return self._reduce(tensor, name, is_mean)

        @tf.custom_gradient
        def reduce(value: tf.Tensor) -> Any:
            def gradient(cotangent: Any) -> tf.Tensor:
                return self._reduce_cotangent(cotangent, f"{name}/gradient", is_mean)

            return self._reduce(value, name, is_mean), gradient

        with tf.device(HOST_DEVICE):
            return reduce(tensor)

    def _reduce_cotangent(self, cotangent: Any, name: str, is_mean: bool) -> tf.Tensor:
        cotangent = tf.convert_to_tensor(cotangent)
        if self.weights is None:
            return self.reduce(cotangent, name, is_mean)
        # Each rank's loss counts by its examples, so its cotangent is weighted before the sum.
        # The gradients computed from the result are multiplied by this rank's weight later, so the
        # result is divided by it.
        weight = tf.cast(self._deferred_weight(self.weights.mean_weight), cotangent.dtype)
        total = self.reduce(tf.math.multiply_no_nan(cotangent, weight), name, is_mean)
        return tf.math.divide_no_nan(total, weight)

    def _deferred_weight(self, weight: tf.Tensor) -> tf.Tensor:
        """Returns the weight of this rank's loss; `weigh_loss` connects the right one."""
        if self._loss_weight is None:
            with weight.graph.as_default(), tf.control_dependencies(None), tf.device(HOST_DEVICE):
                self._loss_weight = tf.raw_ops.PlaceholderWithDefault(input=weight, shape=[])
        return self._loss_weight

    def _reduce(self, tensor: tf.Tensor, name: str, is_mean: bool) -> tf.Tensor:
        with tf.control_dependencies([] if self.weights is None else [self.weights.mean_weight]):
            tensor = tf.identity(tensor)  # nothing travels in a step without data
        op = hostopt.ReduceOp.SUM
        if is_mean and tensor.dtype.is_floating:
            op, is_mean = hostopt.ReduceOp.AVERAGE, False
        deferred = self._deferred
        if deferred is not None and not deferred.can_take([tensor]):
            deferred = None
        if deferred is not None and tensor.shape.is_fully_defined():
            total = deferred.add(Reduction(tensor, name, op, is_gradient=False))
        else:
            total = ops.all_reduce(tensor, self._strategy.communicator, op, name)
            if deferred is not None:
                deferred.built.append(total)
        size = tf.cast(self._size, total.dtype)
        return tf.math.divide(total, size) if is_mean else total

    def weigh_loss(self, loss: tf.Tensor, is_mean: bool) -> tf.Tensor:
        """Multiplies the loss by this rank's weight, once; by 0 it becomes 0, also from NaN."""
        weight = self.weight(is_mean)
        if weight is None:
            return loss
        if self._loss_weight is not None:
            replace_input(self._loss_weight.op, 0, weight)
        factor = tf.cast(weight, loss.dtype)
        return tf.where(tf.equal(factor, 0), tf.zeros_like(loss), loss * factor)

    def reduce_loss(self, loss: tf.Tensor, is_mean: bool, after: Sequence[tf.Tensor]) -> tf.Tensor:
        """Reduces the weighted loss of the step.

        A float32 scalar is sent at once and read after the gradients, so no rank waits for it.
        """
        if after and loss.dtype == tf.float32 and loss.shape.rank == 0:
            communicator = self._strategy.communicator
            total = ops.start_scalar_sum(loss, "the loss", communicator, after, self._flags)
            return total / self._size if is_mean else total
        return self._reduce(loss, "the loss", is_mean)
