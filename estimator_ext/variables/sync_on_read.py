"""Sync-on-read variables, which each rank changes locally, such as BatchNorm's moving averages.

Each rank has a local value (`tf.VariableSynchronization.ON_READ`). A checkpoint holds the mean or
the sum over the ranks, depending on the variable's aggregation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from hostopt.collectives.reduce_op import DTYPES

_REDUCED = (tf.VariableAggregation.MEAN, tf.VariableAggregation.SUM)


def is_sync_on_read(variable: Any) -> bool:
    """Returns True if each rank has a value, and reading aggregates those of all ranks."""
    on_read = getattr(variable, "synchronization", None) == tf.VariableSynchronization.ON_READ
    return on_read and variable.aggregation in _REDUCED


class SyncOnRead:
    """The sync-on-read variables of a training."""

    def __init__(
        self, communicator: hostopt.Communicator, variables: Sequence[tf.Variable]
    ) -> None:
        self._communicator = communicator
        self._variables = sorted(filter(is_sync_on_read, variables), key=lambda v: v.op.name)
        self._local_values: list[Any] = []  # of rank 0, while it holds the aggregates
        for variable in self._variables:
            if variable.dtype.base_dtype.name not in DTYPES:
                raise hostopt.ConfigError(
                    f"variable {variable.op.name!r} is sync-on-read and of dtype "
                    f"{variable.dtype.base_dtype.name}, wanted one of {', '.join(DTYPES)}"
                )

    def aggregate_to_chief(self, session: tf.compat.v1.Session) -> None:
        """Assigns means and sums over the ranks to the variables of rank 0; collective."""
        local_values = session.run(self._variables)
        totals = [self._reduce(*pair) for pair in zip(self._variables, local_values)]
        if self._communicator.rank == 0:
            self._local_values = local_values
            assign(session, self._variables, totals)

    def restore_local(self, session: tf.compat.v1.Session) -> None:
        """Assigns rank 0's local values again, after `aggregate_to_chief`."""
        if self._local_values:
            assign(session, self._variables, self._local_values)
            self._local_values = []

    def _reduce(self, variable: tf.Variable, value: Any) -> Any:
        mean = variable.aggregation == tf.VariableAggregation.MEAN
        total = self._communicator.all_reduce(value, name=f"variable {variable.op.name!r}")
        return (total / self._communicator.size).astype(total.dtype) if mean else total


def assign(
    session: tf.compat.v1.Session, variables: Sequence[tf.Variable], values: Sequence[Any]
) -> None:
    """Assigns values to variables without new operations, as the graph may be finalized.

    It runs the initializers and feeds their inputs.
    """
    runs: list[dict[Any, tuple[tf.Operation, Any]]] = []  # by the input that is fed
    for variable, value in zip(variables, values):
        source = variable.initializer.inputs[1].ref()
        run = next((each for each in runs if source not in each), None)
        if run is None:  # two initializers may share a tensor: one run for each
            run = {}
            runs.append(run)
        run[source] = variable.initializer, value
    for run in runs:
        initializers = [initializer for initializer, _ in run.values()]
        session.run(initializers, {source.deref(): value for source, (_, value) in run.items()})


def initial_local_value(variable: tf.Variable, value: Any, rank: int) -> Any:
    """Returns the value that a rank starts with after a restore: of a sum, rank 0 has it all."""
    is_sum = is_sync_on_read(variable) and variable.aggregation == tf.VariableAggregation.SUM
    return np.zeros_like(value) if is_sum and rank != 0 else value
