"""Optimizers of tf.contrib.opt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow.compat.v2 as tf


class LazyAdamOptimizer(tf.compat.v1.train.AdamOptimizer):
    """Adam that changes only those rows of moments and weights whose gradients are given."""

    def _apply_sparse(self, grad: tf.IndexedSlices, var: tf.Variable) -> tf.Operation:
        return self._resource_apply_sparse(grad.values, var, grad.indices)

    def _resource_apply_sparse(self, grad: Any, var: tf.Variable, indices: Any) -> tf.Operation:
        def cast(value: Any) -> tf.Tensor:
            return tf.cast(value, var.dtype.base_dtype)

        power_1, power_2 = map(cast, self._get_beta_accumulators())
        rate = cast(self._lr_t) * tf.sqrt(1 - power_2) / (1 - power_1)
        moments, updates = [], []
        for name, beta, new in ("m", self._beta1_t, grad), ("v", self._beta2_t, grad * grad):
            slot = self.get_slot(var, name)
            rows = cast(beta) * tf.gather(slot, indices) + (1 - cast(beta)) * new
            moments.append(rows)
            updates.append(slot.scatter_update(tf.IndexedSlices(rows, indices)))
        change = rate * moments[0] / (tf.sqrt(moments[1]) + cast(self._epsilon_t))
        return tf.group(var.scatter_sub(tf.IndexedSlices(change, indices)), *updates)


class DecoupledWeightDecayExtension:
    """Makes an optimizer subtract a fraction of the weights before each of its updates.

    A sparse gradient makes only its rows decay.

    Args:
      weight_decay: the fraction; it is not multiplied by the learning rate.
      **options: arguments of the optimizer.
    """

    def __init__(self, weight_decay: Any, *arguments: Any, **options: Any) -> None:
        self._weight_decay = weight_decay
        self._decayed: set[Any] | None = None  # all variables
        super().__init__(*arguments, **options)

    def minimize(self, *arguments: Any, decay_var_list: Any = None, **options: Any) -> Any:
        """Minimizes a loss; `decay_var_list` has the variables that decay, None for all."""
        self._decay_only(decay_var_list)
        return super().minimize(*arguments, **options)  # type: ignore[misc]

    def apply_gradients(
        self,
        grads_and_vars: Any,
        global_step: Any = None,
        name: Any = None,
        decay_var_list: Any = None,
    ) -> Any:
        """Applies gradients; `decay_var_list` has the variables that decay."""
        self._decay_only(decay_var_list)
        return super().apply_gradients(grads_and_vars, global_step, name)  # type: ignore[misc]

    def _decay_only(self, variables: Iterable[tf.Variable] | None) -> None:
        if variables:
            self._decayed = {each.ref() for each in variables}

    def _decay(self, var: tf.Variable, indices: Any) -> Any:
        if self._decayed is not None and var.ref() not in self._decayed:
            return tf.no_op()
        decay = tf.cast(self._weight_decay, var.dtype.base_dtype)
        if indices is None:
            return var.assign_sub(decay * var)
        rows = tf.unique(indices).y
        return var.scatter_sub(tf.IndexedSlices(decay * tf.gather(var, rows), rows))


def _after_decay(name: str) -> Callable[..., Any]:
    def apply(self: Any, grad: Any, var: tf.Variable, *indices: Any) -> Any:
        with tf.control_dependencies([getattr(grad, "values", grad)]):
            # after the forward pass has read the weights
            decay = self._decay(var, *indices or [getattr(grad, "indices", None)])
        with tf.control_dependencies([decay]):
            return getattr(super(DecoupledWeightDecayExtension, self), name)(grad, var, *indices)

    return apply


_SPARSE = "apply_sparse_duplicate_indices"
for _name in ("_apply_dense", f"_{_SPARSE}", "_resource_apply_dense", f"_resource_{_SPARSE}"):
    setattr(DecoupledWeightDecayExtension, _name, _after_decay(_name))


def extend_with_decoupled_weight_decay(base_optimizer: type) -> type:
    """Returns a subclass of an optimizer with the first argument weight_decay."""
    name = f"{base_optimizer.__name__}WithDecay"
    return type(name, (DecoupledWeightDecayExtension, base_optimizer), {})


AdamWOptimizer = extend_with_decoupled_weight_decay(tf.compat.v1.train.AdamOptimizer)
MomentumWOptimizer = extend_with_decoupled_weight_decay(tf.compat.v1.train.MomentumOptimizer)
