"""Python calls in a graph that may wait for other ranks without holding a thread of TensorFlow.

`tf.numpy_function` runs in a thread of the inter-op pool, and keeps it while it waits. With as
many waiting calls as the pool has threads, nothing else of the step runs, and ranks that wait for
each other wait for ever. TensorFlow has kernels that hold no such thread; the one that takes the
only element out of a dataset has a thread of its own. So a call that waits becomes the mapping
function of a dataset of one element. Any number of them can wait at the same time, in a pool of
any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from hostopt.communicator import Communicator
from hostopt.errors import HostOptError
from hostopt.ring import Array

__all__: list[str] = []

HOST_DEVICE = "/device:CPU:0"
_UNKNOWN = tf.TensorShape(None)


def call_in_background(
    function: Callable[..., Any],
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    name: str,
) -> list[tf.Tensor]:
    """Adds a call of a Python function that may wait, in a thread of its own.

    Arrays are passed in and out without copying, as `tf.numpy_function` does.

    Args:
      function: takes an array for each input, and returns a list of an array for each dtype.
      inputs: tensors, of one at least.
      dtypes: dtypes of the results, of one at least.
      name: name of the operation.

    Returns:
      The results, on the host; their shapes are not known.
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
            use_inter_op_parallelism=False,  # in the thread of the kernel below
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
    """Ends the ring with the typed error that leaves a function: TensorFlow would drop its type.

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
