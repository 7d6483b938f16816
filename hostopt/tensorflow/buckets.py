"""Graph operations that reduce gradients in buckets.

[G2] to [G5] are steps of "Path of a gradient" in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from hostopt.collectives.call import Array
from hostopt.collectives.communicator import Communicator
from hostopt.errors import CollectiveMismatchError, ConfigError
from hostopt.gradients.bucket import Bucket, TensorSpec, plan_buckets
from hostopt.gradients.bucket_reducer import BucketReducer, InlineReducer
from hostopt.gradients.nonfinite import NonFiniteCheck
from hostopt.gradients.reducer import Reducer, open_reducer
from hostopt.tensorflow.background import (
    HOST_DEVICE,
    abort_on_error,
    call_in_background,
    in_order,
)


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
        return receive_on_host(tensors), None
    specs = [static_spec(tensor, name) for tensor, name in zip(tensors, names)]
    bucket_bytes = communicator.transport.options.bucket_bytes
    descriptions = [(spec.name, str(spec)) for spec in specs]
    order = order_of_rank_0(
        communicator, descriptions, {"size of a bucket": f"{bucket_bytes} bytes"}
    )
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
    """Builds `reduce_in_buckets` for gradients that all ranks have in the same order.

    Args:
      specs: their names, shapes and dtypes.
      communicator: communicator of at least two ranks.

    Returns:
      The sums on the host, and the reducer.
    """
    buckets = plan_buckets(specs, communicator.transport.options.bucket_bytes)
    reducer = open_reducer(communicator, buckets, check)
    return reduce_planned(tensors, buckets, reducer, weight), reducer


def reduce_planned(
    tensors: Sequence[tf.Tensor],
    buckets: Sequence[Bucket],
    reducer: Any,
    weight: tf.Tensor | None = None,
) -> list[tf.Tensor]:
    """Adds the operations that reduce gradients with a reducer.

    Args:
      buckets: the buckets that they are assigned to.
      reducer: an `InlineReducer` if all ranks share memory, else a `Reducer`; or what opens one.

    Returns:
      The sums on the host, in the order of `tensors`.
    """
    received = receive_on_host(tensors)
    reduced: dict[int, tf.Tensor] = {}
    previous: list[tf.Tensor] = []
    first_launch: list[tf.Tensor] = []
    with tf.device(HOST_DEVICE), tf.name_scope("host_reduce"):
        for number, bucket in enumerate(buckets):
            gradients = [received[i] for i in bucket.indices]
            # chained, as all ranks must reduce the buckets in the same order
            if reducer.communicator.on_one_host:
                results = _reduce_inline(reducer, weight, number, gradients, previous)
            else:
                # a session runs no launches whose sums are not fetched, and the first launch tells
                # the reducer that the step before is over
                with tf.control_dependencies(first_launch):
                    launch = _launch(reducer, weight, number, gradients)
                first_launch = first_launch or [launch]
                results = _wait(reducer, number, launch, gradients, previous)
            previous = results[:1]
            for index, result in zip(bucket.indices, results):
                result.set_shape(received[index].shape)
                reduced[index] = result
    return [reduced[index] for index in range(len(received))]


def receive_on_host(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """[G2] Receives each gradient on the host, as soon as it is computed."""
    with tf.device(HOST_DEVICE):
        return [tf.identity(tensor) for tensor in tensors]


def static_spec(tensor: tf.Tensor, name: str) -> TensorSpec:
    """Returns the spec of a tensor of static shape.

    Args:
      name: its name on all ranks.

    Returns:
      Its name, shape and dtype.

    Raises:
      ConfigError: the shape is not static.
    """
    if not tensor.shape.is_fully_defined():
        raise ConfigError(
            f"the gradient of {name!r} has the shape {tensor.shape}, wanted a static one. Set the "
            "shape of the variable, or set_shape of the gradient"
        )
    return TensorSpec(name, tuple(tensor.shape.as_list()), np.dtype(tensor.dtype.as_numpy_dtype))


def order_of_rank_0(
    communicator: Communicator, descriptions: Sequence[tuple[str, str]], settings: dict[str, str]
) -> list[int]:
    """Returns the order in which all ranks reduce their tensors.

    Collective: all ranks must call it.

    Args:
      descriptions: name and description of each tensor of this rank.
      settings: other values, by name, that must be the same on all ranks.

    Returns:
      Indices of this rank's tensors, in the order in which rank 0 has the same names.

    Raises:
      CollectiveMismatchError: a name occurs twice, or two ranks have different tensors.
    """
    names = [name for name, _ in descriptions]
    if len({*names}) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CollectiveMismatchError(
            f"the tensors to reduce have these names twice: {twice}. Give each its own name"
        )
    names_of_rank_0 = communicator.check_same(
        {**settings, **dict(descriptions)}, "the tensors to reduce"
    )
    return [names.index(name) for name in names_of_rank_0 if name not in settings]


def _launch(
    reducer: Reducer, weight: tf.Tensor | None, number: int, gradients: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Adds an operation that launches a bucket."""
    launch = abort_on_error(reducer.communicator, _weighted(_launcher(reducer, number), weight))
    (token,) = in_order(  # [G3] runs when the last gradient of the bucket is received
        _order(reducer, f"launch_{number}"),
        lambda *arrays: [tf.numpy_function(launch, arrays, tf.int32, name=f"launch_{number}")],
        [*gradients, *_as_list(weight)],
        [tf.int32],
    )
    return token


def _wait(
    reducer: Reducer,
    number: int,
    launch: tf.Tensor,
    gradients: Sequence[tf.Tensor],
    previous: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Adds an operation that waits for a bucket, after the previous one."""
    with tf.control_dependencies(previous):  # [G5]
        return call_in_background(
            abort_on_error(reducer.communicator, lambda _: reducer.wait(number)),
            [launch],
            [gradient.dtype for gradient in gradients],
            name=f"wait_{number}",
            order=_order(reducer, f"wait_{number}"),
        )


def _reduce_inline(
    reducer: InlineReducer,
    weight: tf.Tensor | None,
    number: int,
    gradients: Sequence[tf.Tensor],
    previous: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Adds an operation that reduces a bucket, after the previous one."""
    call = _weighted(lambda *arrays: reducer.reduce(number, arrays), weight)
    with tf.control_dependencies(previous):
        return call_in_background(  # [G3] to [G5]
            abort_on_error(reducer.communicator, call),
            [*gradients, *_as_list(weight)],
            [gradient.dtype for gradient in gradients],
            name=f"reduce_{number}",
            order=_order(reducer, f"reduce_{number}"),
        )


def _order(reducer: Any, call: str) -> str:
    """Returns the key of the operations that make the same call of a reducer in each step."""
    return f"channel {reducer.communicator.channel}: {call}"


def _as_list(weight: tf.Tensor | None) -> list[tf.Tensor]:
    return [] if weight is None else [weight]


def _weighted(call: Callable[..., Any], weight: tf.Tensor | None) -> Callable[..., Any]:
    """Wraps `call`: the last argument is a weight, which multiplies the other arguments."""
    if weight is None:
        return call

    def call_weighted(*arrays_and_weight: Array) -> Any:
        *arrays, factor = arrays_and_weight
        if factor == 0:  # also removes NaN
            arrays = [np.zeros_like(array) for array in arrays]
        elif factor != 1:
            arrays = [np.asarray(array * array.dtype.type(factor)) for array in arrays]
        return call(*arrays)

    return call_weighted


def _launcher(reducer: Reducer, bucket: int) -> Callable[..., Any]:
    def launch(*arrays: Array) -> Any:
        reducer.launch(bucket, arrays)
        return np.int32(bucket)

    return launch
