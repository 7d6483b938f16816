"""Optimizers of programs, which override apply_gradients for a single process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

v1 = tf.compat.v1
Pairs = Iterable[tuple[Any, tf.Variable]]


class _WithMoments(v1.train.Optimizer):
    """Keeps two moments of each gradient in its own variables.

    Args:
      weight_decay: fraction of a weight that is added to its change.
      exclude: regular expressions of names of weights that do not decay.
    """

    beta_1, beta_2, epsilon = 0.9, 0.99, 1e-6

    def __init__(
        self, learning_rate: Any, weight_decay: float = 0.01, exclude: Sequence[str] = ()
    ) -> None:
        super().__init__(False, type(self).__name__)
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.exclude = exclude

    def apply_gradients(
        self, grads_and_vars: Pairs, global_step: Any = None, name: str | None = None
    ) -> tf.Operation:
        updates = []
        for gradient, variable in grads_and_vars:
            if gradient is None or variable is None:
                continue
            (m, v), moments = self._moments(variable, gradient)
            change = m / (tf.sqrt(v) + self.epsilon)
            if not any(re.search(each, variable.op.name) for each in self.exclude):
                change += self.weight_decay * variable
            change *= self.rate(variable, change)
            updates += [variable.assign(variable - change), *moments]
        return tf.group(*updates, name=name)

    def rate(self, variable: tf.Variable, change: tf.Tensor) -> Any:
        return self.learning_rate

    def _moments(
        self, variable: tf.Variable, gradient: Any
    ) -> tuple[list[tf.Tensor], list[tf.Operation]]:
        """Returns the new moments, and the operations that assign them."""
        values, updates = [], []
        for name, beta, power in (("m", self.beta_1, 1), ("v", self.beta_2, 2)):
            moment = v1.get_variable(
                f"{variable.op.name}/{name}",
                variable.shape,
                variable.dtype.base_dtype,
                v1.zeros_initializer(),
                trainable=False,
            )
            # tf.multiply makes a sparse gradient dense
            summand = gradient if power == 1 else tf.square(gradient)
            summand = tf.multiply(tf.cast(1 - beta, moment.dtype.base_dtype), summand)
            values.append(beta * moment + summand)
            updates.append(moment.assign(values[-1]))
        return values, updates


class AdamWeightDecay(_WithMoments):
    """Adam without bias correction and with weight decay, as in BERT."""


class Lamb(_WithMoments):
    """You et al., Large Batch Optimization for Deep Learning: a trust ratio for each layer."""

    def rate(self, variable: tf.Variable, change: tf.Tensor) -> Any:
        weights, changes = tf.norm(variable), tf.norm(change)
        known = tf.logical_and(weights > 0, changes > 0)
        ratio = tf.where(known, tf.math.divide_no_nan(weights, changes), tf.ones_like(weights))
        return self.learning_rate * ratio


class Lars(v1.train.Optimizer):
    """You et al., Large Batch Training of Convolutional Networks: rates from norms, momentum."""

    def __init__(self, learning_rate: float, momentum: float = 0.9, decay: float = 1e-3) -> None:
        super().__init__(False, "Lars")
        self._rate, self._momentum, self._decay = learning_rate, momentum, decay

    def apply_gradients(
        self, grads_and_vars: Pairs, global_step: Any = None, name: str | None = None
    ) -> tf.Operation:
        updates = []
        for sparse_or_dense, variable in grads_and_vars:
            gradient = tf.convert_to_tensor(sparse_or_dense)
            weights, slope = tf.norm(variable), tf.norm(gradient)
            trust = tf.where(
                tf.logical_and(weights > 0, slope > 0),
                weights / (slope + self._decay * weights),
                tf.ones_like(weights),
            )
            change = self._rate * trust * (gradient + self._decay * variable)
            slot = self._zeros_slot(variable, "momentum", self._name)
            change += self._momentum * slot
            updates += [slot.assign(change), variable.assign_sub(change)]
        with tf.control_dependencies(updates):
            return global_step.assign_add(1).op
