"""Graph operations that reduce gradients in buckets.

[G2] to [G5] are steps of "Path of a gradient" in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from hostopt.collectives.call import Array
from hostopt.errors import ConfigError
from hostopt.gradients.bucket import Bucket, TensorSpec
from hostopt.gradients.exchange_buffer import times
from hostopt.gradients.reducer import Reducer
from hostopt.tensorflow.background import HOST_DEVICE, abort_on_error, call_in_background, in_order


def reduce_planned(
    tensors: Sequence[tf.Tensor],
    buckets: Sequence[Bucket],
    reducer: Any,
    weight: tf.Tensor | None = None,
) -> list[tf.Tensor]:
    """Adds the operations that reduce gradients with an `InlineReducer` or a `Reducer`."""
    received = receive_on_host(tensors)
    reduced: dict[int, tf.Tensor] = {}
    previous: list[tf.Tensor] = []
    first_launch: list[tf.Tensor] = []
    with tf.device(HOST_DEVICE), tf.name_scope("host_reduce"):
        for number, bucket in enumerate(buckets):
            gradients = [received[i] for i in bucket.indices]
            launch = None
            if not reducer.communicator.on_one_host:
                # a session runs no launches whose sums are not fetched, and the first launch tells
                # the reducer that the step before is over
                with tf.control_dependencies(first_launch):
                    launch = _launch(reducer, weight, number, gradients)
                first_launch = first_launch or [launch]
            # chained, as all ranks must reduce the buckets in the same order
            with tf.control_dependencies(previous):
                results = _sums(reducer, weight, number, gradients, launch)
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
    """Returns the spec of a tensor, whose shape must be static."""
    if not tensor.shape.is_fully_defined():
        raise ConfigError(
            f"the gradient of {name!r} has the shape {tensor.shape}, wanted a static one. Set the "
            "shape of the variable, or set_shape of the gradient"
        )
    return TensorSpec(name, tuple(tensor.shape.as_list()), np.dtype(tensor.dtype.as_numpy_dtype))


def _launch(
    reducer: Reducer, weight: tf.Tensor | None, number: int, gradients: Sequence[tf.Tensor]
) -> tf.Tensor:
    def launch(*arrays: Array) -> Any:
        reducer.launch(number, arrays)
        return np.int32(number)

    name = f"launch_{number}"
    call = abort_on_error(reducer.communicator, _weighted(launch, weight))
    (token,) = in_order(  # [G3] runs when the last gradient of the bucket is received
        _order(reducer, name),
        lambda *arrays: [tf.numpy_function(call, arrays, tf.int32, name=name)],
        [*gradients, *_as_list(weight)],
        [tf.int32],
    )
    return token


def _sums(
    reducer: Any,
    weight: tf.Tensor | None,
    number: int,
    gradients: Sequence[tf.Tensor],
    launch: tf.Tensor | None,
) -> list[tf.Tensor]:
    """Adds the operation that returns the sums of a bucket; without a launch it reduces them."""
    if launch is None:  # [G3] to [G5]
        name, inputs = f"reduce_{number}", [*gradients, *_as_list(weight)]
        call = _weighted(lambda *arrays: reducer.reduce(number, arrays), weight)
    else:  # [G5]
        name, inputs, call = f"wait_{number}", [launch], lambda _: reducer.wait(number)
    return call_in_background(
        abort_on_error(reducer.communicator, call),
        inputs,
        [gradient.dtype for gradient in gradients],
        name,
        _order(reducer, name),
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
        return call(*(times(array, float(factor)) for array in arrays))

    return call_weighted
