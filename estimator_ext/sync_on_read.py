"""Variables that each rank changes by itself, such as moving averages of BatchNorm.

Each rank has its own value (`tf.VariableSynchronization.ON_READ`); a checkpoint holds what they
are together: the mean or the sum, as the variable says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from hostopt.communicator import DTYPES

__all__: list[str] = []

_REDUCED = (tf.VariableAggregation.MEAN, tf.VariableAggregation.SUM)


def is_sync_on_read(variable: Any) -> bool:
    """Whether each rank has a value of its own, and all of them make one when it is read.

    Args:
      variable: a variable of the graph.

    Returns:
      True for numbers with a mean or a sum over the ranks.
    """
    on_read = getattr(variable, "synchronization", None) == tf.VariableSynchronization.ON_READ
    return on_read and variable.aggregation in _REDUCED


class SyncOnRead:
    """Those variables of a training, if there are some.

    Args:
      communicator: a communicator of its own (a `duplicate`).
      variables: variables of the graph, the same on all ranks.

    Raises:
      hostopt.ConfigError: one is of a dtype that cannot be reduced.
    """

    def __init__(
        self, communicator: hostopt.Communicator, variables: Sequence[tf.Variable]
    ) -> None:
        self._communicator = communicator
        self._variables = sorted(filter(is_sync_on_read, variables), key=lambda v: v.op.name)
        self._own: list[Any] = []
        for variable in self._variables:
            if variable.dtype.base_dtype.name not in DTYPES:
                raise hostopt.ConfigError(
                    f"variable {variable.op.name!r} is synchronised when it is read, and is of "
                    f"{variable.dtype.base_dtype.name}, wanted one of {', '.join(DTYPES)}"
                )

    def gather(self, session: tf.compat.v1.Session) -> None:
        """Give rank 0 what the values of all ranks make together; all ranks call this together.

        Args:
          session: the session of this rank.

        Raises:
          hostopt.HostOptError: a rank failed, left or timed out.
        """
        own = session.run(self._variables)
        together = [self._reduce(*pair) for pair in zip(self._variables, own)]
        if self._communicator.rank == 0:
            self._own = own
            self._assign(session, together)

    def take_back(self, session: tf.compat.v1.Session) -> None:
        """Give rank 0 its own values again.

        Args:
          session: the session of this rank.
        """
        if self._own:
            self._assign(session, self._own)
            self._own = []

    def _reduce(self, variable: tf.Variable, value: Any) -> Any:
        mean = variable.aggregation == tf.VariableAggregation.MEAN
        total = self._communicator.all_reduce(value, what=f"variable {variable.op.name!r}")
        return (total / self._communicator.size).astype(total.dtype) if mean else total

    def _assign(self, session: tf.compat.v1.Session, values: Sequence[Any]) -> None:
        for variable, value in zip(self._variables, values):  # two may begin with one tensor
            assign(session, variable, value)


def assign(session: tf.compat.v1.Session, variable: tf.Variable, value: Any) -> None:
    """Give a variable a value without another operation in the graph, which may be final.

    Args:
      session: where.
      variable: one with an initializer.
      value: an array of its shape.
    """
    session.run(variable.initializer, {variable.initializer.inputs[1]: value})


def own_part(variable: tf.Variable, value: Any, rank: int) -> Any:
    """What a rank begins with of a value that was saved.

    Args:
      variable: the variable.
      value: what rank 0 has restored or initialised.
      rank: this rank.

    Returns:
      `value`; of a sum, rank 0 has all and the others nothing.
    """
    is_sum = is_sync_on_read(variable) and variable.aggregation == tf.VariableAggregation.SUM
    return np.zeros_like(value) if is_sum and rank != 0 else value
