"""Collectives over tensors, with the names and gradients that programs for Horovod expect.

They work in graphs, in functions and eagerly. The ranks match calls by name, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hostopt.collectives.call import Array
from hostopt.collectives.reduce_op import ReduceOp, check_dtype
from hostopt.collectives.ring_schedule import chunk_slices
from hostopt.errors import ConfigError
from hostopt.process_ring import ProcessRing
from hostopt.tensorflow.calls import (
    broadcast_values,
    call,
    call_name,
    calling,
    gather_rows,
    numbered,
    reduce_values,
    scale,
    shape_of_rows,
    with_gradient,
)
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

    All ranks give the same number of tensors, and get the results in their order.
    """
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


def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = None
) -> tf.Tensor:
    """Joins the tensors of all ranks along the first dimension.

    Its gradient is the sum of the ranks' gradients of this rank's rows.

    Args:
      tensor: tensor of at least one dimension, the first of which may differ between ranks.
      name, ignore_name_scope, process_set: as for `allreduce`.

    Returns:
      The rows of all ranks, in rank order.

    Raises:
      ConfigError: the tensor is a scalar, or an argument is not supported.
    """
    tensor = tf.convert_to_tensor(tensor)
    name = call_name("allgather", name, tensor)
    with calling(name, process_set) as ring:

        def gradient(_: Any, upstream: tf.Tensor) -> tf.Tensor:
            gradient_name = numbered(f"{name}_gradient")
            (total,) = reduce_values(ring, [upstream], ReduceOp.SUM, None, gradient_name)
            rows = tf.shape(tensor)[:1]
            counts = gather_rows(ring, rows, numbered(f"{name}_rows"), [1] * ring.size)
            begin = tf.reduce_sum(counts[: ring.rank])
            return total[begin : begin + rows[0]]

        return with_gradient(lambda value: gather_rows(ring, value, name), gradient, tensor)


def broadcast(
    tensor: Any,
    root_rank: int = 0,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = None,
) -> tf.Tensor:
    """Sends the tensor of one rank to all ranks.

    Its gradient is the sum of the ranks' gradients on rank `root_rank`, and 0 on the others.

    Args:
      tensor: tensor of any shape and fixed-size dtype, the same shape on all ranks.
      root_rank: rank whose values are sent.
      name, ignore_name_scope, process_set: as for `allreduce`.

    Returns:
      The tensor of rank `root_rank`.

    Raises:
      ConfigError: `root_rank` is not a rank, or an argument is not supported.
    """
    tensor = tf.convert_to_tensor(tensor)
    name = call_name("broadcast", name, tensor)
    with calling(name, process_set) as ring:
        check_root(root_rank, ring.size)

        def send(value: tf.Tensor) -> tf.Tensor:
            return broadcast_values(ring, [value], root_rank, name)[0]

        def gradient(_: Any, upstream: tf.Tensor) -> tf.Tensor:
            gradient_name = numbered(f"{name}_gradient")

            def sum_on_root(array: Array) -> list[Array]:
                (total,) = ring.named.all_reduce([array], gradient_name)
                # a zero that TensorFlow computed itself would let it leave out the call
                return [total if ring.rank == root_rank else np.zeros_like(total)]

            output = upstream.dtype, upstream.shape
            return call(sum_on_root, [upstream], [output], "HostAllReduce", gradient_name)[0]

        return with_gradient(send, gradient, tensor)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    name: str | None = None,
    process_set: Any = None,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces a tensor over the ranks. Each rank gets a part of the rows.

    Its gradient is the gradients of all ranks, joined.

    Args:
      tensor: tensor of at least one dimension, the same shape on all ranks.
      device_dense: must be empty.
      compression: a compressor of the program converts the tensor. `Compression.fp16` and
        `Compression.bf16` have no effect here: the rows travel unchanged.
      op: SUM or AVERAGE, which is the default.
      name, process_set, ignore_name_scope, prescale_factor, postscale_factor: as for `allreduce`.

    Returns:
      The rows of this rank. The first ranks get one row more if they cannot be divided evenly.

    Raises:
      ConfigError: the tensor is a scalar, or an argument is not supported.
    """
    tensor = tf.convert_to_tensor(tensor)
    name = call_name("reducescatter", name, tensor)
    with calling(name, process_set, device_dense) as ring:
        op = choose_op(op, None)
        if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise ConfigError(f"reducescatter has the operator {op.name}. Use SUM or AVERAGE")
        if wire_format_of(compression) is not None:
            compression = Compression.none
        tensor, context = compression.compress(tensor)
        check_dtype(np.dtype(tensor.dtype.as_numpy_dtype))
        rows = _scatter(ring, scale(tensor, prescale_factor), op, name)
        return scale(compression.decompress(rows, context), postscale_factor)


def _scatter(ring: ProcessRing, tensor: tf.Tensor, op: ReduceOp, name: str) -> tf.Tensor:
    def scatter(value: tf.Tensor) -> tf.Tensor:
        def run(array: Array) -> list[Array]:
            return [ring.named.reduce_scatter(array, name, op)]

        output = value.dtype, shape_of_rows(value)
        return call(run, [value], [output], "HostReduceScatter", name)[0]

    def gradient(_: Any, upstream: tf.Tensor) -> tf.Tensor:
        gradient_name = numbered(f"{name}_gradient")

        def gather(array: Array, total: Array) -> list[Array]:
            counts = [part.stop - part.start for part in chunk_slices(int(total), ring.size)]
            return [ring.named.all_gather(array, gradient_name, counts)]

        inputs, output = [upstream, tf.shape(tensor)[0]], (upstream.dtype, tensor.shape)
        (rows,) = call(gather, inputs, [output], "HostAllGather", gradient_name)
        return scale(rows, 1 / ring.size if op is ReduceOp.AVERAGE else 1.0)

    return with_gradient(scatter, gradient, tensor)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = None,
) -> Any:
    """Sends a part of the rows of each rank to each rank.

    Its gradient sends the parts back.

    Args:
      tensor: tensor of at least one dimension.
      splits: number of rows for each rank; None divides the rows evenly.
      name, ignore_name_scope, process_set: as for `allreduce`.

    Returns:
      The rows that this rank has received, in rank order; with `splits` also their number by
      rank, int32 [size].

    Raises:
      ConfigError: the rows cannot be divided like this.
    """
    tensor = tf.convert_to_tensor(tensor)
    name = call_name("alltoall", name, tensor)
    with calling(name, process_set) as ring:
        if tensor.shape.rank == 0:
            raise ConfigError(
                "alltoall has a scalar, wanted a tensor with rows. Reshape it to [1]"
            )
        if splits is None:
            split_sizes = tf.fill([ring.size], tf.shape(tensor)[0] // ring.size)
        else:
            splits = tf.convert_to_tensor(splits)
            if not splits.dtype.is_integer or splits.shape.rank not in (None, 1):
                raise ConfigError(
                    f"alltoall has splits of dtype {splits.dtype.name} and shape {splits.shape}, "
                    f"wanted integers of shape [{ring.size}]. Give the number of rows for each "
                    "rank"
                )
            split_sizes = tf.cast(splits, tf.int32)
        result, received = _exchange(ring, tensor, split_sizes, name)
        return result if splits is None else (result, received)


def _exchange(ring: ProcessRing, tensor: tf.Tensor, split_sizes: tf.Tensor, name: str) -> Any:
    shape = shape_of_rows(tensor)

    def exchange(value: tf.Tensor, sizes: tf.Tensor, call_name_: str) -> list[tf.Tensor]:
        def run(array: Any, counts: Any) -> list[Any]:
            result, received = ring.named.all_to_all(array, counts.tolist(), call_name_)
            return [result, received.astype(np.int32)]

        outputs = [(value.dtype, shape), (tf.int32, [ring.size])]
        return call(run, [value, sizes], outputs, "HostAllToAll", call_name_)

    def gradient(results: Sequence[tf.Tensor], upstream: tf.Tensor, _: Any) -> Any:
        _, received = results
        return exchange(upstream, received, numbered(f"{name}_gradient"))[0], None

    return with_gradient(
        lambda value, sizes: exchange(value, sizes, name), gradient, tensor, split_sizes
    )


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = None,
) -> list[tf.Tensor]:
    """Gathers tensors, the same number on all ranks; see `allgather` for the arguments."""
    name = call_name("grouped_allgather", name)
    return [
        allgather(each, f"{name}_{i}", process_set=process_set) for i, each in enumerate(tensors)
    ]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Reduces tensors, the same number on all ranks; see `reducescatter` for the arguments."""
    name = call_name("grouped_reducescatter", name)
    return [
        reducescatter(
            each,
            device_dense,
            compression,
            op,
            f"{name}_{i}",
            process_set,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        for i, each in enumerate(tensors)
    ]


def barrier(process_set: Any = None, name: str | None = None) -> Any:
    """Waits until every rank has called this; see `allreduce` for the arguments.

    Returns:
      In a graph the operation that waits; None if called eagerly.
    """
    name = call_name("barrier", name)
    with calling(name, process_set) as ring:

        def wait(*_: Any) -> list[Any]:
            ring.named.barrier(name)
            return [np.zeros([], np.int32)]

        (done,) = call(wait, [], [(tf.int32, [])], "HostBarrier", name)
        return None if tf.executing_eagerly() else done.op


def check_root(root_rank: int, size: int) -> None:
    """Raises ConfigError unless `root_rank` is a rank."""
    if not 0 <= root_rank < size:
        raise ConfigError(f"root_rank is {root_rank}, wanted a rank from 0 to {size - 1}")
