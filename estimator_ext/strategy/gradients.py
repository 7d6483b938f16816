"""Gradients before an optimizer applies them: reduced for clipping, or those of a scaled loss."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterable
from typing import Any, Union

import tensorflow as tf

from estimator_ext.reduction.skipped_updates import run_if
from estimator_ext.strategy.strategy import HostOffloadStrategy
from hostopt.gradients.nonfinite import ALLOW
from hostopt.options import MAX_COUNT, shown
from hostopt.tensorflow.sparse import map_values, values_of

Gradient = Union[tf.Tensor, tf.IndexedSlices, None]
GradsAndVars = list[tuple[Gradient, tf.Variable]]

_LARGEST_SCALE = 2.0**24
_LARGEST_FLOAT = float(tf.float32.max)
_SMALLEST_SCALE = 2.0**-126  # a smaller one is 0 to processors that flush


def reduce_gradients(grads_and_vars: Iterable[tuple[Gradient, tf.Variable]]) -> GradsAndVars:
    """Reduces gradients over the ranks, so that clipping sees what a single worker would see.

    The next `apply_gradients` with these variables does not reduce gradients that are computed
    from the results. For example, in the function of a host_call, or in a model_fn with a plain
    spec:

        grads_and_vars = estimator_ext.reduce_gradients(zip(gradients, variables))
        gradients, variables = zip(*grads_and_vars)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        return optimizer.apply_gradients(zip(gradients, variables))

    Args:
      grads_and_vars: pairs of a gradient (tensor, `tf.IndexedSlices` or None) and its variable.

    Returns:
      The pairs with reduced gradients, in the same order; None stays None. Without a
      `HostOffloadStrategy` of several ranks, the same gradients.

    Raises:
      ValueError: no pair has a gradient.
    """
    return _reduce_pairs(grads_and_vars)


def _reduce_pairs(
    grads_and_vars: Iterable[tuple[Gradient, tf.Variable]], nonfinite: str | None = None
) -> GradsAndVars:
    """Reduces gradients as `reduce_gradients` does, with a chosen reaction to NaN and Inf."""
    pairs = list(grads_and_vars)
    present = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
    if not present:
        names = [getattr(variable, "name", variable) for _, variable in pairs]
        raise ValueError(
            f"no gradients provided for any variable: {names}. Check whether the loss depends on "
            "them"
        )
    sums = tf.distribute.get_replica_context().merge_call(_sum, args=(present, nonfinite))
    reduced = iter(sums)
    return [(None if g is None else next(reduced), v) for g, v in pairs]


def _sum(strategy: Any, pairs: GradsAndVars, nonfinite: str | None) -> list[Any]:
    if isinstance(strategy, HostOffloadStrategy):
        return list(strategy.extended.reduction.reduce_now(pairs, nonfinite))
    return list(strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs))


# -- dynamic loss scaling --------------------------------------------------------------------

# Keeps small gradients from becoming 0 in float16. After Micikevicius et al., Mixed Precision
# Training (2018): the loss is multiplied by a scale, and the gradients are divided by it. If a
# reduced gradient is not finite, the update is skipped and the scale is halved. After a number of
# finite steps in a row the scale is doubled. All ranks decide alike, as reduced gradients have the
# same bits on all of them.


class LossScaleOptimizer(tf.compat.v1.train.Optimizer):
    """Wraps an optimizer: scales its loss, and skips steps whose gradients are not finite.

    Args:
      optimizer: a `tf.compat.v1.train.Optimizer`.
      scale: initial scale of the loss.
      growth_steps: number of finite steps in a row that doubles the scale; 0 keeps it constant.

    Raises:
      ValueError: `scale` is not a positive normal number of float32, or `growth_steps` is not a
        whole number from 0.
    """

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        scale: float = 2.0**15,
        growth_steps: int = 2000,
    ) -> None:
        _check(scale, growth_steps)
        super().__init__(use_locking=False, name="LossScaleOptimizer")
        self._optimizer = optimizer
        self._initial_scale = float(scale)
        self._growth_steps = growth_steps

    @property
    def scale(self) -> tf.Variable:
        """The scale of the next step; a variable that checkpoints contain."""
        return self._state[0]

    def compute_gradients(self, loss: tf.Tensor, *args: Any, **kwargs: Any) -> GradsAndVars:
        """Computes the gradients of the scaled loss, and divides them by the scale.

        Args:
          loss: scalar tensor.
          *args: as for the wrapped optimizer.
          **kwargs: as for the wrapped optimizer.

        Returns:
          Pairs of a gradient, or None, and its variable.
        """
        scale = tf.identity(self.scale)
        pairs = self._optimizer.compute_gradients(
            loss * tf.cast(scale, loss.dtype), *args, **kwargs
        )

        def unscale(values: tf.Tensor) -> tf.Tensor:
            return values / tf.cast(scale, values.dtype)

        return [(None if g is None else map_values(unscale, g), v) for g, v in pairs]

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, tf.Variable]],
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation:
        """Reduces the gradients, and updates the variables if all gradients are finite.

        Args:
          grads_and_vars: result of `compute_gradients`; reduced gradients are not reduced again.
          global_step: incremented by each update.
          name: name of the operation.

        Returns:
          The operation of the step.
        """
        pairs = [
            (gradient, variable)
            for gradient, variable in _reduce_pairs(grads_and_vars, ALLOW)
            if gradient is not None
        ]
        merge_call = tf.distribute.get_replica_context().merge_call
        return merge_call(self._apply_if_finite, args=(pairs, global_step, name))

    def _apply_if_finite(
        self, strategy: Any, pairs: GradsAndVars, global_step: tf.Variable | None, name: str | None
    ) -> tf.Operation:
        values = [values_of(gradient) for gradient, _ in pairs]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])

        def update() -> tf.Operation:
            return strategy.extended.call_for_each_replica(
                self._optimizer.apply_gradients, args=(pairs, global_step)
            )

        applied = run_if(finite, update)
        with tf.control_dependencies(values):  # which were computed with the old scale
            return tf.group(applied, self._adapt(finite), name=name)

    def _adapt(self, finite: tf.Tensor) -> tf.Operation:
        if not self._growth_steps:
            return tf.no_op()
        scale, good_steps = self._state
        good = tf.where(finite, good_steps + 1, 0)
        grows = tf.greater_equal(good, self._growth_steps)
        grown = tf.where(grows, tf.minimum(scale * 2, _LARGEST_SCALE), scale * 1)
        return tf.group(
            scale.assign(tf.where(finite, grown, tf.maximum(scale / 2, 1.0)), read_value=False),
            good_steps.assign(tf.where(grows, 0, good), read_value=False),
        )

    @functools.cached_property
    def _state(self) -> tuple[tf.Variable, tf.Variable]:
        new = functools.partial(tf.compat.v1.Variable, trainable=False, use_resource=True)
        scale = new(lambda: tf.constant(self._initial_scale, tf.float32), name="loss_scale")
        return scale, new(lambda: tf.constant(0), name="good_steps")


def _check(scale: Any, growth_steps: Any) -> None:
    is_number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if not is_number or not _SMALLEST_SCALE <= scale <= _LARGEST_FLOAT:
        raise ValueError(
            f"scale is {shown(scale)}, wanted a number that float32 holds, from {_SMALLEST_SCALE} "
            f"to {_LARGEST_FLOAT}. Give one, or leave it out"
        )
    is_whole = isinstance(growth_steps, numbers.Integral) and not isinstance(growth_steps, bool)
    if not is_whole or not 0 <= growth_steps <= MAX_COUNT:
        raise ValueError(
            f"growth_steps is {shown(growth_steps)}, wanted a whole number from 0 to {MAX_COUNT}. "
            "Give one, or leave it out"
        )
