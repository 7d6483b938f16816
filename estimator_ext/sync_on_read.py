"""Variables that each rank changes by itself, such as moving averages of BatchNorm.

Each rank has its own value (`tf.VariableSynchronization.ON_READ`); a checkpoint holds what they
are together: the mean or the sum, as the variable says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from hostopt.communicator import DTYPES

__all__: list[str] = []

_PART_BYTES = 64 << 20
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
            assign(session, self._variables, together)

    def take_back(self, session: tf.compat.v1.Session) -> None:
        """Give rank 0 its own values again.

        Args:
          session: the session of this rank.
        """
        if self._own:
            assign(session, self._variables, self._own)
            self._own = []

    def _reduce(self, variable: tf.Variable, value: Any) -> Any:
        mean = variable.aggregation == tf.VariableAggregation.MEAN
        total = self._communicator.all_reduce(value, what=f"variable {variable.op.name!r}")
        return (total / self._communicator.size).astype(total.dtype) if mean else total


def assign(
    session: tf.compat.v1.Session, variables: Sequence[tf.Variable], values: Sequence[Any]
) -> None:
    """Gives variables values without another operation in the graph, which may be final.

    Args:
      session: where.
      variables: with an initializer each.
      values: arrays of their shapes.
    """
    left = list(zip(variables, values))
    while left:
        feeds: dict[tf.Tensor, Any] = {}
        now, later = [], []
        for variable, value in left:  # two may begin with one tensor, which is fed once a run
            source = variable.initializer.inputs[1]
            (later if source.ref() in feeds else now).append((variable, value))
            feeds.setdefault(source.ref(), value)
        session.run(
            [variable.initializer for variable, _ in now],
            {reference.deref(): value for reference, value in feeds.items()},
        )
        left = later


def in_parts(variables: Sequence[tf.Variable]) -> Iterator[list[tf.Variable]]:
    """Divides variables into parts that are read or written in one run of a session each.

    A run for each variable would take long, as TensorFlow prepares each one; one run for all would
    need the memory of the whole model and its slots once more.

    Args:
      variables: of static shapes.

    Yields:
      Some of them, in their order: one, or several of up to 64 MiB.
    """
    part: list[tf.Variable] = []
    nbytes = 0
    for variable in variables:
        size = (variable.shape.num_elements() or 0) * variable.dtype.base_dtype.size
        if part and nbytes + size > _PART_BYTES:
            yield part
            part, nbytes = [], 0
        part.append(variable)
        nbytes += size
    if part:
        yield part


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
