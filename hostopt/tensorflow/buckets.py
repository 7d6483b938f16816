"""Gradients fused into buckets: the graph that feeds a reducer, and takes the sums from it.

The numbers are those of the way of a gradient in docs/architecture.md.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable, Union

import numpy as np
import tensorflow as tf

from hostopt.bucket import TensorSpec, plan_buckets
from hostopt.communicator import Communicator
from hostopt.errors import CollectiveMismatchError, ConfigError
from hostopt.inline_reducer import InlineReducer
from hostopt.nonfinite import NonFiniteCheck
from hostopt.reducer import Reducer
from hostopt.ring import Array
from hostopt.tensorflow.background import HOST_DEVICE, abort_on_error, call_in_background

__all__: list[str] = []

BucketReducer = Union[Reducer, InlineReducer]


def reduce_in_buckets(
    tensors: Sequence[tf.Tensor],
    names: Sequence[str],
    communicator: Communicator,
    weight: tf.Tensor | None = None,
    check: NonFiniteCheck | None = None,
) -> tuple[list[tf.Tensor], BucketReducer | None]:
    """Sums gradients over the ranks, bucket by bucket, while the rest of the graph goes on.

    Args:
      tensors: gradients of static shape, in variable order. All ranks reduce in rank 0's order.
      names: the names of their variables; the same on all ranks.
      communicator: all ranks build the same operations on it, in the same order.
      weight: scalar of float64 by which this rank's gradients are multiplied, if it is not 1.
      check: what follows if sums are not finite; by default what the option says.

    Returns:
      The sums on the host, in the order of `tensors`, and the reducer, to be closed when the
      graph is done; None if there is one rank and nothing to reduce.

    Raises:
      ConfigError: the shape of a gradient is not static.
      CollectiveMismatchError: two ranks reduce different gradients.
    """
    if communicator.size == 1:
        return receive_on_host(tensors), None
    specs = [static_spec(tensor, name) for tensor, name in zip(tensors, names)]
    bucket_bytes = communicator.transport.options.bucket_bytes
    facts = [(spec.name, str(spec)) for spec in specs]
    order = order_of_rank_0(communicator, facts, {"size of a bucket": f"{bucket_bytes} bytes"})
    sums, reducer = build_buckets(
        [tensors[i] for i in order], [specs[i] for i in order], communicator, weight, check
    )
    reduced = dict(zip(order, sums))
    return [reduced[i] for i in range(len(tensors))], reducer


def build_buckets(
    tensors: Sequence[tf.Tensor],
    specs: Sequence[TensorSpec],
    communicator: Communicator,
    weight: tf.Tensor | None,
    check: NonFiniteCheck | None,
) -> tuple[list[tf.Tensor], BucketReducer]:
    """`reduce_in_buckets` of gradients that all ranks have in the same order.

    Args:
      tensors: gradients.
      specs: their names, shapes and dtypes.
      communicator: of two ranks at least.
      weight: as for `reduce_in_buckets`.
      check: as for `reduce_in_buckets`.

    Returns:
      The sums on the host, and the reducer.
    """
    arrived = receive_on_host(tensors)
    check = check or NonFiniteCheck(communicator)
    buckets = plan_buckets(specs, communicator.transport.options.bucket_bytes)
    gradients = communicator.duplicate("gradients")
    reducer: BucketReducer
    if communicator.on_one_host:
        reducer = InlineReducer(gradients, buckets, check)
        build = functools.partial(_reduce_inline, reducer, weight)
    else:
        reducer = Reducer(gradients, buckets, check)
        build = functools.partial(_launch_and_wait, reducer, weight)
    reduced: dict[int, tf.Tensor] = {}
    before: list[tf.Tensor] = []
    with tf.device(HOST_DEVICE), tf.name_scope("host_reduce"):
        for number, bucket in enumerate(buckets):
            # one after the other, in the order in which the ranks reduce
            results = build(number, [arrived[i] for i in bucket.indices], before)
            before = results[:1]
            for index, result in zip(bucket.indices, results):
                result.set_shape(arrived[index].shape)
                reduced[index] = result
    return [reduced[index] for index in range(len(arrived))], reducer


def receive_on_host(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """2. Receives each gradient on the host, the moment it exists."""
    with tf.device(HOST_DEVICE):
        return [tf.identity(tensor) for tensor in tensors]


def static_spec(tensor: tf.Tensor, name: str) -> TensorSpec:
    """Describes a tensor of static shape.

    Args:
      tensor: the tensor.
      name: what it is called on all ranks.

    Returns:
      Its name, shape and dtype.

    Raises:
      ConfigError: its shape is not static.
    """
    if not tensor.shape.is_fully_defined():
        raise ConfigError(
            f"the gradient of {name!r} has the shape {tensor.shape}, wanted a static one. Set the "
            "shape of the variable, or set_shape of the gradient"
        )
    return TensorSpec(name, tuple(tensor.shape.as_list()), np.dtype(tensor.dtype.as_numpy_dtype))


def order_of_rank_0(
    communicator: Communicator, facts: Sequence[tuple[str, str]], settings: dict[str, str]
) -> list[int]:
    """Finds the order in which all ranks reduce; all of them call this together.

    Args:
      communicator: reaches all ranks.
      facts: name and description of each tensor of this rank.
      settings: what else must be the same.

    Returns:
      Positions of this rank's tensors, in the order in which rank 0 has those of these names.

    Raises:
      CollectiveMismatchError: a name occurs twice, or two ranks have different tensors.
    """
    names = [name for name, _ in facts]
    if len({*names}) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CollectiveMismatchError(
            f"the tensors to reduce have these names twice: {twice}. Give each its own name"
        )
    agreed = communicator.check_same({**settings, **dict(facts)}, "the tensors to reduce")
    return [names.index(name) for name in agreed if name not in settings]


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
        abort_on_error(communicator, _weighted(_launcher(reducer, number), weight)),
        [*parts, *_as_list(weight)],
        tf.int32,
        name=f"launch_{number}",
    )
    with tf.control_dependencies(after):  # 5.
        return call_in_background(
            abort_on_error(communicator, lambda _: reducer.wait(number)),
            [token],
            [part.dtype for part in parts],
            name=f"wait_{number}",
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
        return call_in_background(  # 3. to 5. in one
            abort_on_error(reducer.communicator, call),
            [*parts, *_as_list(weight)],
            [part.dtype for part in parts],
            name=f"reduce_{number}",
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


def _launcher(reducer: Reducer, bucket: int) -> Callable[..., Any]:
    def launch(*arrays: Array) -> Any:
        reducer.launch(bucket, arrays)
        return np.int32(bucket)

    return launch
