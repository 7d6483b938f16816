"""Sums of gradients over the ranks, in functions of TensorFlow 2 and eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import hostopt
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.process_ring import ProcessRing
from hostopt.tensorflow.gradient_reduction import GradientReduction


class FunctionGradients:
    """Reduces the gradients of optimizers in buckets, while backward continues.

    Args:
      sparse_as_dense: True makes `tf.IndexedSlices` dense before they travel.
    """

    def __init__(self, ring: Callable[[], ProcessRing], sparse_as_dense: bool) -> None:
        self._ring = ring
        self._sparse_as_dense = sparse_as_dense

    def reduce(self, pairs: Sequence[tuple[Any, tf.Variable]], is_mean: bool) -> list[Any]:
        """Reduces gradients over the ranks.

        Args:
          is_mean: True for the mean over the ranks, False for the sum.

        Returns:
          The results on the host, in the same order.

        Raises:
          hostopt.ConfigError: the option `nonfinite` is "skip".
        """
        if self._ring().communicator.transport.options.nonfinite == "skip":
            raise hostopt.ConfigError(
                "nonfinite is 'skip', which only graphs of estimator_ext.Estimator support. Give "
                "the HostOffloadStrategy nonfinite='error' or 'warn'"
            )
        reduction = GradientReduction(
            _name(pairs),
            ReduceOp.AVERAGE if is_mean else ReduceOp.SUM,
            sparse_as_dense=self._sparse_as_dense,
            nonfinite=None,
            ring=self._ring,
        )
        return reduction.reduce([gradient for gradient, _ in pairs], [v for _, v in pairs])


def _name(pairs: Sequence[tuple[Any, tf.Variable]]) -> str:
    """Returns a name of the gradients that is the same on all ranks, whenever they trace."""
    first = pairs[0][1].name.partition(":")[0]
    return f"{len(pairs)} variables from {first}"
