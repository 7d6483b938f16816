"""Small arrays and sparse gradients of a step, reduced in one exchange.

Each rank packs all that it has into one buffer,

    numbers   int64: the number that travels along, then how many rows it has of each kind
    arrays    the dense arrays, those of one dtype and operation side by side
    rows      for each kind of row: keys int64 [n], then values [n, width]

and every rank gets the buffers of all ranks and combines them in rank order. So there is one round
of messages, however many tensors there are, and all ranks end with the same bits. It moves
(size - 1) times the buffer, which is why large dense gradients go through buckets instead.

Tables whose rows are of one kind (dtype, width, dtype of the indices, summed or not) are given and
taken back as one array, table after table. A key is the position of the table in the upper bits
and the index of the row in the lower ones, so that rows of all these tables are sorted and summed
together.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from hostopt.bucket import TensorSpec
from hostopt.communicator import Communicator, ReduceOp
from hostopt.errors import ConfigError
from hostopt.finite import all_finite, troubles
from hostopt.nonfinite import NonFiniteCheck
from hostopt.ring import Array, Operation
from hostopt.step_stats import StepStats, StepTimes

__all__: list[str] = []

_INDEX_BITS = 40
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_MAX_TABLES = 1 << (63 - _INDEX_BITS)
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True)
class DenseValue:
    """A dense array of the exchange.

    Args:
      spec: its name, shape and dtype.
      op: how it is reduced.
      is_gradient: True if it counts by the weight of this rank, and must be finite.
    """

    spec: TensorSpec
    op: ReduceOp = ReduceOp.SUM
    is_gradient: bool = True


@dataclass(frozen=True)
class Table:
    """A sparse gradient: rows of a variable.

    Args:
      name: name of the variable.
      row_shape: shape of one row.
      dtype: dtype of the values.
      index_dtype: dtype of the indices, int32 or int64.
      is_summed: whether rows of one index become one row; otherwise all rows of all ranks stay.
    """

    name: str
    row_shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    index_dtype: np.dtype[np.generic]
    is_summed: bool = True

    @property
    def width(self) -> int:
        """How many values a row has."""
        return math.prod(self.row_shape)

    def __str__(self) -> str:
        kind = "sums of sparse rows" if self.is_summed else "sparse rows"
        row = list(self.row_shape)
        return f"{kind} of {row} {self.dtype.name}, {self.index_dtype.name} indices"


class SideValue(Protocol):
    """A whole number of each rank that travels along with an exchange."""

    @property
    def own(self) -> int:
        """This rank's number."""

    def agree(self, total: int) -> None:
        """Takes in the sum over all ranks."""


class Rows(NamedTuple):
    """Rows of several tables of one kind, table after table.

    Args:
      counts: whole numbers of shape [tables], how many rows each table has.
      indices: shape [n], of each row in its table.
      values: shape [n, width].
    """

    counts: Array
    indices: Array
    values: Array


class FusedExchange:
    """Reduces small arrays and sparse gradients over the ranks, all of them in one exchange.

    Args:
      communicator: a communicator of its own (a `duplicate`).
      dense: the dense arrays, the same on all ranks.
      tables: the sparse gradients, the same on all ranks.
      check: what follows if sums of gradients are not finite; by default as the option says.
      side_value: a number that travels along; None for none.

    Attributes:
      kinds: the positions of the tables of each kind of row.

    Raises:
      ConfigError: there are more sparse gradients than a key can tell apart.
    """

    def __init__(
        self,
        communicator: Communicator,
        dense: Sequence[DenseValue],
        tables: Sequence[Table],
        check: NonFiniteCheck | None = None,
        side_value: SideValue | None = None,
    ) -> None:
        if len(tables) > _MAX_TABLES:
            raise ConfigError(
                f"a step has {len(tables)} sparse gradients, wanted at most {_MAX_TABLES}. Make "
                "some of them dense with sparse_as_dense=True"
            )
        self.communicator = communicator
        self._dense = tuple(dense)
        self._tables = tuple(tables)
        self._side_value = side_value
        self.check = check or NonFiniteCheck(communicator)
        self._arrays = _group([(v.spec.dtype.name, v.op, v.is_gradient) for v in self._dense])
        self.kinds = _group(
            [(t.dtype.name, t.width, t.index_dtype.name, t.is_summed) for t in self._tables]
        )
        self._steps = itertools.count()
        self._stats = StepStats(1)
        self._lock = threading.Lock()

    @property
    def last_times(self) -> StepTimes | None:
        """What was measured in the last step, in which all of the exchange was exposed."""
        return self._stats.last

    def count_from(self, step: int) -> None:
        """Numbers the steps from here, in errors; before the first exchange.

        Args:
          step: number of the first step, the same on all ranks.
        """
        self._steps = itertools.count(step)

    def close(self) -> None:
        """Has nothing to free; reducers have this method."""

    def run(
        self, dense: Sequence[Array], rows: Sequence[Rows], weight: float = 1.0
    ) -> tuple[list[Array], list[Rows]]:
        """Reduces one step.

        Args:
          dense: arrays with the shapes and dtypes of the dense values.
          rows: the rows of each kind, whose indices may occur more than once.
          weight: what this rank's gradients are multiplied by; 0 leaves them out, NaN included.

        Returns:
          The reduced arrays; and the rows of each table: sums, each index once and ascending, or
          the rows of all ranks in rank order. The same bits on all ranks.

        Raises:
          ConfigError: an index is negative or too large.
          NonFiniteGradientError: sums of gradients are not finite, and that is an error.
          HostOptError: a rank failed, left or timed out.
        """
        with self._lock:
            begin_s = time.monotonic()
            self._stats.launched(0, begin_s)
            dense, rows = self._weighted(dense, rows, weight)
            buffers = self.communicator.all_gather_bytes(self._pack(dense, rows))
            end_s = time.monotonic()
            self._stats.ring(0, begin_s, end_s)
            self._stats.waited(0, begin_s, end_s)
            result = self._combine([_Reader(np.frombuffer(each, np.uint8)) for each in buffers])
            self._look((dense, rows), result)
            return result.arrays, result.rows

    def _weighted(
        self, dense: Sequence[Array], rows: Sequence[Rows], weight: float
    ) -> tuple[Sequence[Array], Sequence[Rows]]:
        if weight == 1:
            return dense, rows
        arrays = [
            _times(array, weight) if value.is_gradient else array
            for array, value in zip(dense, self._dense)
        ]
        if weight == 0:
            return arrays, [Rows(0 * c, i[:0], values[:0]) for c, i, values in rows]
        return arrays, [Rows(c, i, _times(values, weight)) for c, i, values in rows]

    # -- the buffer ------------------------------------------------------------------------

    def _pack(self, dense: Sequence[Array], rows: Sequence[Rows]) -> Array:
        keyed = [
            self._merge(tables, self._keys(tables, each), each.values)
            for tables, each in zip(self.kinds, rows)
        ]
        number = self._side_value.own if self._side_value else 0
        parts = [np.array([number, *(len(keys) for keys, _ in keyed)], np.int64)]
        parts += [
            np.concatenate([dense[index].reshape(-1) for index in group]) for group in self._arrays
        ]
        parts += [part for keys_and_values in keyed for part in keys_and_values]
        sizes = [_padded(part.nbytes) for part in parts]
        buffer = np.empty(sum(sizes), np.uint8)
        start = 0
        for part, size in zip(parts, sizes):
            buffer[start : start + part.nbytes] = part.reshape(-1).view(np.uint8)
            start += size
        return buffer

    def _keys(self, tables: Sequence[int], rows: Rows) -> Array:
        indices = rows.indices
        positions = np.repeat(np.arange(len(tables), dtype=np.int64), rows.counts)
        if len(indices) and not (indices.min() >= 0 and indices.max() <= _INDEX_MASK):
            wrong = np.flatnonzero((indices < 0) | (indices > _INDEX_MASK))[0]
            name = self._tables[tables[positions[wrong]]].name
            raise ConfigError(
                f"a gradient has row {indices[wrong]} of {name!r}, wanted an index from 0 to "
                f"{_INDEX_MASK}. Look at the ids that the model looks up there"
            )
        keys: Array = indices + (positions << _INDEX_BITS)
        return keys

    def _merge(self, tables: Sequence[int], keys: Array, values: Array) -> tuple[Array, Array]:
        """Rows table after table, and of each index one if they are summed."""
        if self._tables[tables[0]].is_summed:
            return _sum_by_key(keys, values)
        order = np.argsort(keys >> _INDEX_BITS, kind="stable")
        return keys.take(order), values.take(order, 0)

    def _combine(self, ranks: Sequence[_Reader]) -> _Result:
        numbers = [reader.take(np.dtype(np.int64), 1 + len(self.kinds)) for reader in ranks]
        if self._side_value:
            self._side_value.agree(sum(int(own[0]) for own in numbers))
        result = _Result([np.empty(0)] * len(self._dense), [])
        for group in self._arrays:
            self._combine_arrays(group, ranks, result)
        for number, tables in enumerate(self.kinds):
            counts = [int(own[1 + number]) for own in numbers]
            result.rows.append(self._combine_rows(tables, ranks, counts))
            result.finite = all_finite(result.rows[-1].values) and result.finite
        return result

    def _combine_arrays(
        self, group: Sequence[int], ranks: Sequence[_Reader], result: _Result
    ) -> None:
        first = self._dense[group[0]]
        sizes = [math.prod(self._dense[index].spec.shape) for index in group]
        parts = [reader.take(first.spec.dtype, sum(sizes)) for reader in ranks]
        total = parts[0].copy()
        for part in parts[1:]:
            first.op.ufunc(total, part, out=total)
        if first.op is ReduceOp.AVERAGE:
            total /= total.dtype.type(len(ranks))
        if first.is_gradient:
            result.finite = all_finite(total) and result.finite
        for index, size, end in zip(group, sizes, itertools.accumulate(sizes)):
            result.arrays[index] = total[end - size : end].reshape(self._dense[index].spec.shape)

    def _combine_rows(
        self, tables: Sequence[int], ranks: Sequence[_Reader], counts: Sequence[int]
    ) -> Rows:
        first = self._tables[tables[0]]
        found = [
            (
                reader.take(np.dtype(np.int64), count),
                reader.take(first.dtype, count * first.width).reshape(count, first.width),
            )
            for reader, count in zip(ranks, counts)
        ]
        keys, values = self._merge(tables, *(np.concatenate(parts) for parts in zip(*found)))
        edges = np.searchsorted(keys >> _INDEX_BITS, np.arange(len(tables) + 1))
        indices = (keys & _INDEX_MASK).astype(first.index_dtype, copy=False)
        return Rows(np.diff(edges), indices, values)

    # -- values that are not finite --------------------------------------------------------

    def _look(self, own: tuple[Sequence[Array], Sequence[Rows]], result: _Result) -> None:
        step, channel = next(self._steps), self.communicator
        self.check.look(
            Operation(channel.channel, step, what=channel.what),
            result.finite,
            lambda: self._troubles(*own),
            lambda: self._troubles(result.arrays, result.rows),
        )

    def _troubles(self, dense: Sequence[Array], rows: Sequence[Rows]) -> dict[str, str]:
        found = {v.spec.name: a for v, a in zip(self._dense, dense) if v.is_gradient}
        for tables, each in zip(self.kinds, rows):
            parts = np.split(each.values, np.cumsum(each.counts)[:-1])
            found.update((self._tables[table].name, part) for table, part in zip(tables, parts))
        return troubles(list(found), list(found.values()))


@dataclass
class _Result:
    """What all ranks have in the end.

    Args:
      arrays: the reduced arrays.
      rows: the sums of the rows of each kind.
      finite: whether all gradients among them are finite.
    """

    arrays: list[Array]
    rows: list[Rows]
    finite: bool = True


class _Reader:
    """Takes arrays off the beginning of a buffer, one after the other."""

    def __init__(self, buffer: Array) -> None:
        self._buffer = buffer
        self._start = 0

    def take(self, dtype: np.dtype[np.generic], length: int) -> Array:
        nbytes = length * dtype.itemsize
        part: Array = self._buffer[self._start : self._start + nbytes].view(dtype)
        self._start += _padded(nbytes)
        return part


def _group(kinds: Sequence[object]) -> list[list[int]]:
    """Positions of equal kinds, in the order in which the kinds first occur."""
    groups: dict[object, list[int]] = {}
    for index, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(index)
    return list(groups.values())


def _sum_by_key(keys: Array, values: Array) -> tuple[Array, Array]:
    """Each key once, in ascending order, with the sum of its rows in the order of the input."""
    order = np.argsort(keys, kind="stable")  # merges what is sorted in parts
    keys, values = keys.take(order), values.take(order, 0)
    is_first = np.ones(len(keys), np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    if len(starts) == len(keys):
        return keys, values
    return keys.take(starts), np.add.reduceat(values, starts, axis=0)


def _times(array: Array, weight: float) -> Array:
    if weight == 0:
        return np.zeros_like(array)
    return np.asarray(array * array.dtype.type(weight))


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
