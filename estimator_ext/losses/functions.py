"""The loss functions of a graph, and the rule by which TensorFlow takes mean or sum.

`tf.compat.v1.losses` and Keras store the reduction of their last loss function in the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from estimator_ext.graphs.operation_kinds import OF_THIS_RANK
from estimator_ext.graphs.walks import data_before, walk

_NO_REDUCTION, SUM = "none", "sum"  # as Keras says it, too
MEAN = tf.compat.v1.losses.Reduction.MEAN
_DIVISIONS = ("RealDiv", "Div", "DivNoNan")
_PRODUCTS = ("Mul", "MulNoNan")


class LossFunctions:
    """The reductions of loss functions, by the scope of their operations."""

    def __init__(self) -> None:
        self.reductions: dict[str, str] = {}

    def add(self, scope: str, reduction: str) -> None:
        """Stores a loss function."""
        is_sum = reduction == tf.compat.v1.losses.Reduction.SUM
        self.reductions[scope] = SUM if is_sum else reduction

    def reduction_of(self, targets: Sequence[Any]) -> str | None:
        """Returns the last reduction before the targets; "none" only if there is no other.

        A sum that is divided, or multiplied by a value that depends on data, counts as a mean.
        """
        if not self.reductions:
            return None
        operations = [each.op for each in targets if isinstance(each, tf.Tensor)]
        divided: list[tf.Operation] = []
        if SUM in self.reductions.values():  # else the walk for each product is not needed
            divided = [
                op
                for op in walk(operations, self._before_losses)
                if op.type in _DIVISIONS or (op.type in _PRODUCTS and not _has_factor_of_all(op))
            ]
        averaged = {self._scope_of(op) for op in walk(divided, data_before)}
        scopes = {self._scope_of(op) for op in walk(operations, data_before)}
        reductions = [
            MEAN if reduction == SUM and scope in averaged else reduction
            for scope, reduction in self.reductions.items()
            if scope in scopes
        ]
        reductions = [each for each in reductions if each != _NO_REDUCTION] or reductions
        return reductions[-1] if reductions else None

    def _before_losses(self, op: tf.Operation) -> Collection[tf.Operation]:
        return [] if self._scope_of(op) in self.reductions else data_before(op)

    @staticmethod
    def _scope_of(op: tf.Operation) -> str:
        return str(op.name.rpartition("/")[0])


def _has_factor_of_all(op: tf.Operation) -> bool:
    return any(
        not any(OF_THIS_RANK.match(each.type) for each in walk([factor.op], data_before))
        for factor in op.inputs
    )
