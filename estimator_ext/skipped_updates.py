"""Trainings that go on where a gradient is not finite, with steps that update nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from estimator_ext.graph import BRANCHES, data_before, depends_on, predicates_around, walk
from hostopt.nonfinite import NonFiniteCheck
from hostopt.tensorflow.background import HOST_DEVICE

__all__: list[str] = []

_CHECKS = ("IsFinite", "IsNan", "IsInf")


class SkippedUpdates:
    """Puts the updates of a graph under a condition: all sums of the step are finite."""

    def __init__(self) -> None:
        self.checks: list[NonFiniteCheck] = []  # of all reductions of the step, in the end
        self._finite: tf.Tensor | None = None

    def watch(self, sums: Sequence[tf.Tensor]) -> None:
        """Have the updates depend on these sums too, those that are built already among them.

        Args:
          sums: tensors that are there when the checks can say whether they are finite.
        """
        sources = [tensor.op for tensor in sums]
        if self._finite is None or depends_on(sources, [self._finite.op]):
            # sums that are made of what has been updated come too late for those updates
            with tf.device(HOST_DEVICE), tf.control_dependencies(sources):
                self._finite = tf.numpy_function(
                    self._all_finite, [], tf.bool, name="HostAllFinite"
                )
            self._finite.set_shape([])
        else:
            self._finite.op._add_control_inputs(sources)

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that builds the same updates, to be made in steps whose sums are finite.

        Args:
          function: builds operations; called once.

        Returns:
          The function itself, where nothing is watched; else one that returns an operation.
        """
        finite = self._finite
        if finite is None:
            return function

        def guarded(*args: Any, **kwargs: Any) -> tf.Operation:
            def update() -> tf.Tensor:
                built = tf.nest.flatten(function(*args, **kwargs))
                with tf.control_dependencies([each for each in built if each is not None]):
                    return tf.constant(True)

            return tf.cond(finite, update, lambda: tf.constant(False)).op

        return guarded

    def guards(self, op: tf.Operation) -> bool:
        """Whether an operation runs only if something is finite.

        Args:
          op: an operation of the graph.

        Returns:
          True in a branch whose predicate depends on a check, of this class or of the program.
        """
        predicates = predicates_around(op) + [op.inputs[0]] * (op.type in BRANCHES)
        return any(
            before.type in _CHECKS or (self._finite is not None and before is self._finite.op)
            for before in walk([predicate.op for predicate in predicates], data_before)
        )

    def _all_finite(self) -> np.bool_:
        return np.bool_(all(check.finite for check in self.checks))


class HooksWithoutNan(list[Any]):
    """A list of hooks to which the stock Estimator adds none that ends a training at a NaN loss.

    Those that a user adds stay.
    """

    def append(self, hook: Any) -> None:
        """Add a hook, but for a `NanTensorHook`."""
        if not isinstance(hook, tf.compat.v1.train.NanTensorHook):
            super().append(hook)
