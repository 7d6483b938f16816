"""All-reduce with the arguments of Horovod and SageMaker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import ConfigError
from hostopt.process_ring import ProcessRing
from hostopt.tensorflow.calls import call_name, calling, reduce_values, scale
from hostopt.tensorflow.collectives import allgather
from hostopt.tensorflow.compression import Compression, wire_format_of
from hostopt.tensorflow.reduced import mark
from hostopt.tensorflow.refusals import choose_op
from hostopt.tensorflow.sparse import sum_rows


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = None,
    ignore_name_scope: bool = False,
    param_index: int | None = None,
    num_params: int | None = None,
) -> Any:
    """Reduces a tensor over the ranks.

    Its gradient is reduced in the same way.

    Args:
      tensor: tensor, variable, array or `tf.IndexedSlices`, whose dtype is one of `DTYPES`. Rows
        of `tf.IndexedSlices` with the same index are summed before they travel.
      average: False for op=SUM, True for op=AVERAGE; give `op` or this.
      device_dense: must be empty, as reductions run on the host.
      device_sparse: must be empty.
      compression: `Compression.fp16` or `Compression.bf16` sends float32 with 16 bits.
      op: the operator, AVERAGE by default. `tf.IndexedSlices` need SUM or AVERAGE.
      prescale_factor: the tensor is multiplied by it first.
      postscale_factor: the result is multiplied by it.
      name: name of the call, the same on all ranks; by default made from the tensor's name in a
        graph. Eager calls without a name are matched in their order.
      process_set: must be None or `global_process_set`.
      ignore_name_scope: accepted for programs of Horovod, without effect on a name that is given.
      param_index: accepted for SageMaker's programs, without effect.
      num_params: accepted for SageMaker's programs, without effect.

    Returns:
      The result, on the host.

    Raises:
      ConfigError: an argument or the dtype is not supported, or `init` was not called.
    """
    del ignore_name_scope, param_index, num_params
    return grouped_allreduce(
        [tensor],
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        name=name,
    )[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduces tensors over the ranks together; see `allreduce` for the arguments.

    Args:
      tensors: the tensors, the same number on all ranks.

    Returns:
      The results, in the same order.
    """
    del ignore_name_scope
    values = [
        each if isinstance(each, (tf.Tensor, tf.IndexedSlices)) else tf.convert_to_tensor(each)
        for each in tensors
    ]
    slices = [i for i, each in enumerate(values) if isinstance(each, tf.IndexedSlices)]
    dense = [i for i in range(len(values)) if i not in slices]
    results = list(values)
    unsupported = process_set, device_dense, device_sparse
    if dense:
        name_of_dense = call_name("allreduce", name, values[dense[0]])
        with calling(name_of_dense, *unsupported) as ring:
            scaled = [scale(values[i], prescale_factor) for i in dense]
            operator = choose_op(op, average)
            reduced = _reduce_compressed(ring, scaled, operator, compression, name_of_dense)
            for i, each in zip(dense, reduced):
                results[i] = scale(each, postscale_factor)
    for i in slices:
        name_of_rows = call_name("allreduce", name and f"{name}_{i}", values[i].values)
        with calling(f"{name_of_rows}_values", *unsupported) as ring:
            factor, operator = prescale_factor * postscale_factor, choose_op(op, average)
            results[i] = _reduce_slices(ring, values[i], operator, factor, name_of_rows)
    mark(results)
    return results


def oob_allreduce(
    tensor: Any, compression: Any = Compression.none, op: ReduceOp = ReduceOp.AVERAGE
) -> tf.Tensor:
    """Reduces a tensor that is not a gradient, as SageMaker names it; see `allreduce`."""
    return allreduce(tensor, compression=compression, op=op)


def _reduce_compressed(
    ring: ProcessRing, tensors: Sequence[tf.Tensor], op: ReduceOp, compression: Any, name: str
) -> list[tf.Tensor]:
    wire_format = wire_format_of(compression)
    if wire_format is not None:
        return reduce_values(ring, tensors, op, wire_format, name)
    pairs = [compression.compress(each) for each in tensors]
    reduced = reduce_values(ring, [each for each, _ in pairs], op, None, name)
    return [compression.decompress(each, context) for each, (_, context) in zip(reduced, pairs)]


def _reduce_slices(
    ring: ProcessRing, slices: tf.IndexedSlices, op: ReduceOp, factor: float, name: str
) -> tf.IndexedSlices:
    """Joins the rows of all ranks, after rows of this rank with the same index are summed."""
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ConfigError(
            f"tf.IndexedSlices cannot be reduced with {op.name}. Use SUM or AVERAGE, or convert "
            "them with tf.convert_to_tensor"
        )
    if op is ReduceOp.AVERAGE:
        factor /= ring.size
    if factor != 1.0 and not slices.dtype.is_floating:
        raise ConfigError(
            f"rows of dtype {slices.dtype.name} are to be multiplied by {factor:g}, each by "
            "itself. Reduce them with SUM, or convert them with tf.convert_to_tensor"
        )
    slices = sum_rows(slices)
    rows = scale(allgather(slices.values, f"{name}_values"), factor)
    return tf.IndexedSlices(rows, allgather(slices.indices, f"{name}_indices"), slices.dense_shape)
