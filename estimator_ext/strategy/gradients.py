"""`reduce_gradients`: reduces gradients before the optimizer does, for clipping or logging."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from estimator_ext.strategy.strategy import HostOffloadStrategy

GradsAndVars = list[tuple[Any, tf.Variable]]


def reduce_gradients(grads_and_vars: Iterable[tuple[Any, tf.Variable]]) -> GradsAndVars:
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
    return reduce_pairs(grads_and_vars)


def reduce_pairs(
    grads_and_vars: Iterable[tuple[Any, tf.Variable]], nonfinite: str | None = None
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
