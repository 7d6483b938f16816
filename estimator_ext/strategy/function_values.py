"""Values that ranks reduce, gather and broadcast in functions of TensorFlow 2 and eagerly.

The ranks match calls by name, as a rank may trace a function earlier than others, or more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext.variables.desync import checksum
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.process_ring import ProcessRing
from hostopt.tensorflow.background import HOST_DEVICE
from hostopt.tensorflow.calls import broadcast_values, call, call_name, gather_rows
from hostopt.tensorflow.differentiable import reduce_tensors

_ASSIGNED = "the values that are assigned outside strategy.run"


def all_reduce(ring: ProcessRing, tensors: Sequence[tf.Tensor], is_mean: bool) -> list[tf.Tensor]:
    """Reduces tensors over the ranks together. The gradient is reduced in the same way.

    Returns:
      The results, on the host. The mean of integers is of a floating dtype.
    """
    name = call_name("all_reduce", None, tensors[0])
    with tf.device(HOST_DEVICE):
        results = reduce_tensors(ring, tensors, ReduceOp.SUM, None, name)
        # named for `is_same_on_all_ranks`: TensorFlow gives the results the inputs as inputs too
        sums = [tf.identity(each, name="HostReduced") for each in results]
        return [tf.math.divide(each, ring.size) for each in sums] if is_mean else sums


def all_gather(ring: ProcessRing, tensor: tf.Tensor, axis: int) -> tf.Tensor:
    """Joins the tensors of all ranks along an axis, without a gradient."""
    with tf.device(HOST_DEVICE):
        tensor = tf.experimental.numpy.moveaxis(tensor, axis, 0) if axis else tensor
        rows = gather_rows(ring, tensor, call_name("all_gather", None, tensor))
        return tf.experimental.numpy.moveaxis(rows, 0, axis) if axis else rows


def broadcast(ring: ProcessRing, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Sends the tensor of rank 0 to all ranks."""
    with tf.device(HOST_DEVICE):
        return broadcast_values(ring, [tensor], 0, name)[0]


def compared(ring: ProcessRing, value: Any, variable: str) -> Any:
    """Compares a value that is assigned to a variable between the ranks."""
    if isinstance(value, tf.IndexedSlices):
        parts = compared(ring, value.values, variable), compared(ring, value.indices, variable)
        return tf.IndexedSlices(*parts, value.dense_shape)
    if value.dtype in (tf.string, tf.resource, tf.variant):
        return value

    def compare(array: Any) -> list[Any]:
        text = f"variable {variable!r} with the checksum {checksum(array):08x}"
        texts = ring.named.all_gather_bytes(text.encode(), _ASSIGNED)
        if len({*texts}) > 1:
            shown = ", ".join(f"rank {i}: {each.decode()}" for i, each in enumerate(texts))
            raise hostopt.CollectiveMismatchError(
                f"the ranks assign different values outside strategy.run ({shown}). Assign the "
                "same values in the same order on all ranks, such as those of a file or a seed"
            )
        return [array]

    with tf.device(HOST_DEVICE):
        outputs = [(value.dtype, value.shape)]
        (result,) = call(compare, [value], outputs, "HostCompared", _ASSIGNED, ring.communicator)
        return result
