"""Sums of metric variables over several evaluators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext._tf_private import is_reference
from estimator_ext.evaluation.evaluators import Evaluators
from estimator_ext.graphs.walks import data_before, walk
from estimator_ext.variables.sync_on_read import assign
from hostopt.collectives.reduce_op import DTYPES

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
    """Sums the variables of the metrics over the evaluators, before results are read.

    It must come before all other hooks, so that they read the results of all data at the end.
    Collective: all evaluators must have it.
    """

    def __init__(self, evaluators: Evaluators, values: dict[str, Any]) -> None:
        self._evaluators = evaluators
        self._variables = find_summable(values)
        self._initial_values: list[Any] = []

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """[E2] Checks that all evaluators restored the checkpoint and have the same metrics."""
        del coord
        self._evaluators.confirm_restored()
        descriptions = {v.op.name: f"{v.shape} {v.dtype.base_dtype.name}" for v in self._variables}
        self._evaluators.communicator.check_same(descriptions, "the variables of metrics")
        self._initial_values = [session.run(variable) for variable in self._variables]

    def end(self, session: tf.compat.v1.Session) -> None:
        """[E4] Sums the increments of all evaluators."""
        for variable, initial in zip(self._variables, self._initial_values):
            increment = np.asarray(session.run(variable) - initial)
            name = f"metric variable {variable.op.name!r}"
            total = initial + self._evaluators.communicator.all_reduce(increment, name=name)
            assign(session, [variable], [total])


def find_summable(values: dict[str, Any]) -> list[tf.Variable]:
    """Finds the variables whose sums over slices of the data give the results for all data.

    They are local variables that change by additions only. The added values depend on no such
    variable.

    Args:
      values: tensor of each metric's result, by name, in the current graph.

    Returns:
      The variables without duplicates, sorted by name.
    """
    local = {variable.op.name: variable for variable in tf.compat.v1.local_variables()}
    changed = {name for name, variable in local.items() if any(_changes(variable))}
    summable = set()
    for metric, value in sorted(values.items()):
        sources = _sources([value.op])
        of_metric = changed & set(sources)
        for name in of_metric:
            _check(metric, local[name], changed)
        if any(op.type.startswith("IteratorGetNext") for op in sources.values()):
            raise _not_summable(metric, "its result is computed from the last batch")
        called = sorted({op.type for op in sources.values()} & _PYTHON)
        if called and not of_metric:
            raise _not_summable(metric, f"{called[0]} keeps its own state")
        summable |= of_metric
    return [local[name] for name in sorted(summable)]


def _changes(variable: tf.Variable) -> Iterator[tf.Operation]:
    """Operations that change a variable, without its initializer."""
    (handle,) = variable.op.outputs
    for op in handle.consumers():
        # an operation that changes a reference variable returns the reference
        reads = is_reference(handle) and not any(map(is_reference, op.outputs))
        if not reads and op.type not in _READ and op.name != variable.initializer.name:
            yield op


def _check(metric: str, variable: tf.Variable, changed: set[str]) -> None:
    dtype, text = variable.dtype.base_dtype.name, f"its variable {variable.op.name!r}"
    if dtype not in DTYPES:
        raise _not_summable(metric, f"{text} is of dtype {dtype}")
    for op in _changes(variable):
        if op.type not in _ADD:
            raise _not_summable(metric, f"{text} changes by {op.type} ({op.name})")
        if changed & set(_sources(tensor.op for tensor in op.inputs[1:])):
            raise _not_summable(metric, f"{text} grows by the values of variables ({op.name})")


def _sources(operations: Iterable[tf.Operation]) -> dict[str, tf.Operation]:
    """Returns operations and all those from which they get data, by name."""
    return {op.name: op for op in walk(operations, data_before)}


def _not_summable(metric: str, reason: str) -> hostopt.ConfigError:
    return hostopt.ConfigError(
        f"metric {metric!r} cannot be summed over several evaluators: {reason}, wanted variables "
        "that change only by assign_add, of values of the batch alone. Change or remove this "
        "metric, start one evaluator, or give each evaluator a separate EvalSpec"
    )
