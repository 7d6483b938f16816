"""All-reduce and scaling of tensors, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hostopt.collectives.reduce_op import ReduceOp, check_dtype
from hostopt.errors import ConfigError
from hostopt.process_ring import ProcessRing
from hostopt.tensorflow.calls import call, numbered, with_gradient


def reduce_tensors(
    ring: ProcessRing,
    tensors: Sequence[tf.Tensor],
    op: ReduceOp,
    wire_format: str | None,
    name: str,
) -> list[tf.Tensor]:
    """Reduces tensors over the ranks; their gradients are reduced in the same way.

    Args:
      tensors: tensors of the dtypes in `DTYPES`.
      wire_format: "fp16", "bf16" or None, as for `NamedCollectives.all_reduce`.

    Raises:
      ConfigError: a dtype cannot be reduced.
    """
    for each in tensors:
        check_dtype(np.dtype(each.dtype.as_numpy_dtype))

    def reduce(*values: tf.Tensor) -> Any:
        results = call(
            lambda *arrays: ring.named.all_reduce(arrays, name, op, wire_format),
            values,
            [(value.dtype, value.shape) for value in values],
            "HostAllReduce",
            name,
            ring.communicator,
        )

        def gradient(*upstream: tf.Tensor) -> Any:
            if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
                raise ConfigError(
                    f"the result of allreduce with {op.name} has no gradient. Use SUM or AVERAGE, "
                    "or tf.stop_gradient"
                )
            gradient_name = numbered(f"{name}_gradient")
            return reduce_tensors(ring, upstream, op, wire_format, gradient_name)

        return results, gradient

    return list(with_gradient(reduce, *tensors))


def scale(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Multiplies a tensor by a number.

    Args:
      tensor: tensor; its dtype must be floating or an integer unless the factor is 1.

    Returns:
      The product, which is computed in float32 or better and rounded once; that of integers is
      computed in float64 and truncated. The tensor itself if the factor is 1.

    Raises:
      ConfigError: the dtype is neither floating nor an integer.
    """
    if factor == 1.0:
        return tensor
    dtype = tensor.dtype
    if not (dtype.is_floating or dtype.is_integer):
        raise ConfigError(
            f"a tensor of dtype {dtype.name} is to be multiplied by {factor:g}. Cast it to a "
            "floating dtype, or leave the factor out"
        )
    wide = tf.float64 if dtype.is_integer else tf.float32 if dtype.size < 4 else dtype
    return tf.cast(tf.cast(tensor, wide) * tf.constant(float(factor), wide), dtype)
