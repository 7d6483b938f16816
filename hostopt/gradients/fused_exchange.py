"""Reduction of small dense arrays and sparse gradients of a step in one exchange.

Every rank sends one buffer to every other rank, and combines the buffers of all ranks in rank
order: one round of messages, however many tensors a step has, and the same bits on all ranks. Each
rank receives (size - 1) buffers, so large dense gradients are reduced in buckets instead.

A buffer holds, each part padded to 8 bytes:

    header    int64: the side value, then the number of rows of each kind
    arrays    the dense arrays, grouped by dtype and operator
    rows      for each kind of row: keys int64 [n], then values [n, width]

Rows of all tables are of one kind if dtype, width, index dtype and summing are the same. The key
of a row is the position of its table in the upper bits and the index of the row in the lower bits,
so sorting by key sorts all tables of a kind together.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.finite import all_finite
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import ConfigError
from hostopt.gradients.bucket import TensorSpec, padded
from hostopt.gradients.nonfinite import NonFiniteCheck, find_nonfinite
from hostopt.gradients.step_stats import StepStats

_INDEX_BITS = 40
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_MAX_TABLES = 1 << (63 - _INDEX_BITS)
_ALIGNMENT_BYTES = 8
# Measured: `np.add.reduceat` writes this many values in the time of one addition in pairs.
_VALUES_PER_REPEAT = 14


@dataclass(frozen=True)
class DenseValue:
    """A dense array of the exchange."""

    spec: TensorSpec
    op: ReduceOp = ReduceOp.SUM
    is_gradient: bool = True  # scaled by the weight of its rank, and its sum must be finite


@dataclass(frozen=True)
class Table:
    """A sparse gradient, which consists of rows of a variable."""

    name: str  # of the variable
    row_shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    index_dtype: np.dtype[np.generic]  # int32 or int64
    is_summed: bool = True  # rows with the same index; otherwise all rows of all ranks stay

    @property
    def width(self) -> int:
        """Number of values in a row."""
        return math.prod(self.row_shape)

    def __str__(self) -> str:
        kind = "sums of sparse rows" if self.is_summed else "sparse rows"
        row = list(self.row_shape)
        return f"{kind} of {row} {self.dtype.name}, {self.index_dtype.name} indices"


class Rows(NamedTuple):
    """Rows of all tables of one kind, table by table."""

    counts: Array  # integers of shape [tables], the number of rows of each table
    indices: Array  # index of each row in its table, of shape [n]
    values: Array  # of shape [n, width]


@dataclass
class Combined:
    """Result of an exchange, with the same bits on all ranks.

    Summed rows have ascending indices without repetition. Rows that are not summed are
    concatenated in rank order.
    """

    arrays: list[Array]
    rows: list[Rows]  # of each kind
    side_total: int  # sum of the side values of all ranks
    is_finite: bool = True  # all gradients


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
        self.stats = StepStats(1)  # the whole exchange is exposed
        self._lock = threading.Lock()

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
            self.stats.launched(0, begin_s)
            dense, rows = self._buffer.weighted(dense, rows, weight)
            packed = self._buffer.pack(side_value, dense, rows)
            communicator = self.communicator
            buffers = communicator.all_gather_bytes(packed)
            end_s = time.monotonic()
            self.stats.ring(0, begin_s, end_s)
            self.stats.waited(0, begin_s, end_s)
            result = self._buffer.combine([np.frombuffer(each, np.uint8) for each in buffers])
            self.nonfinite_check.check(
                CollectiveCall(communicator.channel, next(self._steps), name=communicator.name),
                result.is_finite,
                lambda: self._buffer.find_nonfinite(dense, rows),
                lambda: self._buffer.find_nonfinite(result.arrays, result.rows),
            )
            return result


class ExchangeBuffer:
    """Packs the values of one rank into a buffer, and combines the buffers of all ranks."""

    def __init__(self, dense: Sequence[DenseValue], tables: Sequence[Table]) -> None:
        if len(tables) > _MAX_TABLES:
            raise ConfigError(
                f"a step has {len(tables)} sparse gradients, wanted at most {_MAX_TABLES}. Make "
                "some of them dense with sparse_as_dense=True"
            )
        self._dense = tuple(dense)
        self._tables = tuple(tables)
        self._groups = _group([(v.spec.dtype.name, v.op, v.is_gradient) for v in self._dense])
        self.kinds = _group(  # indices of the tables of each kind of row
            [(t.dtype.name, t.width, t.index_dtype.name, t.is_summed) for t in self._tables]
        )

    def zeros(self) -> tuple[list[Array], list[Rows]]:
        """Returns dense arrays of zeros, and no rows of each kind."""
        dense = [np.zeros(value.spec.shape, value.spec.dtype) for value in self._dense]
        rows = []
        for tables in self.kinds:
            first, counts = self._tables[tables[0]], np.zeros(len(tables), np.int64)
            values = np.empty((0, first.width), first.dtype)
            rows.append(Rows(counts, np.empty(0, first.index_dtype), values))
        return dense, rows

    def weighted(
        self, dense: Sequence[Array], rows: Sequence[Rows], weight: float
    ) -> tuple[Sequence[Array], Sequence[Rows]]:
        """Multiplies the gradients by a weight; 0 also removes NaN, and all rows."""
        if weight == 1:
            return dense, rows
        arrays = [
            times(array, weight) if value.is_gradient else array
            for array, value in zip(dense, self._dense)
        ]
        if weight == 0:
            return arrays, [Rows(0 * c, i[:0], values[:0]) for c, i, values in rows]
        return arrays, [Rows(c, i, times(values, weight)) for c, i, values in rows]

    def pack(self, side_value: int, dense: Sequence[Array], rows: Sequence[Rows]) -> Array:
        """Packs the values of this rank into bytes [n]. Indices of rows may repeat."""
        keyed, sums = [], _SumsByKey(_ordered)
        for tables, each in zip(self.kinds, rows):
            keys, is_summed = self._keys(tables, each), self._tables[tables[0]].is_summed
            keyed.append(sums(keys, each.values) if is_summed else (keys, each.values))
        parts = [np.array([side_value, *(len(keys) for keys, _ in keyed)], np.int64)]
        parts += [
            np.concatenate([dense[index].reshape(-1) for index in group]) for group in self._groups
        ]
        parts += [part for keys_and_values in keyed for part in keys_and_values]
        sizes = [padded(part.nbytes, _ALIGNMENT_BYTES) for part in parts]
        buffer = np.empty(sum(sizes), np.uint8)
        start = 0
        for part, size in zip(parts, sizes):
            buffer[start : start + part.nbytes] = part.reshape(-1).view(np.uint8)
            start += size
        return buffer

    def combine(self, buffers: Sequence[Array]) -> Combined:
        """Reduces the buffers of all ranks, bytes [n] each, in rank order."""
        ranks = [_Reader(buffer) for buffer in buffers]
        headers = [reader.take(np.dtype(np.int64), 1 + len(self.kinds)) for reader in ranks]
        side_total = sum(int(header[0]) for header in headers)
        result = Combined([np.empty(0)] * len(self._dense), [], side_total)
        for group in self._groups:
            self._combine_arrays(group, ranks, result)
        sums = _SumsByKey(_merged)
        for index, tables in enumerate(self.kinds):
            counts = [int(header[1 + index]) for header in headers]
            result.rows.append(self._combine_rows(tables, ranks, counts, sums))
            result.is_finite = all_finite(result.rows[-1].values) and result.is_finite
        return result

    def find_nonfinite(self, dense: Sequence[Array], rows: Sequence[Rows]) -> dict[str, str]:
        """Returns "NaN" or "Inf" by name of its variable, for each gradient that holds one."""
        named = {v.spec.name: a for v, a in zip(self._dense, dense) if v.is_gradient}
        for tables, each in zip(self.kinds, rows):
            parts = np.split(each.values, np.cumsum(each.counts)[:-1])
            named.update((self._tables[table].name, part) for table, part in zip(tables, parts))
        return find_nonfinite(list(named), list(named.values()))

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

    def _combine_arrays(
        self, group: Sequence[int], ranks: Sequence[_Reader], result: Combined
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
            result.is_finite = all_finite(total) and result.is_finite
        for index, size, end in zip(group, sizes, itertools.accumulate(sizes)):
            result.arrays[index] = total[end - size : end].reshape(self._dense[index].spec.shape)

    def _combine_rows(
        self,
        tables: Sequence[int],
        ranks: Sequence[_Reader],
        counts: Sequence[int],
        sums: _SumsByKey,
    ) -> Rows:
        first = self._tables[tables[0]]
        parts = [
            (
                reader.take(np.dtype(np.int64), count),
                reader.take(first.dtype, count * first.width).reshape(count, first.width),
            )
            for reader, count in zip(ranks, counts)
        ]
        if first.is_summed:
            keys, values = sums(*(np.concatenate(each) for each in zip(*parts)))
        else:
            keys, values = _by_table(parts, len(tables))
        indices = (keys & _INDEX_MASK).astype(first.index_dtype, copy=False)
        return Rows(np.diff(_edges(keys, len(tables))), indices, values)


class _Reader:
    """Reads consecutive arrays from a buffer."""

    def __init__(self, buffer: Array) -> None:
        self._buffer = buffer
        self._start = 0

    def take(self, dtype: np.dtype[np.generic], length: int) -> Array:
        nbytes = length * dtype.itemsize
        part: Array = self._buffer[self._start : self._start + nbytes].view(dtype)
        self._start += padded(nbytes, _ALIGNMENT_BYTES)
        return part


def _group(kinds: Sequence[object]) -> list[list[int]]:
    """Returns the indices of equal kinds, in the order in which the kinds first occur."""
    groups: dict[object, list[int]] = {}
    for index, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(index)
    return list(groups.values())


def _by_table(parts: Sequence[tuple[Array, Array]], count: int) -> tuple[Array, Array]:
    """Joins the rows of the ranks, each sorted by table, to the rows of each of `count` tables."""
    edges = [_edges(keys, count) for keys, _ in parts]
    slices = [
        (part, slice(ends[table], ends[table + 1]))
        for table in range(count)
        for part, ends in zip(parts, edges)
    ]
    keys, values = (np.concatenate([part[i][each] for part, each in slices]) for i in (0, 1))
    return keys, values


def _edges(keys: Array, count: int) -> Array:
    """Returns the bounds of the rows of each table."""
    # keys need not be sorted within a table, as a later table has larger keys
    return np.searchsorted(keys, np.arange(count + 1) << _INDEX_BITS)


class _SumsByKey:
    """Sums rows by key, and sorts equal keys of consecutive kinds of rows once.

    The keys are equal if a model looks up the same ids in an embedding and in a linear part.
    """

    def __init__(self, order: Callable[[Array], Array]) -> None:
        self._given: Array | None = None
        self._order_of = order  # the positions of keys in ascending order, stable

    def __call__(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Returns each key once, in ascending order, and the sum of its rows."""
        if self._given is None or not np.array_equal(keys, self._given):
            self._given = keys
            self._sort(keys)
        values, starts = values.take(self._order, 0), self._starts
        repeats = len(keys) - len(starts)
        # values of two bytes are always added in pairs, as small values vanish in a large sum
        is_fast = len(starts) * values.shape[1] < _VALUES_PER_REPEAT * repeats
        if is_fast and values.itemsize > 2:
            return self._keys, np.add.reduceat(values, starts, axis=0)
        if repeats:
            _add_in_pairs(values, self._is_first, starts)
            values = values.take(starts, 0)
        return self._keys, values

    def _sort(self, keys: Array) -> None:
        self._order = self._order_of(keys)
        keys = keys.take(self._order)
        self._is_first = np.ones(len(keys), np.bool_)
        np.not_equal(keys[1:], keys[:-1], out=self._is_first[1:])
        self._starts = np.flatnonzero(self._is_first)
        self._keys = keys.take(self._starts)


def _merged(keys: Array) -> Array:
    """Returns the order of keys of a few parts, each in ascending order."""
    return np.argsort(keys, kind="stable")


def _ordered(keys: Array) -> Array:
    """Returns the order of any keys."""
    tables, indices = keys >> _INDEX_BITS, keys & _INDEX_MASK
    index_bits, position_bits = int(indices.max(initial=0)).bit_length(), len(keys).bit_length()
    if int(tables.max(initial=0)).bit_length() + index_bits + position_bits > 63:
        return np.argsort(keys, kind="stable")
    # NumPy sorts integers several times as fast as it sorts their positions
    order: Array = ((tables << index_bits | indices) << position_bits) | np.arange(len(keys))
    order.sort()
    order &= (1 << position_bits) - 1
    return order


def _add_in_pairs(values: Array, is_first: Array, starts: Array) -> None:
    """Adds the rows of each group to its first one: in pairs, then pairs of pairs, and so on."""
    rows, step = np.flatnonzero(~is_first), 1
    places = rows - starts.take(np.cumsum(is_first).take(rows) - 1)  # of the rows in their groups
    while len(rows):
        is_right = places & step != 0
        right = rows[is_right]
        values[right - step] += values.take(right, 0)
        rows, places, step = rows[~is_right], places[~is_right], 2 * step


def times(array: Array, weight: float) -> Array:
    """Multiplies an array by a weight; 0 also removes NaN."""
    if weight == 1:
        return array
    if weight == 0:
        return np.zeros_like(array)
    return np.asarray(array * array.dtype.type(weight))
