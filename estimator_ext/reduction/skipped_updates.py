"""Skips the updates of steps whose gradients are not finite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from estimator_ext._tf_private import add_control_inputs
from estimator_ext.graphs.fingerprint import Updates
from estimator_ext.graphs.walks import BRANCHES, data_before, depends_on, predicates_around, walk
from estimator_ext.reduction.gradient_marks import marks_of_graph
from hostopt.errors import ConfigError
from hostopt.gradients.nonfinite import NonFiniteCheck
from hostopt.tensorflow._tf_private import call_python
from hostopt.tensorflow.background import HOST_DEVICE

_CHECKS = ("IsFinite", "IsNan", "IsInf")


class SkippedUpdates:
    """Makes the updates of a graph conditional: all sums of the step must be finite."""

    def __init__(self) -> None:
        self.checks: list[NonFiniteCheck] = []  # of all reductions, once the step is built
        self._finite: tf.Tensor | None = None

    def watch(self, sums: Sequence[tf.Tensor]) -> None:
        """Makes all updates depend on these sums too, including updates that are built already."""
        sources = [tensor.op for tensor in sums]
        if self._finite is None or depends_on(sources, [self._finite.op]):
            # these sums depend on updates, which cannot wait for them
            with tf.device(HOST_DEVICE), tf.control_dependencies(sources):
                (self._finite,) = call_python(
                    lambda: [all(check.finite for check in self.checks)],
                    [],
                    [tf.bool],
                    "HostAllFinite",
                )
            self._finite.set_shape([])
        else:
            add_control_inputs(self._finite.op, sources)

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that builds updates which run only if all sums are finite."""
        finite = self._finite
        if finite is None:
            return function
        return lambda *args, **kwargs: run_if(finite, lambda: function(*args, **kwargs)).op

    def check(self, updates: Updates) -> None:
        """Checks that every update with a gradient can be skipped."""
        marks, is_check = marks_of_graph(), functools.cache(self._is_check)
        trained = {updates.variable_of(mark.source.op) for mark in marks.values()}
        for variable in sorted(updates.changes.keys() & trained):
            for update in updates.changes[variable]:
                decides = predicates_around(update)
                decides += [update.inputs[0]] * (update.type in BRANCHES)
                is_guarded = any(is_check(predicate.op) for predicate in decides)
                if not is_guarded and depends_on([update], marks, data_before):
                    raise ConfigError(
                        f"nonfinite='skip' cannot leave out operation {update.name!r} "
                        f"({update.type}), which updates variable {variable!r} with a gradient by "
                        "itself. Use nonfinite='error', or an optimizer that applies gradients as "
                        "those of tf.compat.v1.train do"
                    )

    def _is_check(self, predicate: tf.Operation) -> bool:
        """Returns True if a predicate, also of the program, says that no NaN was found."""
        return any(
            op.type in _CHECKS or (self._finite is not None and op is self._finite.op)
            for op in walk([predicate], data_before)
        )


def run_if(condition: tf.Tensor, build: Callable[[], Any]) -> tf.Tensor:
    """Runs the operations that a function builds if a condition is true, which it returns."""

    def run() -> tf.Tensor:
        built = tf.nest.flatten(build())
        with tf.control_dependencies([each for each in built if each is not None]):
            return tf.constant(True)

    return tf.cond(condition, run, lambda: tf.constant(False))


class HooksWithoutNan(list[Any]):
    """A list of hooks to which the stock Estimator cannot add a `NanTensorHook`.

    That hook would end the training at a NaN loss. Hooks of the user stay.
    """

    def append(self, hook: Any) -> None:
        """Adds a hook, unless it is a `NanTensorHook`."""
        if not isinstance(hook, tf.compat.v1.train.NanTensorHook):
            super().append(hook)
