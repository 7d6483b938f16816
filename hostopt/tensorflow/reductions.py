"""Reduction of all tensors of a step: large gradients in buckets, the others in one exchange.

[G2] to [G5] are steps of "Path of a gradient" in docs/architecture.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hostopt.collectives.call import Array
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import DTYPES, ReduceOp
from hostopt.collectives.wire_format import WireFormat
from hostopt.errors import CollectiveMismatchError, ConfigError
from hostopt.gradients.bucket import TensorSpec, plan_buckets
from hostopt.gradients.fused_exchange import DenseValue, FusedExchange, Rows, Table, times
from hostopt.gradients.nonfinite import NonFiniteCheck
from hostopt.gradients.reducer import AnyReducer, BucketReducer, open_reducer
from hostopt.tensorflow._tf_private import call_python
from hostopt.tensorflow.background import HOST_DEVICE, abort_on_error, call_in_background, in_order
from hostopt.tensorflow.ops import StopSaveFlags, SumWithFlags, all_reduce

# A rank receives at most this many bytes of dense arrays in an exchange, which sends all arrays to
# all ranks. Larger ones are reduced in buckets, or in separate operations.
_SMALL_BYTES = 256 << 10


@dataclass(frozen=True, eq=False)
class Reduction:
    """A tensor of static shape, or a sparse gradient, that is to be reduced over the ranks."""

    value: tf.Tensor | tf.IndexedSlices
    name: str
    op: ReduceOp = ReduceOp.SUM  # of a tensor; sparse gradients are summed
    is_gradient: bool = True  # scaled by the weight of its rank, and its sum must be finite
    row_shape: tuple[int, ...] = ()  # of a sparse gradient
    sums_rows: bool = True  # of a sparse gradient that have the same index

    @property
    def is_sparse(self) -> bool:
        """True for a sparse gradient."""
        return isinstance(self.value, tf.IndexedSlices)

    def dense_value(self) -> DenseValue:
        """Returns the description of a dense tensor for the exchange."""
        self._check_dtype(self.value.dtype)
        return DenseValue(static_spec(self.value, self.name), self.op, self.is_gradient)

    def table(self) -> Table:
        """Returns the description of a sparse gradient for the exchange."""
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


def static_spec(tensor: tf.Tensor, name: str) -> TensorSpec:
    """Returns the spec of a tensor, whose shape must be static."""
    if not tensor.shape.is_fully_defined():
        raise ConfigError(
            f"the gradient of {name!r} has the shape {tensor.shape}, wanted a static one. Set the "
            "shape of the variable, or set_shape of the gradient"
        )
    return TensorSpec(name, tuple(tensor.shape.as_list()), _numpy(tensor.dtype))


def _numpy(dtype: tf.DType) -> np.dtype[Any]:
    result: np.dtype[Any] = np.dtype(dtype.as_numpy_dtype)
    return result


def reduce_tensors(
    reductions: Sequence[Reduction],
    communicator: Communicator,
    weight: tf.Tensor | None = None,
    nonfinite: str | None = None,
    flags: StopSaveFlags | None = None,
) -> tuple[list[Any], list[AnyReducer]]:
    """Reduces tensors that do not depend on each other, with few messages.

    Args:
      reductions: the tensors. All ranks reduce them in rank 0's order.
      weight: float64 scalar that multiplies this rank's gradients; None for 1.
      nonfinite: "error", "skip", "warn" or `ALLOW`, as for `NonFiniteCheck`.
      flags: flags that are summed along with the exchange, or with the scalar of a bucket.

    Returns:
      The results, in the order of `reductions`, and the reducers, which the caller must close
      after the last step.
    """
    ordered = _in_order_of_rank_0(reductions, communicator)
    bucket_bytes = _bucket_bytes(communicator)
    reducers = Reducers(communicator, bucket_bytes, nonfinite, flags=flags, weight=weight)
    results = dict(zip(ordered, reducers.reduce(ordered)))
    return [results[each] for each in reductions], reducers.opened


def reduce_in_buckets(
    tensors: Sequence[tf.Tensor],
    names: Sequence[str],
    communicator: Communicator,
    weight: tf.Tensor | None = None,
    check: NonFiniteCheck | None = None,
) -> tuple[list[tf.Tensor], BucketReducer | None]:
    """Sums gradients over the ranks in buckets, while backward computes other gradients.

    Args:
      tensors: gradients of static shape, in variable order. All ranks reduce in rank 0's order.
      names: names of their variables, the same on all ranks.
      communicator: communicator on which all ranks build the same operations in the same order.
      weight: float64 scalar that multiplies this rank's gradients; None for 1.
      check: check of the sums; by default one with the option `nonfinite`.

    Returns:
      The sums on the host, in the order of `tensors`, and the reducer, which the caller must close
      after the last step. The reducer is None if there is only one rank.

    Raises:
      ConfigError: the shape of a gradient is not static.
      CollectiveMismatchError: two ranks reduce different gradients.
    """
    if communicator.size == 1:
        return _receive_on_host(tensors), None
    gradients = [Reduction(tensor, name) for tensor, name in zip(tensors, names)]
    ordered = _in_order_of_rank_0(gradients, communicator)
    reducers = Reducers(communicator, _bucket_bytes(communicator), weight=weight)
    sums = dict(zip(ordered, reducers.reduce_in_buckets(ordered, check)))
    return [sums[each] for each in gradients], reducers.buckets


def _bucket_bytes(communicator: Communicator) -> int:
    return communicator.transport.options.bucket_bytes


def _in_order_of_rank_0(
    reductions: Sequence[Reduction], communicator: Communicator
) -> list[Reduction]:
    """Returns the tensors in the order in which all ranks reduce them, and must call this."""
    setting = {"size of a bucket": f"{_bucket_bytes(communicator)} bytes"}
    names = communicator.check_same({**setting, **describe(reductions)}, "the tensors to reduce")
    by_name = {each.name: each for each in reductions}
    return [by_name[name] for name in names if name not in setting]


def describe(reductions: Sequence[Reduction]) -> dict[str, str]:
    """Describes tensors by name, in their order; no two may have the same name."""
    counts = Counter(each.name for each in reductions)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise CollectiveMismatchError(
            f"the tensors to reduce have these names twice: {twice}. Give each variable or "
            "tensor its own name"
        )
    return {each.name: str(each) for each in reductions}


@dataclass
class Reducers:
    """Reducers of tensors, and the operations that call them.

    Repeated reductions are of the same tensors, and call the same reducers.
    """

    communicator: Communicator
    bucket_bytes: int
    nonfinite: str | None = None  # as for `NonFiniteCheck`
    wire_format: WireFormat | None = None  # in buckets; None for that of the option `compression`
    flags: StopSaveFlags | None = None  # see `reduce_tensors`
    weight: tf.Tensor | None = None  # float64 scalar that multiplies this rank's gradients
    buckets: Any = None  # reducer of buckets; None before one is needed
    exchange: Any = None  # reducer of all other tensors; None before one is needed

    @property
    def opened(self) -> list[Any]:
        """The reducers that have been needed."""
        return [each for each in (self.buckets, self.exchange) if each is not None]

    def reduce(self, reductions: Sequence[Reduction]) -> list[Any]:
        """Adds the operations that reduce tensors, which all ranks give in the same order."""
        parts = _split(reductions, self.communicator)
        results: dict[Reduction, Any] = {}
        if parts.in_buckets:
            scalars = parts.with_last_bucket
            sums = self.reduce_in_buckets(parts.in_buckets, scalars=scalars)
            results.update(zip([*parts.in_buckets, *scalars], sums))
        if parts.in_exchange:
            results.update(self._exchange(parts.in_exchange))
        for each in parts.separate:
            results[each] = all_reduce(each.value, self.communicator, each.op, each.name)
        return [results[each] for each in reductions]

    # -- calls of the reducers in a step -------------------------------------------------------

    def begin(self, bucket: int | None) -> None:
        """Begins the call for a bucket, or for the exchange if it is None."""

    def end(self, bucket: int | None) -> None:
        """Ends the call for a bucket, or for the exchange if it is None."""

    def launch(self, bucket: int, arrays: Sequence[Array]) -> None:
        """Launches a bucket; see `Reducer.launch`."""
        self.begin(bucket)
        self.buckets.launch(bucket, arrays)

    def wait(self, bucket: int) -> list[Array]:
        """Returns the sums of a bucket that is launched; see `Reducer.wait`."""
        sums: list[Array] = self.buckets.wait(bucket)
        self.end(bucket)
        return sums

    def sum_inline(self, bucket: int, arrays: Sequence[Array]) -> list[Array]:
        """Sums a bucket over the ranks of one host; see `InlineReducer.reduce`."""
        self.begin(bucket)
        sums: list[Array] = self.buckets.reduce(bucket, arrays)
        self.end(bucket)
        return sums

    def run_exchange(
        self, arrays: Sequence[Array], rows: Sequence[Rows], weight: float
    ) -> tuple[list[Array], list[Rows]]:
        """Reduces small tensors and sparse gradients; see `FusedExchange.run`."""
        self.begin(None)
        local = self.flags.local if self.flags else 0
        results = self.exchange.run(arrays, rows, weight, local)
        if self.flags:
            self.flags.set_total(results.side_total)
        self.end(None)
        return results.arrays, results.rows

    # -- large gradients in buckets ------------------------------------------------------------

    def reduce_in_buckets(
        self,
        gradients: Sequence[Reduction],
        check: NonFiniteCheck | None = None,
        scalars: Sequence[Reduction] = (),
    ) -> list[tf.Tensor]:
        """Adds the operations that sum dense gradients in buckets, and scalars with the last."""
        specs = [static_spec(each.value, each.name) for each in gradients]
        buckets = plan_buckets(specs, self.bucket_bytes, self.communicator.size)
        if self.buckets is None:
            check = check or NonFiniteCheck(self.communicator, self.nonfinite)
            self.buckets = open_reducer(self.communicator, buckets, check, self.wire_format)
        received = _receive_on_host([each.value for each in gradients])
        reduced: dict[int, tf.Tensor] = {}
        previous: list[tf.Tensor] = []
        first_launch: list[tf.Tensor] = []
        with tf.device(HOST_DEVICE), tf.name_scope("host_reduce"):
            for number, bucket in enumerate(buckets):
                values = [received[i] for i in bucket.indices]
                launch = None
                if not self.buckets.communicator.on_one_host:
                    # a session runs no launches whose sums are not fetched, and the first launch
                    # tells the reducer that the step before is over
                    with tf.control_dependencies(first_launch):
                        launch = self._launch_operation(number, values)
                    first_launch = first_launch or [launch]
                # chained, as all ranks must reduce the buckets in the same order
                with tf.control_dependencies(previous):
                    last = scalars if bucket is buckets[-1] else ()
                    results = self._sums_operation(number, values, launch, last)
                previous = results[:1]
                for index, result in zip(bucket.indices, results):
                    result.set_shape(received[index].shape)
                    reduced[index] = result
        totals = results[len(values) :]
        for total in totals:
            total.set_shape([])
        return [*(reduced[index] for index in range(len(received))), *totals]

    def _launch_operation(self, number: int, values: Sequence[tf.Tensor]) -> tf.Tensor:
        def launch(*arrays: Array) -> Any:
            self.launch(number, arrays)
            return [np.int32(number)]

        name, channel = f"launch_{number}", self.buckets.communicator
        call = abort_on_error(channel, self._weighted(launch))
        (token,) = in_order(  # [G3] runs when the last gradient of the bucket is received
            f"channel {channel.channel}: {name}",
            lambda *arrays: call_python(call, arrays, [tf.int32], name),
            [*values, *self._weights],
            [tf.int32],
        )
        return token

    def _sums_operation(
        self,
        number: int,
        values: Sequence[tf.Tensor],
        launch: tf.Tensor | None,
        scalars: Sequence[Reduction],
    ) -> list[tf.Tensor]:
        if launch is None:  # [G3] to [G5]
            name, inputs = f"reduce_{number}", [*values, *self._weights]
            call = self._weighted(lambda *arrays: self.sum_inline(number, arrays))
        else:  # [G5]
            name, inputs, call = f"wait_{number}", [launch], lambda _: self.wait(number)
        for each in scalars:
            inputs, call = [each.value, *inputs], self._with_scalar(call, each)
        channel = self.buckets.communicator
        dtypes = [each.dtype for each in [*values, *(scalar.value for scalar in scalars)]]
        call, order = abort_on_error(channel, call), f"channel {channel.channel}: {name}"
        return call_in_background(call, inputs, dtypes, name, order)

    @property
    def _weights(self) -> list[tf.Tensor]:
        return [] if self.weight is None else [self.weight]

    def _weighted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `call`: the last argument is a weight, which multiplies the other arguments."""
        if self.weight is None:
            return call

        def call_weighted(*arrays_and_weight: Array) -> Any:
            *arrays, factor = arrays_and_weight
            return call(*(times(array, float(factor)) for array in arrays))

        return call_weighted

    def _with_scalar(self, call: Callable[..., Any], scalar: Reduction) -> Callable[..., Any]:
        """Wraps `call`: the first argument is a scalar, whose result comes last."""
        flags = self.flags or StopSaveFlags()
        scalar_sum = SumWithFlags(self.communicator, scalar.name, flags)
        divisor = np.float32(self.communicator.size if scalar.op is ReduceOp.AVERAGE else 1)

        def call_with_scalar(value: Array, *arrays: Array) -> Any:
            scalar_sum.start(value)
            sums = call(*arrays)  # no rank ends it before all have started the other sum
            return [*sums, scalar_sum.wait() / divisor]

        return call_with_scalar

    # -- all other tensors in an exchange ------------------------------------------------------

    def _exchange(self, reductions: Sequence[Reduction]) -> dict[Reduction, Any]:
        arrays = [each for each in reductions if not each.is_sparse]
        slices = [each for each in reductions if each.is_sparse]
        if self.exchange is None:
            self.exchange = FusedExchange(
                self.communicator.duplicate("small tensors and sparse gradients"),
                [each.dense_value() for each in arrays],
                [each.table() for each in slices],
                # not that of the buckets: both may run at the same time
                NonFiniteCheck(self.communicator, self.nonfinite),
            )
        kinds = [[slices[table] for table in kind] for kind in self.exchange.kinds]
        with tf.device(HOST_DEVICE), tf.name_scope("host_exchange"):
            inputs = [each.value for each in arrays]
            inputs += [part for kind in kinds for part in _join(kind)]
            outputs = self._exchange_operation(inputs, len(arrays))
            results: dict[Reduction, Any] = dict(zip(arrays, outputs))
            for each in arrays:
                results[each].set_shape(each.value.shape)
            parts = outputs[len(arrays) :]
            for kind, counts, indices, values in zip(kinds, parts[::3], parts[1::3], parts[2::3]):
                results.update(_split_rows(kind, counts, indices, values))
        return results

    def _exchange_operation(self, inputs: Sequence[tf.Tensor], count: int) -> list[tf.Tensor]:
        is_weighted = self.weight is not None

        def run(*inputs: Array) -> list[Array]:  # arrays, rows of each kind, and a weight
            weight = float(inputs[-1]) if is_weighted else 1.0
            parts = inputs[count : len(inputs) - is_weighted]
            rows = [Rows(*each) for each in zip(parts[::3], parts[1::3], parts[2::3])]
            arrays, sums = self.run_exchange(inputs[:count], rows, weight)
            return [*arrays, *(part for each in sums for part in each)]

        channel = self.exchange.communicator
        return call_in_background(
            abort_on_error(channel, run),
            [*inputs, *self._weights],
            [each.dtype for each in inputs],
            name="HostExchange",
            order=f"channel {channel.channel}",
        )


def _receive_on_host(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """[G2] Receives each gradient on the host, as soon as it is computed."""
    with tf.device(HOST_DEVICE):
        return [tf.identity(tensor) for tensor in tensors]


def _join(kind: Sequence[Reduction]) -> Rows:
    indices = [each.value.indices for each in kind]
    values = [_reshape(each.value.values, [kind[0].table().width]) for each in kind]
    counts = tf.concat(tf.shape_n(indices, tf.int64), 0)
    return Rows(counts, tf.concat(indices, 0), tf.concat(values, 0))


def _split_rows(
    kind: Sequence[Reduction], counts: tf.Tensor, indices: tf.Tensor, values: tf.Tensor
) -> dict[Reduction, tf.IndexedSlices]:
    values.set_shape([None, kind[0].table().width])
    columns = tf.split(indices, counts, num=len(kind)), tf.split(values, counts, num=len(kind))
    return {
        each: tf.IndexedSlices(_reshape(rows, each.row_shape), row_indices, each.value.dense_shape)
        for each, row_indices, rows in zip(kind, *columns)
    }


def _reshape(rows: tf.Tensor, row_shape: Sequence[int]) -> tf.Tensor:
    if rows.shape[1:] == row_shape:
        return rows
    return tf.reshape(rows, [-1, *row_shape])


def can_join(
    scalar: Reduction, reductions: Sequence[Reduction], communicator: Communicator
) -> bool:
    """Returns True if `reduce_tensors` needs no message of its own for one more scalar."""
    parts = _split([*reductions, scalar], communicator)
    return bool(parts.with_last_bucket) or len(parts.in_exchange) > 1


class _Parts(NamedTuple):
    """Tensors by the way in which they are reduced."""

    in_exchange: list[Reduction]  # all others
    in_buckets: list[Reduction]  # dense gradients, if their total size is large
    with_last_bucket: list[Reduction]  # a scalar that alone would need an exchange
    separate: list[Reduction]  # large dense tensors that are no gradients


def _split(reductions: Sequence[Reduction], communicator: Communicator) -> _Parts:
    """Decides how each tensor is reduced."""
    limit = _SMALL_BYTES / max(1, communicator.size - 1)
    dense = [each for each in reductions if not each.is_sparse]
    nbytes = {each: static_spec(each.value, each.name).nbytes for each in dense}
    gradients = [each for each in dense if each.is_gradient]
    if sum(nbytes[each] for each in gradients) <= min(limit, _bucket_bytes(communicator)):
        gradients = []
    separate = [each for each in dense if not each.is_gradient and nbytes[each] > limit]
    large = {*gradients, *separate}
    others = [each for each in reductions if each not in large]
    # beyond one host a scalar should be on its way while backward runs
    if communicator.on_one_host and gradients and len(others) == 1 and _is_scalar(others[0]):
        return _Parts([], gradients, others, separate)
    return _Parts(others, gradients, [], separate)


def _is_scalar(reduction: Reduction) -> bool:
    """Returns True for a sum or a mean that `SumWithFlags` can compute."""
    return (
        not reduction.is_sparse
        and reduction.op in (ReduceOp.SUM, ReduceOp.AVERAGE)
        and reduction.value.dtype == tf.float32
        and reduction.value.shape.rank == 0
    )
