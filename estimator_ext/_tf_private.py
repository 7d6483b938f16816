"""The one door to private names of TensorFlow, besides `_tf_estimator`.

Any TensorFlow release may change these names. No other module imports `tensorflow.python` or uses
a private attribute of a graph, an operation or a tensor.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.data.experimental.ops import distribute
from tensorflow.python.data.ops import dataset_ops, iterator_ops
from tensorflow.python.distribute import (
    distribute_lib,
    distribute_utils,
    input_lib,
    one_device_strategy,
    values,
)
from tensorflow.python.distribute.v1 import input_lib as input_lib_v1
from tensorflow.python.eager import context, record
from tensorflow.python.framework import ops
from tensorflow.python.lib.io import file_io
from tensorflow.python.ops import (
    control_flow_util,
    control_flow_util_v2,
    gen_dataset_ops,
    gradients_util,
    resource_variable_ops,
)

__all__: list[str] = []

# -- the strategy --------------------------------------------------------------------------

OneDeviceExtended = one_device_strategy.OneDeviceExtended
OneDeviceReplicaContext = one_device_strategy._OneDeviceReplicaContext
UpdateContext = distribute_lib.UpdateContext
InputWorkers = input_lib.InputWorkers
InputFunctionIterator = input_lib_v1.InputFunctionIterator
DistributedDataset = input_lib.DistributedDataset
DistributedDatasetV1 = input_lib_v1.DistributedDatasetV1
DistributedDatasetsFromFunction = input_lib.DistributedDatasetsFromFunction
DistributedDatasetsFromFunctionV1 = input_lib_v1.DistributedDatasetsFromFunctionV1
colocate_with = ops.colocate_with
select_replica = distribute_utils.select_replica  # of a structure of values of each replica

# -- datasets, files and checkpoints -------------------------------------------------------

AutoShardDataset = distribute._AutoShardDataset
DatasetV1 = dataset_ops.DatasetV1
DatasetV1Adapter = dataset_ops.DatasetV1Adapter
GLOBAL_ITERATORS = iterator_ops.GLOBAL_ITERATORS
serialize_iterator = gen_dataset_ops.serialize_iterator
deserialize_iterator = gen_dataset_ops.deserialize_iterator
FileIO = file_io.FileIO
WritableFile = file_io._pywrap_file_io.WritableFile
update_checkpoint_state = checkpoint_management.update_checkpoint_state_internal

# -- gradients -----------------------------------------------------------------------------

Optimizer = tf.compat.v1.train.Optimizer  # for its private `_scale_loss`
gradients_module = gradients_util  # for its private `_GradientsHelper`
could_possibly_record = record.could_possibly_record
record_operation = record.record_operation
variable_accessed = resource_variable_ops.variable_accessed


def loss_is_scaled() -> bool:
    """Returns True if the optimizer divides the loss of the default graph by the number of ranks.

    TensorFlow does so for the mean of a loss, but not for its sum.
    """
    return getattr(tf.compat.v1.get_default_graph(), "_is_loss_scaled_by_optimizer", False)


def scaled_loss(strategy: tf.distribute.Strategy) -> Any:
    """Returns a context manager in which optimizers divide losses by the number of ranks."""
    return strategy._scale_loss_for_estimator_enabled()


# -- variables of a strategy in functions and eagerly --------------------------------------

DistributedVariable = values.DistributedVariable
MirroredVariable = values.MirroredVariable
updating_replica = distribute_lib.get_update_replica_id  # None outside of updates
create_mirrored_variable = distribute_utils.create_mirrored_variable
VARIABLE_CLASSES = distribute_utils.VARIABLE_CLASS_MAPPING
VARIABLE_POLICIES = distribute_utils.VARIABLE_POLICY_MAPPING


# -- graphs --------------------------------------------------------------------------------

get_func_graph = control_flow_util_v2.get_func_graph


def is_reference(tensor: tf.Tensor) -> bool:
    """Returns True if a tensor is a reference to a variable of TensorFlow 1, not a value."""
    return bool(tensor.dtype._is_ref_dtype)


def control_flow_context(builder: tf.Graph | tf.Operation) -> Any:
    """Returns the innermost branch or loop of TensorFlow 1 around an operation.

    Args:
      builder: an operation, or a graph for the operations that it would build now.

    Returns:
      The control-flow context; None outside branches and loops.
    """
    return builder._get_control_flow_context()


def is_compiled_by_xla(graph: tf.Graph) -> bool:
    """Returns True if a graph belongs to a function with jit_compile=True."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def control_dependencies_of(graph: tf.Graph) -> Any:
    """Returns the operations that new operations of a graph depend on by control."""
    return graph._current_control_dependencies()


def control_outputs(op: tf.Operation) -> Sequence[tf.Operation]:
    """Returns the operations that wait for an operation without taking its values."""
    return op._control_outputs


def add_control_inputs(op: tf.Operation, before: Sequence[tf.Operation]) -> None:
    """Makes an existing operation wait for others.

    Args:
      op: the operation that waits.
      before: the operations that run first.
    """
    op._add_control_inputs(before)


def replace_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Replaces an input of an existing operation.

    Args:
      op: the operation.
      index: number of the input.
      tensor: the new input, of the same dtype.
    """
    op._update_input(index, tensor)


def replace_tensor(old: tf.Tensor, new: tf.Tensor) -> None:
    """Connects every consumer of a tensor to another one.

    Args:
      old: the tensor that has no consumers afterwards.
      new: tensor of the same dtype.
    """
    for consumer in old.consumers():
        for index, tensor in enumerate(consumer.inputs):
            if tensor is old:
                replace_input(consumer, index, new)


def set_attribute(op: tf.Operation, name: str, value: bytes) -> None:
    """Changes an attribute of an existing operation.

    Args:
      op: the operation.
      name: name of an attribute that is a string.
      value: the new value.
    """
    op._set_attr(name, attr_value_pb2.AttrValue(s=value))


def set_initializer(variable: tf.Variable, initializer: tf.Operation) -> None:
    """Replaces the initializer of a variable.

    Args:
      variable: a resource variable of a graph.
      initializer: the operation that assigns the initial value.
    """
    variable._initializer_op = initializer


@contextlib.contextmanager
def options_in_graph() -> Iterator[None]:
    """Hides a warning of TensorFlow: that the options of a dataset may be unknown in a graph."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "To make it possible to preserve tf.data options")
        yield


def variant_tensor(dataset: tf.data.Dataset) -> tf.Tensor:
    """Returns the tensor that stands for a dataset in its graph."""
    return dataset._variant_tensor


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the datasets that a dataset transforms, without wrappers of TensorFlow 1."""
    return [without_wrapper(each) for each in dataset._inputs()]


def without_wrapper(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset of TensorFlow 2 within one of TensorFlow 1."""
    while isinstance(dataset, DatasetV1Adapter):
        dataset = dataset._dataset
    return dataset


def scalars_of(dataset: tf.data.Dataset) -> dict[str, tf.Tensor]:
    """Returns the integers that a transformation was called with, such as seeds, by name."""
    return {
        name.lstrip("_"): value
        for name, value in sorted(vars(dataset).items())
        if tf.is_tensor(value) and value.dtype in (tf.int32, tf.int64) and value.shape.rank == 0
    }


def function_graphs(dataset: tf.data.Dataset) -> list[tf.Graph]:
    """Returns the graphs of the functions that a transformation calls."""
    functions = [each.function for each in dataset._functions()]
    return [each.graph for each in functions if hasattr(each, "graph")]  # not of legacy functions


def loses_order(dataset: tf.data.Dataset) -> bool:
    """Returns True if a transformation was called eagerly with deterministic=False."""
    known = getattr(dataset, "_deterministic", None)
    if known is not None:
        return bool(known == "false")
    try:
        text = gen_dataset_ops.dataset_to_graph_v2(variant_tensor(dataset), 1)  # ignore states
    except tf.errors.OpError:  # it holds too much, or what cannot be written
        return False
    nodes = tf.compat.v1.GraphDef.FromString(text.numpy()).node
    return any(node.attr["deterministic"].s == b"false" for node in nodes)


def generator_state(dataset: tf.data.Dataset) -> Any:
    """Returns what calls the generator of a `from_generator`; None for other transformations.

    Its attribute `_generator` is the generator, and may be replaced.
    """
    for each in dataset._functions():
        begins = _captured(each._func, "get_iterator_id_fn")
        if begins is not None:
            return _captured(begins, "generator_state")
    return None


def _captured(function: Any, name: str) -> Any:
    """Returns a variable of the function around a function; None if it uses no such variable."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index(name)].cell_contents if name in names else None


# -- seeds ---------------------------------------------------------------------------------


def current_seed() -> int | None:
    """Returns the seed of `tf.random.set_seed`, in the default graph or eagerly."""
    return _owner_of_seed()._seed


def set_eager_seed(seed: int) -> None:
    """Does what `tf.random.set_seed` does eagerly, but keeps compiled operations."""
    owner = context.context()
    owner._seed = seed
    owner._rng = random.Random(seed)


@contextlib.contextmanager
def seed_hidden() -> Iterator[None]:
    """Scope in which new random operations have no seed but their own."""
    owner = _owner_of_seed()
    seed, owner._seed = owner._seed, None
    try:
        yield
    finally:
        owner._seed = seed


def _owner_of_seed() -> Any:
    return context.context() if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
