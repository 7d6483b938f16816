"""Graph operations that call Python functions which may block, without blocking a pool thread.

`tf.numpy_function` runs on a thread of the inter-op pool, and blocks that thread while it waits.
With as many waiting calls as the pool has threads, no other operation of the step can run, and
ranks that wait for each other deadlock. Asynchronous kernels do not block pool threads: the kernel
`DatasetToSingleElement` runs on a separate thread. A function that may block is therefore the
map function of a dataset with one element. Any number of such calls can wait at the same time, in
a pool of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from hostopt.collectives.call import Array
from hostopt.communicator import Communicator
from hostopt.errors import HostOptError

__all__: list[str] = []

HOST_DEVICE = "/device:CPU:0"
_UNKNOWN = tf.TensorShape(None)


def call_in_background(
    function: Callable[..., Any],
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    name: str,
) -> list[tf.Tensor]:
    """Adds an operation that calls a Python function on a separate thread.

    Arrays are passed without copying, as in `tf.numpy_function`.

    Args:
      function: takes one array per input, and returns a list with one array per dtype.
      inputs: input tensors, at least one.
      dtypes: dtypes of the results, at least one.
      name: name of the operation.

    Returns:
      The results, on the host, with unknown shapes.
    """
    with tf.device(HOST_DEVICE):
        single = tf.raw_ops.TensorDataset(
            components=list(inputs), output_shapes=[each.shape for each in inputs]
        )
        shapes = [_UNKNOWN] * len(dtypes)
        mapped = tf.raw_ops.MapDataset(
            input_dataset=single,
            other_arguments=[],
            f=_as_graph_function(function, inputs, dtypes),
            output_types=list(dtypes),
            output_shapes=shapes,
            use_inter_op_parallelism=False,  # on the thread of the kernel below
        )
        return list(
            tf.raw_ops.DatasetToSingleElement(
                dataset=mapped, output_types=list(dtypes), output_shapes=shapes, name=name
            )
        )


def _as_graph_function(
    function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]
) -> Any:
    signature = [tf.TensorSpec(each.shape, each.dtype) for each in inputs]

    def call(*arguments: tf.Tensor) -> Any:
        return tf.numpy_function(function, arguments, list(dtypes))

    built = tf.function(call, input_signature=signature, autograph=False)
    return built.get_concrete_function()


def abort_on_error(communicator: Communicator, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that a graph calls: a HostOptError aborts the ring before it is re-raised.

    TensorFlow reports the error as text only, so this is the last place that knows its type. The
    ring is aborted by the code that first raises inside a collective, and otherwise here, in the
    thread of the reducer, or when a communicator is left by an exception.

    Args:
      communicator: communicator whose ring is aborted.
      function: the function.

    Returns:
      A function with the same arguments and results.
    """

    def call(*arrays: Array) -> Any:
        try:
            return function(*arrays)
        except HostOptError as error:
            communicator.abort(error)
            raise

    return call
