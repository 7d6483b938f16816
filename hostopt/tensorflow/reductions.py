"""All reductions of a graph that can be made together: buckets, and one exchange for the rest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

import numpy as np
import tensorflow as tf

from hostopt.communicator import DTYPES, Communicator, ReduceOp
from hostopt.errors import ConfigError
from hostopt.fused_exchange import DenseValue, FusedExchange, Rows, SideValue, Table
from hostopt.nonfinite import NonFiniteCheck
from hostopt.ring import Array, Operation
from hostopt.tensorflow.background import HOST_DEVICE, abort_on_error, call_in_background
from hostopt.tensorflow.buckets import (
    BucketReducer,
    build_buckets,
    order_of_rank_0,
    static_spec,
)
from hostopt.tensorflow.ops import all_reduce

__all__: list[str] = []

# What a rank may receive of the dense arrays of an exchange, as all of them travel to all ranks;
# more than that is reduced in buckets, or by itself.
_SMALL_BYTES = 256 << 10

AnyReducer = Union[BucketReducer, FusedExchange]


@dataclass(frozen=True, eq=False)
class Reduction:
    """A tensor of this rank that is reduced over the ranks.

    Args:
      value: tensor of static shape, or sparse gradient.
      name: what all ranks call it; of a gradient, the name of its variable.
      op: how a tensor is reduced; sparse gradients are summed.
      is_gradient: True if it counts by the weight of this rank, and must be finite.
      row_shape: of a sparse gradient, the shape of one row.
      sums_rows: of a sparse gradient, whether rows of one index become one row.
    """

    value: tf.Tensor | tf.IndexedSlices
    name: str
    op: ReduceOp = ReduceOp.SUM
    is_gradient: bool = True
    row_shape: tuple[int, ...] = ()
    sums_rows: bool = True

    @property
    def is_sparse(self) -> bool:
        """True for a sparse gradient."""
        return isinstance(self.value, tf.IndexedSlices)

    def dense_value(self) -> DenseValue:
        """Describes a tensor for the exchange.

        Returns:
          Name, shape and dtype.

        Raises:
          ConfigError: the shape is not static, or the dtype cannot be reduced.
        """
        self._check_dtype(self.value.dtype)
        return DenseValue(static_spec(self.value, self.name), self.op, self.is_gradient)

    def table(self) -> Table:
        """Describes a sparse gradient for the exchange.

        Returns:
          Name, shape of a row and dtypes.

        Raises:
          ConfigError: the dtype cannot be reduced.
        """
        values, indices = self.value.values.dtype, self.value.indices.dtype
        self._check_dtype(values)
        return Table(self.name, self.row_shape, _numpy(values), _numpy(indices), self.sums_rows)

    def _check_dtype(self, dtype: tf.DType) -> None:
        if dtype.name not in DTYPES:
            raise ConfigError(
                f"{self.name!r} is of dtype {dtype.name}, which cannot be reduced, wanted one of "
                f"{', '.join(DTYPES)}. Cast it first"
            )

    def __str__(self) -> str:
        if self.is_sparse:
            return str(self.table())
        spec = self.dense_value().spec
        return str(spec) if self.is_gradient else f"{self.op.value} of {spec}"


def reduce_together(
    reductions: Sequence[Reduction],
    communicator: Communicator,
    weight: tf.Tensor | None = None,
    nonfinite: str | None = None,
    side_value: SideValue | None = None,
) -> tuple[list[Any], list[AnyReducer]]:
    """Reduces tensors that do not depend on each other, with as few exchanges as possible.

    Large dense gradients go through buckets while backward goes on, and a large tensor that is no
    gradient is reduced by itself. Sparse gradients and small tensors share one exchange.

    Args:
      reductions: what to reduce. All ranks reduce in rank 0's order.
      communicator: all ranks build the same operations on it, in the same order.
      weight: scalar of float64 by which this rank's gradients are multiplied, if it is not 1.
      nonfinite: what follows if sums of gradients are not finite; by default what the option says.
      side_value: a number that travels with the exchange, if there is one.

    Returns:
      The results, in the order of `reductions`, and what reduces, to be closed when the graph is
      done.

    Raises:
      ConfigError: a tensor has no static shape, or a dtype that cannot be reduced.
      CollectiveMismatchError: two ranks reduce different tensors.
    """
    facts = [(each.name, str(each)) for each in reductions]
    bucket_bytes = communicator.transport.options.bucket_bytes
    order = order_of_rank_0(communicator, facts, {"size of a bucket": f"{bucket_bytes} bytes"})
    parts = _split([reductions[i] for i in order], communicator)
    results: dict[Reduction, Any] = {}
    reducers: list[AnyReducer] = []
    if parts.in_buckets:
        check = NonFiniteCheck(communicator, nonfinite)
        specs = [static_spec(each.value, each.name) for each in parts.in_buckets]
        tensors = [each.value for each in parts.in_buckets]
        sums, reducer = build_buckets(tensors, specs, communicator, weight, check)
        results.update(zip(parts.in_buckets, sums))
        reducers.append(reducer)
    if parts.together:
        # a check of its own: both may find something at the same time
        check = NonFiniteCheck(communicator, nonfinite)
        found, exchange = _exchange(parts.together, communicator, weight, check, side_value)
        results.update(zip(parts.together, found))
        reducers.append(exchange)
    for each in parts.alone:
        results[each] = all_reduce(each.value, communicator, each.op, each.name)
    return [results[each] for each in reductions], reducers


def share_an_exchange(reductions: Sequence[Reduction], communicator: Communicator) -> bool:
    """Whether there is an exchange among what reduces these tensors.

    Args:
      reductions: what to reduce.
      communicator: with which.

    Returns:
      False if all of them are large and dense.
    """
    return bool(_split(reductions, communicator).together)


class _Parts(NamedTuple):
    """Reductions by how they are made.

    Args:
      together: share an exchange.
      in_buckets: dense gradients that are large together.
      alone: other dense tensors that are large.
    """

    together: list[Reduction]
    in_buckets: list[Reduction]
    alone: list[Reduction]


def _split(reductions: Sequence[Reduction], communicator: Communicator) -> _Parts:
    limit = _SMALL_BYTES / max(1, communicator.size - 1)
    dense = [each for each in reductions if not each.is_sparse]
    nbytes = {each: static_spec(each.value, each.name).nbytes for each in dense}
    gradients = [each for each in dense if each.is_gradient]
    if sum(nbytes[each] for each in gradients) <= min(
        limit, communicator.transport.options.bucket_bytes
    ):
        gradients = []
    alone = [each for each in dense if not each.is_gradient and nbytes[each] > limit]
    apart = {*gradients, *alone}
    return _Parts([each for each in reductions if each not in apart], gradients, alone)


def _exchange(
    reductions: Sequence[Reduction],
    communicator: Communicator,
    weight: tf.Tensor | None,
    check: NonFiniteCheck,
    side_value: SideValue | None,
) -> tuple[list[Any], FusedExchange]:
    arrays = [each for each in reductions if not each.is_sparse]
    slices = [each for each in reductions if each.is_sparse]
    exchange = FusedExchange(
        communicator.duplicate("small tensors and sparse gradients"),
        [each.dense_value() for each in arrays],
        [each.table() for each in slices],
        check,
        side_value,
    )
    kinds = [[slices[table] for table in kind] for kind in exchange.kinds]
    with tf.device(HOST_DEVICE), tf.name_scope("host_exchange"):
        inputs = [each.value for each in arrays]
        inputs += [part for kind in kinds for part in _join(kind)]
        outputs = call_in_background(
            abort_on_error(communicator, _runner(exchange, len(arrays), weight is not None)),
            [*inputs, *([] if weight is None else [weight])],
            [each.dtype for each in inputs],
            name="HostExchange",
        )
        results: dict[Reduction, Any] = dict(zip(arrays, outputs))
        for each in arrays:
            results[each].set_shape(each.value.shape)
        parts = outputs[len(arrays) :]
        for kind, counts, indices, values in zip(kinds, parts[::3], parts[1::3], parts[2::3]):
            results.update(_split_rows(kind, counts, indices, values))
    return [results[each] for each in reductions], exchange


def _join(kind: Sequence[Reduction]) -> Rows:
    """The rows of sparse gradients, one after the other."""
    indices = [each.value.indices for each in kind]
    values = [_reshape(each.value.values, [kind[0].table().width]) for each in kind]
    counts = tf.concat(tf.shape_n(indices, tf.int64), 0)
    return Rows(counts, tf.concat(indices, 0), tf.concat(values, 0))


def _split_rows(
    kind: Sequence[Reduction], counts: tf.Tensor, indices: tf.Tensor, values: tf.Tensor
) -> dict[Reduction, tf.IndexedSlices]:
    """The sums of the rows of each sparse gradient."""
    values.set_shape([None, kind[0].table().width])
    columns = tf.split(indices, counts, num=len(kind)), tf.split(values, counts, num=len(kind))
    return {
        each: tf.IndexedSlices(_reshape(rows, each.row_shape), own, each.value.dense_shape)
        for each, own, rows in zip(kind, *columns)
    }


def _reshape(rows: tf.Tensor, row_shape: Sequence[int]) -> tf.Tensor:
    """Rows of another shape."""
    if rows.shape[1:] == row_shape:
        return rows
    return tf.reshape(rows, [-1, *row_shape])


def _runner(exchange: FusedExchange, count: int, is_weighted: bool) -> Any:
    """The function that the graph calls: dense arrays, rows of each kind, a weight."""

    def run(*inputs: Array) -> list[Array]:
        weight = float(inputs[-1]) if is_weighted else 1.0
        parts = inputs[count : len(inputs) - is_weighted]
        rows = [Rows(*each) for each in zip(parts[::3], parts[1::3], parts[2::3])]
        arrays, sums = exchange.run(inputs[:count], rows, weight)
        return [*arrays, *(part for each in sums for part in each)]

    return run


def _numpy(dtype: tf.DType) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(dtype.as_numpy_dtype)
    return found


def check_gradients(
    values: Sequence[Any],
    names: Sequence[str],
    communicator: Communicator,
    check: NonFiniteCheck,
) -> list[Any]:
    """Checks the gradients of a single rank, for which nothing is reduced.

    Args:
      values: tensors and sparse gradients.
      names: the names of their variables.
      communicator: of one rank.
      check: what follows if they are not finite.

    Returns:
      The same gradients; the first one is there only when all have been checked.
    """
    steps = itertools.count()

    def look(finite: Array) -> Any:
        found = {name: "NaN or Inf" for name, good in zip(names, finite) if not good}
        call = Operation(0, next(steps), what="the gradients of one rank")
        check.look(call, not found, lambda: found, lambda: found)
        return np.int32(0)

    first, *rest = values
    with tf.device(HOST_DEVICE), tf.name_scope("host_check"):
        finite = [_is_finite(getattr(value, "values", value)) for value in values]
        token = tf.numpy_function(abort_on_error(communicator, look), [tf.stack(finite)], tf.int32)
        with tf.control_dependencies([token]):  # backward brings this one last
            if isinstance(first, tf.IndexedSlices):
                rows = tf.identity(first.values)
                return [tf.IndexedSlices(rows, first.indices, first.dense_shape), *rest]
            return [tf.identity(first), *rest]


def _is_finite(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(tensor)) if tensor.dtype.is_floating else True
