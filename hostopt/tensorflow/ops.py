"""Graph operations over a communicator: Python calls that TensorFlow runs on the host.

TensorFlow passes arrays in and out of `tf.numpy_function` without copying them. A call that waits
occupies one inter-op thread; those of one reducer are chained, so that they occupy one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from hostopt.bucket import TensorSpec, plan_buckets
from hostopt.communicator import Communicator, ReduceOp
from hostopt.errors import CollectiveMismatchError, ConfigError, HostOptError
from hostopt.finite import all_finite, troubles
from hostopt.inline_reducer import InlineReducer
from hostopt.nonfinite import NonFiniteCheck
from hostopt.posted_sum import open_posted_sum
from hostopt.reducer import Reducer
from hostopt.ring import Array, Operation

__all__: list[str] = []

HOST_DEVICE = "/device:CPU:0"


def all_reduce(
    tensor: tf.Tensor, communicator: Communicator, op: ReduceOp = ReduceOp.SUM, what: str = ""
) -> tf.Tensor:
    """Reduce one tensor over the ranks, while the graph waits.

    Args:
      tensor: tensor of any static shape, one of `hostopt.communicator.DTYPES`.
      communicator: all ranks build the same operations on it, in the same order.
      op: how to reduce.
      what: what is reduced, for warnings and errors.

    Returns:
      Tensor like `tensor`, on the host.
    """
    channel = communicator.duplicate(what or _name_on_all_ranks(tensor))
    return _array_op(
        communicator, lambda array: channel.all_reduce(array, op), tensor, "HostAllReduce"
    )


def _name_on_all_ranks(tensor: tf.Tensor) -> str:
    """A tensor's name without the numbers that depend on what else a rank's graph holds."""
    return re.sub(r"_\d+(?=/|$)", "", str(tensor.name).partition(":")[0])


_FLAG_BASE = 4096  # more than there are ranks; two such digits are exact in a float32


@dataclasses.dataclass
class Flags:
    """What a rank asks the others for between two steps; it travels with a posted number.

    Args:
      stop: this rank asks for a stop.
      save: this rank is about to save.
      ranks_stopping: how many ranks asked for a stop in the last step.
      ranks_saving: how many were about to save.
      travel: whether a number that carries the flags is posted in each step.
    """

    stop: bool = False
    save: bool = False
    ranks_stopping: int = 0
    ranks_saving: int = 0
    travel: bool = False

    @property
    def own(self) -> float:
        """This rank's flags as a number whose sum tells how many ranks have set each."""
        return float(self.stop + _FLAG_BASE * self.save)

    def agree(self, total: float) -> None:
        """Take in the sum of all ranks' flags."""
        self.ranks_saving, self.ranks_stopping = divmod(int(total), _FLAG_BASE)


def sum_posted(
    scalar: tf.Tensor, communicator: Communicator, after: Sequence[tf.Tensor], flags: Flags
) -> tf.Tensor:
    """Sum one number over the ranks, without making them wait for each other.

    Each rank posts its number when it has it, and reads the sum later on.

    Args:
      scalar: tensor of shape [], float32.
      communicator: all ranks build the same operations on it, in the same order.
      after: the sum is read when these have been computed, from all ranks.
      flags: travel with the number.

    Returns:
      Tensor of shape [], on the host.
    """
    posted = open_posted_sum(communicator, f"the sum of {_name_on_all_ranks(scalar)!r}")

    def post(value: Array) -> Any:
        posted.post(float(value), flags.own)
        return np.int32(0)

    def collect() -> Any:
        total, agreed = posted.collect()
        flags.agree(float(agreed))
        return total

    flags.travel = True

    with tf.device(HOST_DEVICE):
        token = tf.numpy_function(post, [scalar], tf.int32, name="HostPost")
        with tf.control_dependencies([token, *after]):
            call = telling(communicator, collect)
            result = tf.numpy_function(call, [], tf.float32, name="HostCollect")
    result.set_shape([])
    return result


def broadcast(
    tensor: tf.Tensor, communicator: Communicator, root: int = 0, what: str = ""
) -> tf.Tensor:
    """Give every rank the tensor of one, while the graph waits.

    Args:
      tensor: tensor of any static shape and fixed-size dtype.
      communicator: all ranks build the same operations on it, in the same order.
      root: rank whose values hold.
      what: what is sent, for warnings and errors.

    Returns:
      Tensor like `tensor`, on the host.
    """
    channel = communicator.duplicate(what or _name_on_all_ranks(tensor))
    return _array_op(
        communicator,
        # several in one graph: a root that waited for the others would keep a thread from them
        lambda array: channel.broadcast(array, root, acknowledged=False),
        tensor,
        "HostBroadcast",
    )


def sum_slices(
    slices: Sequence[tf.IndexedSlices],
    names: Sequence[str],
    communicator: Communicator,
    after: Sequence[tf.Tensor] = (),
    check: NonFiniteCheck | None = None,
) -> list[tf.IndexedSlices]:
    """Sum sparse gradients over the ranks: all rows travel to all ranks, duplicates are summed.

    Args:
      slices: gradients of which each rank has other rows, and another number of them. All ranks
        sum in rank 0's order.
      names: the names of their variables; the same on all ranks.
      communicator: all ranks build the same operations on it, in the same order.
      after: nothing is gathered before these have been computed; what waits for other ranks waits
        one after the other, so that it occupies one thread of TensorFlow.
      check: what follows where sums are not finite; by default what the option says.

    Returns:
      The sums on the host, each row once, in the order of their indices; the same bits on all
      ranks.

    Raises:
      CollectiveMismatchError: two ranks sum different gradients.
    """
    facts = [(name, _row_spec(each)) for each, name in zip(slices, names)]
    results: dict[int, tf.IndexedSlices] = {}
    before = list(after)
    check = check or NonFiniteCheck(communicator)
    for i in _order_of_rank_0(communicator, facts, {}):
        each = slices[i]
        channel = communicator.duplicate(f"the sparse gradient of {names[i]!r}")
        sum_rows = telling(communicator, _row_summer(channel, names[i], check))
        with tf.device(HOST_DEVICE), tf.control_dependencies(before):
            indices, values = tf.numpy_function(
                sum_rows,
                [each.indices, each.values],
                [each.indices.dtype, each.values.dtype],
                name="HostGatherSlices",
            )
        indices.set_shape([None])
        values.set_shape([None, *each.values.shape[1:]])
        results[i] = tf.IndexedSlices(values, indices, each.dense_shape)
        before = [values]
    return [results[i] for i in range(len(slices))]


def _row_spec(slices: tf.IndexedSlices) -> str:
    rows, indices = slices.values, slices.indices
    return f"sparse rows of {rows.shape[1:]} {rows.dtype.name}, {indices.dtype.name} indices"


def _row_summer(channel: Communicator, name: str, check: NonFiniteCheck) -> Callable[..., Any]:
    steps = itertools.count()

    def sum_rows(indices: Array, values: Array) -> tuple[Array, Array]:
        indices_of_sums, sums = _sum_rows(channel, indices, values)
        check.look(
            Operation(channel.channel, next(steps), what=channel.what),
            all_finite(sums),
            lambda: troubles([name], [values]),
            lambda: troubles([name], [sums]),
        )
        return indices_of_sums, sums

    return sum_rows


def _sum_rows(channel: Communicator, indices: Array, values: Array) -> tuple[Array, Array]:
    indices, values = _sum_duplicates(indices, values)  # what travels is each row once
    row_shape, row_bytes = values.shape[1:], math.prod(values.shape[1:]) * values.itemsize
    found = channel.all_gather_bytes(indices.tobytes() + values.tobytes())
    counts = [len(data) // (indices.itemsize + row_bytes) for data in found]
    return _sum_duplicates(
        np.concatenate([np.frombuffer(d, indices.dtype, n) for d, n in zip(found, counts)]),
        np.concatenate(
            [
                np.frombuffer(d, values.dtype, offset=n * indices.itemsize).reshape(n, *row_shape)
                for d, n in zip(found, counts)
            ]
        ),
    )


def _sum_duplicates(indices: Array, values: Array) -> tuple[Array, Array]:
    """Each index once, in order, with the sum of its rows in the order in which they came."""
    if not indices.size:
        return indices, values
    order = np.argsort(indices, kind="stable")
    unique, starts = np.unique(indices[order], return_index=True)
    return unique, np.add.reduceat(values[order], starts, axis=0)


def reduce_in_buckets(
    tensors: Sequence[tf.Tensor],
    names: Sequence[str],
    communicator: Communicator,
    weight: tf.Tensor | None = None,
    after: Sequence[tf.Tensor] = (),
    check: NonFiniteCheck | None = None,
) -> tuple[list[tf.Tensor], Reducer | InlineReducer | None]:
    """Sum gradients over the ranks, bucket by bucket, while the rest of the graph goes on.

    The numbers are those of the way of a gradient in docs/architecture.md.

    Args:
      tensors: gradients of static shape, in variable order. All ranks reduce in rank 0's order.
      names: the names of their variables; the same on all ranks.
      communicator: all ranks build the same operations on it, in the same order.
      weight: scalar of float64 by which this rank's gradients are multiplied, where it is not 1.
      after: the sums of earlier calls in this graph; what waits for other ranks waits one after
        the other, so that it occupies one thread of TensorFlow.
      check: what follows where sums are not finite; by default what the option says.

    Returns:
      The sums on the host, in the order of `tensors`, and the reducer, to be closed when the
      graph is done; None where there is one rank and nothing to reduce.

    Raises:
      CollectiveMismatchError: two ranks reduce different gradients.
    """
    with tf.device(HOST_DEVICE):
        arrived = [tf.identity(tensor) for tensor in tensors]  # 2. received on the host
    check = check or NonFiniteCheck(communicator)
    if communicator.size == 1:
        return _checked_alone(arrived, names, communicator, check), None
    specs = [_spec(tensor, name) for tensor, name in zip(tensors, names)]
    bucket_bytes = communicator.transport.options.bucket_bytes
    facts = [(spec.name, str(spec)) for spec in specs]
    order = _order_of_rank_0(communicator, facts, {"size of a bucket": f"{bucket_bytes} bytes"})
    buckets = plan_buckets([specs[i] for i in order], bucket_bytes)
    gradients = communicator.duplicate("gradients")
    reducer: Reducer | InlineReducer
    if communicator.on_one_host:
        reducer = InlineReducer(gradients, buckets, check)
        build = functools.partial(_reduce_inline, reducer, weight)
    else:
        reducer = Reducer(gradients, buckets, check)
        build = functools.partial(_launch_and_wait, reducer, weight)
    reduced: dict[int, tf.Tensor] = {}
    before = list(after)
    with tf.device(HOST_DEVICE), tf.name_scope("host_reduce"):
        for number, bucket in enumerate(buckets):
            # one after the other, in the order in which the ranks reduce
            parts = [order[i] for i in bucket.indices]
            results = build(number, [arrived[i] for i in parts], before)
            before = results[:1]
            for index, result in zip(parts, results):
                result.set_shape(arrived[index].shape)
                reduced[index] = result
    return [reduced[index] for index in range(len(arrived))], reducer


def _checked_alone(
    tensors: Sequence[tf.Tensor],
    names: Sequence[str],
    communicator: Communicator,
    check: NonFiniteCheck,
) -> list[tf.Tensor]:
    """With one rank nothing is reduced: TensorFlow looks at each gradient when it is there."""
    steps = itertools.count()

    def look(finite: Array) -> Any:
        found = {name: "NaN or Inf" for name, good in zip(names, finite) if not good}
        operation = Operation(0, next(steps), what="the gradients of one rank")
        check.look(operation, not found, lambda: found, lambda: found)
        return np.int32(0)

    with tf.device(HOST_DEVICE), tf.name_scope("host_check"):
        finite = [
            tf.reduce_all(tf.math.is_finite(tensor)) if tensor.dtype.is_floating else True
            for tensor in tensors
        ]
        token = tf.numpy_function(telling(communicator, look), [tf.stack(finite)], tf.int32)
        with tf.control_dependencies([token]):  # backward brings this one last
            return [tf.identity(tensors[0]), *tensors[1:]]


def _launch_and_wait(
    reducer: Reducer,
    weight: tf.Tensor | None,
    number: int,
    parts: Sequence[tf.Tensor],
    after: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """A communication thread reduces; the graph brings a bucket, and waits when it has waited."""
    communicator = reducer.communicator
    token = tf.numpy_function(  # 3. the last gradient of the bucket is there
        telling(communicator, _weighted(_launcher(reducer, number), weight)),
        [*parts, *_as_list(weight)],
        tf.int32,
        name=f"launch_{number}",
    )
    with tf.control_dependencies([token, *after]):  # 5.
        return list(
            tf.numpy_function(
                telling(communicator, lambda: reducer.wait(number)),
                [],
                [part.dtype for part in parts],
                name=f"wait_{number}",
            )
        )


def _reduce_inline(
    reducer: InlineReducer,
    weight: tf.Tensor | None,
    number: int,
    parts: Sequence[tf.Tensor],
    after: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """The graph's own thread reduces a bucket when it is full."""
    call = _weighted(lambda *arrays: reducer.reduce(number, arrays), weight)
    with tf.control_dependencies(after):
        return list(
            tf.numpy_function(  # 3. to 5. in one
                telling(reducer.communicator, call),
                [*parts, *_as_list(weight)],
                [part.dtype for part in parts],
                name=f"reduce_{number}",
            )
        )


def _as_list(weight: tf.Tensor | None) -> list[tf.Tensor]:
    return [] if weight is None else [weight]


def _weighted(call: Callable[..., Any], weight: tf.Tensor | None) -> Callable[..., Any]:
    """`call` of arrays that are multiplied by the last argument; 1 leaves them as they are."""
    if weight is None:
        return call

    def weigh(*arrays_and_weight: Array) -> Any:
        *arrays, factor = arrays_and_weight
        if factor == 0:  # NaN too
            arrays = [np.zeros_like(array) for array in arrays]
        elif factor != 1:
            arrays = [np.asarray(array * array.dtype.type(factor)) for array in arrays]
        return call(*arrays)

    return weigh


def _array_op(
    communicator: Communicator,
    function: Callable[[Array], Array],
    tensor: tf.Tensor,
    name: str,
) -> tf.Tensor:
    with tf.device(HOST_DEVICE):
        call = telling(communicator, function)
        result = tf.numpy_function(call, [tensor], tensor.dtype, name=name)
        result.set_shape(tensor.shape)
        return result


def telling(communicator: Communicator, function: Callable[..., Any]) -> Callable[..., Any]:
    """End the ring with a typed error that leaves a function: TensorFlow would drop its type.

    Args:
      communicator: whose ring.
      function: what a graph is to call.

    Returns:
      A function that does the same.
    """

    def call(*arrays: Array) -> Any:
        try:
            return function(*arrays)
        except HostOptError as error:
            communicator.abort(error)
            raise

    return call


_SAME_ON_ALL_RANKS = re.compile(
    r"(.*/)?(Host(AllFinite|AllReduce|Broadcast|GatherSlices)|host_reduce(_\d+)?/(wait|reduce))(_\d+)*$"
)


def is_same_on_all_ranks(op: tf.Operation) -> bool:
    """Whether an operation is one of these, whose results all ranks have alike.

    Args:
      op: an operation of a graph.

    Returns:
      True for a reduction or a broadcast.
    """
    return op.type == "PyFunc" and _SAME_ON_ALL_RANKS.match(op.name) is not None


def _launcher(reducer: Reducer, bucket: int) -> Callable[..., Any]:
    def launch(*arrays: Array) -> Any:
        reducer.launch(bucket, arrays)
        return np.int32(bucket)

    return launch


def _spec(tensor: tf.Tensor, name: str) -> TensorSpec:
    if not tensor.shape.is_fully_defined():
        raise ConfigError(
            f"the gradient of {name!r} has the shape {tensor.shape}, wanted a static one. Set the "
            "shape of the variable, or set_shape of the gradient"
        )
    return TensorSpec(name, tuple(tensor.shape.as_list()), np.dtype(tensor.dtype.as_numpy_dtype))


def _order_of_rank_0(
    communicator: Communicator, facts: Sequence[tuple[str, str]], settings: dict[str, str]
) -> list[int]:
    """Positions of this rank's gradients in the order of rank 0's, which must be the same ones."""
    names = [name for name, _ in facts]
    if len({*names}) < len(names):
        raise CollectiveMismatchError(
            f"the gradients to reduce name a variable twice: {sorted(names)}"
        )
    agreed = communicator.check_same({**settings, **dict(facts)}, "the gradients to reduce")
    return [names.index(name) for name in agreed if name not in settings]
