"""Reduction of small dense arrays and sparse gradients of a step in one exchange.

Every rank sends one buffer to every other rank, and combines the buffers of all ranks in rank
order. A step therefore needs one round of messages, however many tensors it has, and all ranks get
the same bits. Each rank receives (size - 1) buffers. Large dense gradients are reduced in buckets
instead, which receive less.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.communicator import Communicator
from hostopt.gradients.exchange_buffer import Combined, DenseValue, ExchangeBuffer, Rows, Table
from hostopt.gradients.nonfinite import NonFiniteCheck, find_nonfinite
from hostopt.gradients.step_stats import StepStats, StepTimes


class FusedExchange:
    """Reduces small dense arrays and sparse gradients over the ranks in one exchange.

    Nothing else may use its communicator.
    """

    def __init__(
        self,
        communicator: Communicator,
        dense: Sequence[DenseValue],
        tables: Sequence[Table],
        check: NonFiniteCheck | None = None,
    ) -> None:
        self._buffer = ExchangeBuffer(dense, tables)
        self.kinds = self._buffer.kinds  # indices of the tables of each kind of row
        self.communicator = communicator
        self.nonfinite_check = check or NonFiniteCheck(communicator)
        self._steps = itertools.count()
        self._stats = StepStats(1)
        self._lock = threading.Lock()

    @property
    def last_times(self) -> StepTimes | None:
        """Times of the last step, in which the whole exchange was exposed."""
        return self._stats.last

    def count_from(self, step: int) -> None:
        """Sets the number of the first step, the same on all ranks, before any exchange."""
        self._steps = itertools.count(step)

    def close(self) -> None:
        """Does nothing; reducers have this method."""

    def refuse(self, reason: str) -> None:
        """Counts a step that this rank refuses, and tells ranks that wait for it."""
        self.communicator.refuse(reason)

    def zeros(self) -> tuple[list[Array], list[Rows]]:
        """Returns arguments of `run` for a rank that has no gradients: zeros, and no rows."""
        return self._buffer.zeros()

    def run(
        self,
        dense: Sequence[Array],
        rows: Sequence[Rows],
        weight: float = 1.0,
        side_value: int = 0,
    ) -> Combined:
        """Reduces one step. Collective: all ranks must call it.

        Args:
          rows: the rows of each kind. Indices may repeat.
          weight: weight of this rank's gradients; 0 leaves them out, even if they hold NaN.
          side_value: integer that is summed in the same messages.
        """
        with self._lock:
            begin_s = time.monotonic()
            self._stats.launched(0, begin_s)
            dense, rows = self._buffer.weighted(dense, rows, weight)
            packed = self._buffer.pack(side_value, dense, rows)
            buffers = self.communicator.all_gather_bytes(packed)
            end_s = time.monotonic()
            self._stats.ring(0, begin_s, end_s)
            self._stats.waited(0, begin_s, end_s)
            result = self._buffer.combine([np.frombuffer(each, np.uint8) for each in buffers])
            self._check(dense, rows, result)
            return result

    def _check(self, dense: Sequence[Array], rows: Sequence[Rows], result: Combined) -> None:
        communicator = self.communicator
        self.nonfinite_check.check(
            CollectiveCall(communicator.channel, next(self._steps), name=communicator.name),
            result.is_finite,
            lambda: self._find_nonfinite(dense, rows),
            lambda: self._find_nonfinite(result.arrays, result.rows),
        )

    def _find_nonfinite(self, dense: Sequence[Array], rows: Sequence[Rows]) -> dict[str, str]:
        gradients = self._buffer.gradients_by_name(dense, rows)
        return find_nonfinite(list(gradients), list(gradients.values()))
