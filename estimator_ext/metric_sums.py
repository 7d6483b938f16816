"""Sums of metric variables over evaluators, and which metrics can be summed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext.evaluators import Evaluators
from estimator_ext.sync_on_read import assign
from hostopt.communicator import DTYPES

__all__: list[str] = []

_ADD = {
    "AssignAdd",
    "AssignAddVariableOp",
    "ResourceScatterAdd",
    "ResourceScatterNdAdd",
    "ScatterAdd",
    "ScatterNdAdd",
}
_READ = {
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VarIsInitializedOp",
    "VariableShape",
}
_PYTHON = {"EagerPyFunc", "PyFunc"}


class SumMetricsHook(tf.compat.v1.train.SessionRunHook):
    """Gives every evaluator the sums of the metrics' variables, before results are read.

    Put it before all other hooks: what they read at the end is of all data then.

    Args:
      evaluators: those who evaluate together.
      values: tensor of each metric's result, by name.

    Raises:
      hostopt.ConfigError: a metric cannot be summed; the message names it.
    """

    def __init__(self, evaluators: Evaluators, values: dict[str, Any]) -> None:
        self._evaluators = evaluators
        self._variables = find_summable(values)
        self._begun: list[Any] = []

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """2. Agree that all have read the checkpoint and have the same metrics.

        Args:
          session: the session of this evaluator.
          coord: not used.

        Raises:
          hostopt.CheckpointError: an evaluator could not read the checkpoint.
          hostopt.CollectiveMismatchError: two evaluators have different metrics.
        """
        del coord
        self._evaluators.have_read()
        facts = {v.op.name: f"{v.shape} {v.dtype.base_dtype.name}" for v in self._variables}
        self._evaluators.communicator.check_same(facts, "the variables of metrics")
        self._begun = [session.run(variable) for variable in self._variables]

    def end(self, session: tf.compat.v1.Session) -> None:
        """4. Sum what each evaluator has added.

        Args:
          session: the session of this evaluator.

        Raises:
          hostopt.HostOptError: an evaluator failed, left or timed out.
        """
        for variable, begun in zip(self._variables, self._begun):
            added = np.asarray(session.run(variable) - begun)
            what = f"metric variable {variable.op.name!r}"
            total = begun + self._evaluators.communicator.all_reduce(added, what=what)
            assign(session, [variable], [total])


def find_summable(values: dict[str, Any]) -> list[tf.Variable]:
    """Find the variables whose sums over slices of the data give the results for all data.

    They are local variables that change by additions only, of what no such variable is part of.

    Args:
      values: tensor of each metric's result, by name, in the current graph.

    Returns:
      The variables, each once, in the order of their names.

    Raises:
      hostopt.ConfigError: a metric has a variable that changes otherwise, or cannot be added.
    """
    local = {variable.op.name: variable for variable in tf.compat.v1.local_variables()}
    changed = {name for name, variable in local.items() if any(_changes(variable))}
    found = set()
    for metric, value in sorted(values.items()):
        sources = _sources([value.op])
        own = changed & set(sources)
        for name in own:
            _check(metric, local[name], changed)
        if any(op.type.startswith("IteratorGetNext") for op in sources.values()):
            raise _refusal(metric, "it is made of the last batch")
        called = sorted({op.type for op in sources.values()} & _PYTHON)
        if called and not own:
            raise _refusal(metric, f"{called[0]} keeps what it has counted")
        found |= own
    return [local[name] for name in sorted(found)]


def _changes(variable: tf.Variable) -> Iterator[tf.Operation]:
    """Operations that change a variable, but for its initializer."""
    (handle,) = variable.op.outputs
    for op in handle.consumers():
        # an operation on a reference gives the reference on if it changes what is behind it
        plain = handle.dtype._is_ref_dtype and not any(o.dtype._is_ref_dtype for o in op.outputs)
        if not plain and op.type not in _READ and op.name != variable.initializer.name:
            yield op


def _check(metric: str, variable: tf.Variable, changed: set[str]) -> None:
    dtype, named = variable.dtype.base_dtype.name, f"its variable {variable.op.name!r}"
    if dtype not in DTYPES:
        raise _refusal(metric, f"{named} is of dtype {dtype}")
    for op in _changes(variable):
        if op.type not in _ADD:
            raise _refusal(metric, f"{named} changes by {op.type} ({op.name})")
        if changed & set(_sources(tensor.op for tensor in op.inputs[1:])):
            raise _refusal(metric, f"{named} grows by what such variables hold ({op.name})")


def _sources(operations: Iterable[tf.Operation]) -> dict[str, tf.Operation]:
    """The operations from which these get data, and these, by name."""
    left = list(operations)
    seen: dict[str, tf.Operation] = {}
    while left:
        op = left.pop()
        if op.name not in seen:
            seen[op.name] = op
            left.extend(tensor.op for tensor in op.inputs)
    return seen


def _refusal(metric: str, why: str) -> hostopt.ConfigError:
    return hostopt.ConfigError(
        f"metric {metric!r} cannot be summed over several evaluators: {why}, wanted numbers that "
        "change by assign_add only, of what the batch alone says. Change or remove this metric, "
        "start one evaluator, or give each an EvalSpec of its own"
    )
