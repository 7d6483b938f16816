"""Trainings that go on where a gradient is not finite, with steps that update nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from estimator_ext.fingerprint import Updates
from estimator_ext.gradient_marks import marks_of_graph
from estimator_ext.graph import BRANCHES, data_before, depends_on, predicates_around, walk
from hostopt.errors import ConfigError
from hostopt.nonfinite import NonFiniteCheck
from hostopt.tensorflow.background import HOST_DEVICE

__all__: list[str] = []

_CHECKS = ("IsFinite", "IsNan", "IsInf")


class SkippedUpdates:
    """Puts the updates of a graph under a condition: all sums of the step are finite."""

    def __init__(self) -> None:
        self.checks: list[NonFiniteCheck] = []  # of all reductions of the step, in the end
        self._finite: tf.Tensor | None = None
        self._predicates: dict[tf.Operation, bool] = {}  # and whether they are checks

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

    def check(self, updates: Updates) -> None:
        """Makes sure that the updates can be left out where a gradient is not finite.

        Args:
          updates: what the step does.

        Raises:
          hostopt.ConfigError: an update uses a gradient, finite or not.
        """
        marks = marks_of_graph()
        trained = {updates.variable_of(mark.source.op) for mark in marks.values()}
        for variable in sorted(trained & updates.changes.keys()):
            for update in updates.changes[variable]:
                if not self._guards(update) and depends_on([update], marks, data_before):
                    raise ConfigError(
                        f"nonfinite='skip' cannot leave out operation {update.name!r} "
                        f"({update.type}), which updates variable {variable!r} with a gradient by "
                        "itself. Use nonfinite='error', or an optimizer that applies gradients as "
                        "those of tf.compat.v1.train do"
                    )

    def _guards(self, op: tf.Operation) -> bool:
        """Whether an operation runs only if a check, also one of the program, finds no NaN."""
        predicates = predicates_around(op) + [op.inputs[0]] * (op.type in BRANCHES)
        return any(self._is_check(predicate.op) for predicate in predicates)

    def _is_check(self, predicate: tf.Operation) -> bool:
        if predicate not in self._predicates:
            self._predicates[predicate] = any(
                op.type in _CHECKS or (self._finite is not None and op is self._finite.op)
                for op in walk([predicate], data_before)
            )
        return self._predicates[predicate]

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
