"""The outer step: an optimizer applies the difference of a synchronisation to the variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hostopt.tensorflow.background import HOST_DEVICE

SCOPE = "outer"  # of its slots in a checkpoint


class OuterStep:
    """Operations that apply gradients which are computed outside the graph.

    Args:
      strategy: strategy of the training, in whose training graph they are built.
    """

    def __init__(
        self,
        strategy: Any,
        optimizer: tf.compat.v1.train.Optimizer,
        variables: Sequence[tf.Variable],
    ) -> None:
        self._feeds: list[tf.Tensor] = []

        def build() -> tf.Operation:
            # a name scope that ends in / is used again for the next fragment
            scope = tf.compat.v1.variable_scope(SCOPE, auxiliary_name_scope=False)
            with tf.device(HOST_DEVICE), scope, tf.name_scope(f"{SCOPE}/"):
                self._feeds += [
                    tf.compat.v1.placeholder(v.dtype.base_dtype, v.shape, "difference")
                    for v in variables
                ]
                return optimizer.apply_gradients(zip(self._feeds, variables))

        extended = strategy.extended
        with extended.separate_reduction():
            self.operation = extended.call_for_each_replica(build)
        self.operations = [feed.op for feed in self._feeds]  # whose values differ

    def run(self, session: tf.compat.v1.Session, gradients: Sequence[Any]) -> None:
        """Applies gradients.

        Args:
          gradients: arrays like the variables, in the same order.
        """
        session.run(self.operation, dict(zip(self._feeds, gradients)))
