"""Calls of named collectives in graphs, in functions and eagerly."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hostopt import process_ring
from hostopt.collectives.call import Array
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import ReduceOp, check_dtype
from hostopt.errors import CollectiveMismatchError, ConfigError, HostOptError
from hostopt.process_ring import ProcessRing
from hostopt.tensorflow._tf_private import is_recording
from hostopt.tensorflow.background import abort_on_error, call_in_background
from hostopt.tensorflow.refusals import refuse_unsupported


def call(
    function: Callable[..., Sequence[Array]],
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tuple[tf.DType, Any]],
    name: str,
    order: str,
    communicator: Communicator | None = None,
    become_variables: bool = False,
) -> list[tf.Tensor]:
    """Calls a function with the values of tensors, now or whenever a graph runs.

    Args:
      function: takes an array per input, and returns an array per output; it may block.
      outputs: dtype and static shape of each output.
      order: name of the call, by which ranks match it. Calls of one name keep their order.
      communicator: its ring is aborted by an error; by default the ring of this process.
      become_variables: True if the outputs are likely to be assigned to variables. An eager call
        then copies them into memory of TensorFlow, as freeing memory of NumPy takes the GIL.

    Returns:
      The outputs, on the host.
    """
    for dtype, _ in outputs:
        if dtype.is_quantized:
            raise ConfigError(
                f"the call {order!r} has a tensor of dtype {dtype.name}, which NumPy does not "
                "have. Convert it with tf.bitcast first"
            )
    if tf.executing_eagerly():
        results = with_tensorflow_errors(function)(*(np.asarray(tensor) for tensor in inputs))
        convert = tf.convert_to_tensor if become_variables else _tensor_of
        return [convert(np.asarray(result)) for result in results]
    communicator = communicator or process_ring.current().communicator
    inputs = list(inputs) or [tf.zeros([], tf.int32)]  # an operation needs one
    run = abort_on_error(communicator, lambda *arrays: list(function(*arrays)))
    results = call_in_background(
        with_tensorflow_errors(run), inputs, [dtype for dtype, _ in outputs], name, f"call {order}"
    )
    for result, (_, shape) in zip(results, outputs):
        result.set_shape(shape)
    return results


_ALIGNMENT_BYTES = 64  # of tensors, which TensorFlow's kernels check


def _tensor_of(array: np.ndarray[Any, Any]) -> tf.Tensor:
    """Copies an array into a tensor, faster than `tf.convert_to_tensor` if it is small."""
    is_numpys = array.dtype.isbuiltin == 1 and array.dtype.kind in "iuf"
    if not array.size or not is_numpys:  # NumPy's DLPack has no others
        return tf.convert_to_tensor(array)
    memory = np.empty(array.nbytes + _ALIGNMENT_BYTES, np.uint8)
    begin = -memory.__array_interface__["data"][0] % _ALIGNMENT_BYTES
    aligned = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    aligned[...] = array
    return tf.experimental.dlpack.from_dlpack(aligned.__dlpack__())


def shape_of_rows(tensor: tf.Tensor) -> list[Any] | None:
    """Returns the static shape of a tensor whose number of rows may change."""
    return None if tensor.shape.rank is None else [None, *tensor.shape[1:]]


def gather_rows(
    ring: ProcessRing, tensor: tf.Tensor, name: str, rows_by_rank: Sequence[int] | None = None
) -> tf.Tensor:
    """Joins the tensors of all ranks along the first dimension, without a gradient."""
    (rows,) = call(
        lambda array: [ring.named.all_gather(array, name, rows_by_rank)],
        [tensor],
        [(tensor.dtype, shape_of_rows(tensor))],
        "HostAllGather",
        name,
        ring.communicator,
    )
    return rows


def broadcast_values(
    ring: ProcessRing, values: Sequence[tf.Tensor], root_rank: int, name: str
) -> list[tf.Tensor]:
    """Sends tensors of one rank to all ranks, without a gradient."""
    return call(
        lambda *arrays: ring.named.broadcast(arrays, root_rank, name),
        values,
        [(value.dtype, value.shape) for value in values],
        "HostBroadcast",
        name,
        ring.communicator,
        become_variables=True,
    )


def with_gradient(
    function: Callable[..., Any], gradient: Callable[..., Any], *tensors: tf.Tensor
) -> Any:
    """Calls a function as `tf.custom_gradient` does, at less cost if no gradient is wanted.

    `gradient` takes the results, and the upstream gradient of each of them.
    """
    if tf.executing_eagerly() and not is_recording():
        return function(*tensors)

    def call_with_gradient(*tensors: tf.Tensor) -> Any:
        results = function(*tensors)

        def dense(*upstream: Any) -> Any:  # tf.gather of a result has a sparse gradient
            # None if an integer result has no upstream in a graph of TensorFlow 1
            values = (None if each is None else tf.convert_to_tensor(each) for each in upstream)
            return gradient(results, *values)

        return results, dense

    return tf.custom_gradient(call_with_gradient)(*tensors)


def reduce_values(
    ring: ProcessRing,
    tensors: Sequence[tf.Tensor],
    op: ReduceOp,
    wire_format: str | None,
    name: str,
) -> list[tf.Tensor]:
    """Reduces tensors over the ranks; their gradients are reduced in the same way."""
    for each in tensors:
        check_dtype(np.dtype(each.dtype.as_numpy_dtype))

    def reduce(*values: tf.Tensor) -> Any:
        return call(
            lambda *arrays: ring.named.all_reduce(arrays, name, op, wire_format),
            values,
            [(value.dtype, value.shape) for value in values],
            "HostAllReduce",
            name,
            ring.communicator,
        )

    def gradient(_: Any, *upstream: tf.Tensor) -> Any:
        if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise ConfigError(
                f"the result of allreduce with {op.name} has no gradient. Use SUM or AVERAGE, "
                "or tf.stop_gradient"
            )
        return reduce_values(ring, upstream, op, wire_format, numbered(f"{name}_gradient"))

    return list(with_gradient(reduce, gradient, *tensors))


def scale(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Multiplies a tensor by a number, in float32 or better, and rounds once.

    The product of integers is computed in float64 and truncated.
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


@contextlib.contextmanager
def calling(
    name: str, process_set: Any, device_dense: str = "", device_sparse: str = ""
) -> Iterator[ProcessRing]:
    """Tells the other ranks if this one refuses a call, as they would wait for it.

    The program has given all arguments except the name. They may be refused.
    """
    ring = process_ring.current()
    with telling(lambda error: ring.named.refuse(name, error)):
        refuse_unsupported(process_set, device_dense, device_sparse)
        yield ring


@contextlib.contextmanager
def telling(refuse: Callable[[ConfigError], None]) -> Iterator[None]:
    """Tells the other ranks of a ConfigError, unless a call in this one has told them."""
    try:
        yield
    except ConfigError as error:
        if "is_known_to_all" not in vars(error):
            refuse(error)
            vars(error)["is_known_to_all"] = True
        raise as_tensorflow_error(error) from None


def call_name(kind: str, name: str | None, tensor: Any = None) -> str:
    """Returns the name by which ranks match a call.

    In a graph, the name of the tensor is a part of the default, and calls without a name differ.
    """
    if name is not None:
        return numbered(name)
    if tf.executing_eagerly():
        return kind
    graph = tf.compat.v1.get_default_graph()
    op_name = "" if tensor is None else f"_{tensor.op.name}"
    unique: str = graph.unique_name(f"{kind}{op_name}".replace("/", "_"), mark_as_used=True)
    return unique


def numbered(name: str) -> str:
    """Returns a name; with a number if a graph of TensorFlow 1, without order, has used it."""
    if tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function:
        return name
    number = count_use(("call", name))
    return name if number == 1 else f"{name} ({number})"


_uses: weakref.WeakKeyDictionary[Any, collections.Counter[Any]] = weakref.WeakKeyDictionary()


def count_use(key: Any) -> int:
    """Returns how often this has been called with a key in the graph of the outermost function."""
    graph = tf.compat.v1.get_default_graph()
    while graph.building_function and graph.outer_graph.building_function:
        graph = graph.outer_graph
    counter = _uses.setdefault(graph, collections.Counter())
    counter[key] += 1
    return counter[key]


# -- errors that are also those of TensorFlow which programs for Horovod expect ---------------

# Errors of Horovod's operations and functions: tensors that differ between ranks, and arguments.
# An operation that raises a ValueError fails with an InvalidArgumentError.
_BASES: dict[type, tuple[type, ...]] = {
    CollectiveMismatchError: (tf.errors.FailedPreconditionError,),
    ConfigError: (NotImplementedError, ValueError, tf.errors.InvalidArgumentError),
}


def as_tensorflow_error(error: HostOptError) -> HostOptError:
    """Returns the same error as one of TensorFlow, too, if it has one for this kind."""
    kind: Any = type(error)
    if kind not in _BASES:
        return error
    both = _kind_of_both(kind)
    converted: HostOptError = both(None, None, error.message)
    vars(converted).update(vars(error))
    converted.args = error.args
    return converted.with_traceback(error.__traceback__)


def with_tensorflow_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function raise errors of both kinds."""

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except HostOptError as error:
            raise as_tensorflow_error(error) from None

    return call


@functools.cache
def _kind_of_both(kind: Any) -> Any:
    attributes = {
        "__init__": _init,
        "__str__": Exception.__str__,
        "__reduce__": lambda self: (kind, self.args, vars(self)),
        "__module__": kind.__module__,
        # those of an OpError are properties that need its own constructor
        "message": "",
        "error_code": _BASES[kind][-1](None, None, "").error_code,
        "op": None,
        "node_def": None,
        "experimental_payloads": {},
    }
    return type(kind.__name__, (kind, *_BASES[kind]), attributes)


def _init(self: Any, node_def: Any, op: Any, message: str, *args: Any) -> None:
    """Takes the arguments of an OpError, with which AutoGraph and Keras make an error anew."""
    HostOptError.__init__(self, message)
