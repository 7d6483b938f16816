"""Graph operations that call Python functions which may block, without blocking a pool thread.

With as many waiting calls as TensorFlow's pool has threads, no other operation of the step could
run, and ranks that wait for each other would deadlock. "Threads" in docs/architecture.md describes
the way around it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from hostopt.collectives.call import Array
from hostopt.collectives.communicator import Communicator
from hostopt.errors import HostOptError
from hostopt.tensorflow._tf_private import call_python, is_gradient_of_control_flow

HOST_DEVICE = "/device:CPU:0"
_UNKNOWN = tf.TensorShape(None)


def call_in_background(
    function: Callable[..., Any],
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    name: str,
    order: str = "",
) -> list[tf.Tensor]:
    """Adds an operation that calls a Python function on a separate thread.

    Arrays are passed without copying.

    Args:
      function: takes one array per input, and returns a list with one array per dtype.
      inputs: at least one.

    Returns:
      The results, on the host, with unknown shapes.
    """

    def call(*arguments: tf.Tensor) -> Any:
        return call_python(function, arguments, dtypes)

    def in_background(*arguments: tf.Tensor) -> list[tf.Tensor]:
        single = tf.raw_ops.TensorDataset(
            components=list(arguments), output_shapes=[each.shape for each in inputs]
        )
        shapes = [_UNKNOWN] * len(dtypes)
        mapped = tf.raw_ops.MapDataset(
            input_dataset=single,
            other_arguments=[],
            f=_as_graph_function(call, inputs),
            output_types=list(dtypes),
            output_shapes=shapes,
            use_inter_op_parallelism=False,  # on the thread of the kernel below
        )
        return list(
            tf.raw_ops.DatasetToSingleElement(
                dataset=mapped, output_types=list(dtypes), output_shapes=shapes, name=name
            )
        )

    return in_order(order, in_background, inputs, dtypes)


def in_order(
    order: str,
    build: Callable[..., Sequence[tf.Tensor]],
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
) -> list[tf.Tensor]:
    """Adds stateful operations on the host, which run in the order of those with the same key.

    In a `tf.function`, TensorFlow runs stateful operations one after another, in the order in
    which they were built, so a collective would wait for all earlier ones. Operations that use
    different resources do not wait for each other. So each key has a resource of its own.

    Args:
      order: the key; "" for the order of all other stateful operations.
    """
    graph = tf.compat.v1.get_default_graph()
    # the gradient of tf.cond or tf.while_loop cannot have a resource that the loop does not have
    is_in_function = graph.building_function and not is_gradient_of_control_flow(graph)
    with tf.device(HOST_DEVICE):
        if not (order and is_in_function and tf.compat.v1.executing_eagerly_outside_functions()):
            return list(build(*inputs))
        arguments = [_resource(order), *inputs]

        def call(handle: tf.Tensor, *tensors: tf.Tensor) -> Sequence[tf.Tensor]:
            # the handle is only an input
            return build(*tensors)

        function = _as_graph_function(call, arguments)
        return list(tf.raw_ops.StatefulPartitionedCall(args=arguments, Tout=dtypes, f=function))


_resources: dict[str, tf.Tensor] = {}
_adding = threading.Lock()


def _resource(order: str) -> tf.Tensor:
    """Returns the handle of a key: it names a variable that is never created."""
    with _adding:
        if order not in _resources:
            with tf.init_scope(), tf.device(HOST_DEVICE):
                _resources[order] = tf.raw_ops.VarHandleOp(
                    dtype=tf.int32, shape=[], shared_name=f"hostopt order of {order}"
                )
        return _resources[order]


def _as_graph_function(build: Callable[..., Any], inputs: Sequence[tf.Tensor]) -> Any:
    signature = [tf.TensorSpec(each.shape, each.dtype) for each in inputs]
    return tf.function(build, input_signature=signature, autograph=False).get_concrete_function()


def abort_on_error(communicator: Communicator, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that a graph calls: a HostOptError aborts the ring before it is re-raised.

    TensorFlow reports the error as text only, so this is the last place that knows its type.
    """

    def call(*arrays: Array) -> Any:
        try:
            return function(*arrays)
        except HostOptError as error:
            communicator.abort(error)
            raise

    return call
