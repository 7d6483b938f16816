"""Optimizers that scale the loss, and skip a step if its gradients are not finite.

All ranks must skip the same steps. In Keras 2, such an optimizer reduces gradients before it looks
at them. In Keras 3, the optimizer inside it reduces them, after the decision of each rank.
"""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

from hostopt.collectives.reduce_op import ReduceOp
from hostopt.tensorflow.allreduce import allreduce
from hostopt.tensorflow.wrapping import reduction_of


def decide_together() -> None:
    """Makes every LossScaleOptimizer of Keras 3 skip a step if one of the ranks has to."""
    scaler = importlib.import_module("keras").optimizers.LossScaleOptimizer
    if not hasattr(scaler.check_finite, "_hostopt"):
        scaler.check_finite = _on_all_ranks(scaler.check_finite)


def _on_all_ranks(check_finite: Any) -> Any:
    def check_finite_on_all_ranks(self: Any, grads: Any) -> Any:
        finite = check_finite(self, grads)
        if not hasattr(self.inner_optimizer, "_hostopt_reduction"):
            return finite
        name = f"finite gradients of {reduction_of(self.inner_optimizer).name}"
        return tf.cast(allreduce(tf.cast(finite, tf.int32), op=ReduceOp.MIN, name=name), tf.bool)

    check_finite_on_all_ranks._hostopt = True  # type: ignore[attr-defined]
    return check_finite_on_all_ranks
