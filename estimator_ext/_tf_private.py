"""The one door to private names of TensorFlow, besides `_tf_estimator`.

Any TensorFlow release may change these names. No other module imports `tensorflow.python` or uses
a private attribute of a graph, an operation or a tensor.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.framework.variable_pb2 import VariableDef
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.data.experimental.ops import distribute
from tensorflow.python.data.ops import dataset_ops, iterator_ops, readers
from tensorflow.python.distribute import (
    distribute_lib,
    distribute_utils,
    input_lib,
    one_device_strategy,
    values,
)
from tensorflow.python.distribute.v1 import input_lib as input_lib_v1
from tensorflow.python.eager import context, record
from tensorflow.python.framework import ops, random_seed
from tensorflow.python.lib.io import file_io
from tensorflow.python.ops import (
    control_flow_util,
    control_flow_util_v2,
    gen_dataset_ops,
    gradients_util,
    lookup_ops,
    resource_variable_ops,
    summary_ops_v2,
)
from tensorflow.python.training import saver

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
FileIO: Any = file_io.FileIO
update_checkpoint_state = checkpoint_management.update_checkpoint_state_internal
# of a checkpoint that was saved by object
keys_by_name: Callable[[str], dict[str, str]] = saver.object_graph_key_mapping


def saved_as(variable: tf.Variable) -> tuple[str, tf.TensorShape]:
    """Returns name and shape of a variable in checkpoints; of a partition, those of the whole."""
    part = variable._get_save_slice_info()
    if part is None:
        return variable.op.name, variable.shape
    return part.full_name, tf.TensorShape(part.full_shape)


def partitions(variables: Iterable[tf.Variable]) -> Counter[str]:
    """Returns the number of partitions of each variable with a partitioner, by its name."""
    parts = (variable._get_save_slice_info() for variable in variables)
    return Counter(part.full_name for part in parts if part is not None)


def saved_partitions(meta_graph: bytes) -> Counter[str]:
    """Returns `partitions` of the graph whose ``.meta`` file is given."""
    graph = tf.compat.v1.MetaGraphDef.FromString(meta_graph)
    kept = graph.collection_def[tf.compat.v1.GraphKeys.GLOBAL_VARIABLES].bytes_list.value
    parts = (VariableDef.FromString(each).save_slice_info_def for each in kept)
    return Counter(part.full_name for part in parts if part.full_name)


def redirect_writes(redirect: Callable[[FileIO, Callable[[str], None]], None]) -> None:
    """Lets a function choose where a file writes, whenever one is opened to write.

    It gets the file, and a function that opens another path instead.
    """
    check = FileIO._prewrite_check

    @functools.wraps(check)
    def redirect_and_check(self: FileIO) -> None:
        def open_at(path: str) -> None:
            self._writable_file = file_io._pywrap_file_io.WritableFile(
                tf.compat.as_bytes(path), tf.compat.as_bytes(self.mode)
            )

        if not self._writable_file:
            redirect(self, open_at)
        check(self)

    FileIO._prewrite_check = redirect_and_check


# -- hooks that save or stop ---------------------------------------------------------------

SaverHook: Any = tf.compat.v1.train.CheckpointSaverHook
Timer: Any = tf.compat.v1.train.SecondOrStepTimer


def save_path(hook: SaverHook) -> str:
    """Returns the path of a hook's checkpoints, without their steps."""
    return str(hook._save_path)


def timer_of(hook: SaverHook) -> Timer:
    """Returns the timer that decides when a hook saves."""
    return hook._timer


def set_timer(hook: SaverHook, timer: Timer) -> None:
    """Replaces the timer that decides when a hook saves."""
    hook._timer = timer


def interval_of(timer: Timer) -> tuple[float | None, int | None]:
    """Returns the interval of a timer in seconds or steps; one of them is None."""
    return timer._every_secs, timer._every_steps


def save(hook: SaverHook, session: tf.compat.v1.Session, step: int) -> None:
    """Saves a checkpoint, with all listeners."""
    hook._save(session, step)


def last_steps(hooks: Iterable[Any]) -> list[int]:
    """Returns the last steps of those hooks that stop at a step and know it already."""
    kind = tf.compat.v1.train.StopAtStepHook
    steps = [hook._last_step for hook in hooks if isinstance(hook, kind)]
    return [int(step) for step in steps if step is not None]


def cancel_stop(run_context: Any) -> None:
    """Continues a training although a hook has requested a stop."""
    run_context._stop_requested = False


def listeners_of(hook: SaverHook) -> list[Any]:
    """Returns the list of the listeners of a hook that saves, in the order of their calls."""
    listeners: list[Any] = hook._listeners
    return listeners


@contextlib.contextmanager
def wrapped_saver(hook: SaverHook, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Scope in which a hook saves with `wrap(saver)`, of the saver that it finds when it saves.

    Its timer and its listeners may be replaced in the scope: at the end they are as before.
    """
    get_saver, timer, listeners = hook._get_saver, hook._timer, list(hook._listeners)

    def get_wrapped() -> Any:
        saver = get_saver()
        return saver and wrap(saver)

    hook._get_saver = get_wrapped
    try:
        yield
    finally:
        hook._get_saver, hook._timer, hook._listeners = get_saver, timer, listeners


# -- gradients -----------------------------------------------------------------------------

Optimizer = tf.compat.v1.train.Optimizer  # for its private `_scale_loss`
gradients_module = gradients_util  # for its private `_GradientsHelper`
record_operation = record.record_operation
variable_accessed = resource_variable_ops.variable_accessed
ResourceVariable = resource_variable_ops.ResourceVariable
ANONYMOUS_VARIABLE = context.anonymous_name()  # the handle's name; each execution makes a new one


def cached_value_of(variable: tf.Variable) -> tf.Tensor | None:
    """Returns the value of a variable on its caching device, or None if it has no such device."""
    return getattr(variable, "_cached_value", None)


def loss_is_scaled() -> bool:
    """Returns True if the optimizer divides the loss of the default graph by the number of ranks.

    TensorFlow does so for the mean of a loss, but not for its sum.
    """
    return getattr(tf.compat.v1.get_default_graph(), "_is_loss_scaled_by_optimizer", False)


def scaled_loss(strategy: tf.distribute.Strategy) -> Any:
    """Returns a context manager in which optimizers divide losses by the number of ranks."""
    return strategy._scale_loss_for_estimator_enabled()


# Functions that divide a loss by the number of ranks, for which they ask the strategy.
_KERAS = "scale_loss_for_distribution"
DIVIDE_LOSSES = {
    ("tensorflow.python.ops.nn_impl_distribute", "compute_average_loss"),
    ("tensorflow.python.ops.nn_impl_distribute", "scale_regularization_loss"),
    ("tensorflow.python.keras.utils.losses_utils", _KERAS),
    ("tf_keras.src.utils.losses_utils", _KERAS),
    ("keras.src.utils.losses_utils", _KERAS),
    ("keras.src.losses.loss", _KERAS),
    ("keras.src.losses.loss", f"un{_KERAS}"),
    ("tensorflow_estimator.python.estimator.head.base_head", "create_estimator_spec_train_op"),
    ("tensorflow_estimator.python.estimator.canned.baseline", "train_op_fn"),
    ("tensorflow_estimator.python.estimator.canned.dnn_linear_combined", "_train_op_fn"),
}
_LIBRARIES = {"tensorflow", "keras", "tf_keras", "hostopt", "estimator_ext"}


def caller_of(frame: FrameType) -> tuple[tuple[str, str], str, bool]:
    """Returns who reads `num_replicas_in_sync` of a strategy, or of a replica context.

    Returns:
      Module and name of the function, the place of the call, and True if it is in a library.
    """
    if frame.f_code.co_name == "num_replicas_in_sync" and frame.f_back:  # that of a context
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__", ""))
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return (module, frame.f_code.co_name), place, module.partition(".")[0] in _LIBRARIES


# -- variables of a strategy in functions and eagerly --------------------------------------

DistributedVariable = values.DistributedVariable
MirroredVariable = values.MirroredVariable
updating_replica = distribute_lib.get_update_replica_id  # None outside of updates
create_mirrored_variable = distribute_utils.create_mirrored_variable
VARIABLE_CLASSES = distribute_utils.VARIABLE_CLASS_MAPPING
VARIABLE_POLICIES = distribute_utils.VARIABLE_POLICY_MAPPING


# -- names that programs of TensorFlow 1 use ------------------------------------------------

summary_writer_initializers: Callable[[], list[tf.Operation]] = (
    summary_ops_v2.summary_writer_initializer_op
)
index_table_from_tensor = lookup_ops.index_table_from_tensor
index_to_string_table_from_tensor = lookup_ops.index_to_string_table_from_tensor


# -- graphs --------------------------------------------------------------------------------

get_func_graph = control_flow_util_v2.get_func_graph  # a new copy, without static shapes


def original_func_graph(op: tf.Operation, name: str) -> Any:
    """Returns the graph of a function that `op` calls, as the program has built it."""
    graph = op.graph
    while (function := graph._get_function(name)) is None:
        graph = graph.outer_graph
    return function.graph


def is_reference(tensor: tf.Tensor) -> bool:
    """Returns True if a tensor is a reference to a variable of TensorFlow 1, not a value."""
    return bool(tensor.dtype._is_ref_dtype)


def control_flow_context(builder: tf.Graph | tf.Operation) -> Any:
    """Returns the innermost branch or loop of TensorFlow 1 around an operation, or None.

    For a graph, returns the context in which the next operation would be built.
    """
    return builder._get_control_flow_context()


def is_compiled_by_xla(graph: tf.Graph) -> bool:
    """Returns True if a graph belongs to a function with jit_compile=True."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def constant_of(tensor: tf.Tensor) -> Any:
    """Returns what constants alone compute, as an array; None for any other tensor.

    `tf.get_static_value` computes less, and copies a large constant several times.
    """
    if tensor.dtype in (tf.resource, tf.variant):
        return None
    with tensor.graph._c_graph.get() as graph:
        return pywrap_tf_session.TF_TryEvaluateConstant_wrapper(graph, tensor._as_tf_output())


def control_dependencies_of(graph: tf.Graph) -> Any:
    """Returns the operations that new operations of a graph depend on by control."""
    return graph._current_control_dependencies()


def control_outputs(op: tf.Operation) -> Sequence[tf.Operation]:
    """Returns the operations that wait for an operation without taking its values."""
    return list(op._control_outputs)


def add_control_inputs(op: tf.Operation, before: Sequence[tf.Operation]) -> None:
    """Makes an existing operation wait for others."""
    op._add_control_inputs(before)


def replace_control_input(op: tf.Operation, old: tf.Operation, new: tf.Operation) -> None:
    """Makes an existing operation wait for another one than before."""
    before = [new if each is old else each for each in op.control_inputs]
    op._remove_all_control_inputs()
    op._add_control_inputs(before)


def replace_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Replaces an input of an existing operation by a tensor of the same dtype."""
    op._update_input(index, tensor)


def replace_tensor(old: tf.Tensor, new: tf.Tensor) -> None:
    """Connects every consumer of a tensor to another one of the same dtype."""
    for consumer in old.consumers():
        replace_inputs(consumer, old, new)


def replace_inputs(op: tf.Operation, old: tf.Tensor, new: tf.Tensor) -> None:
    """Connects every input of an operation that is one tensor to another one."""
    for index, tensor in enumerate(op.inputs):
        if tensor is old:
            replace_input(op, index, new)


def set_attribute(op: tf.Operation, name: str, value: bytes) -> None:
    """Changes an attribute, which is a string, of an existing operation."""
    op._set_attr(name, attr_value_pb2.AttrValue(s=value))


def set_device(op: tf.Operation, device: str) -> None:
    """Moves an existing operation to a device, whatever it was to be beside."""
    op._set_device(device)
    op._clear_attr("_class")


def set_initializer(variable: tf.Variable, initializer: tf.Operation) -> None:
    """Replaces the initializer of a resource variable of a graph."""
    variable._initializer_op = initializer


def set_fetched(variable: tf.Variable, tensor: tf.Tensor) -> None:
    """Makes a session that fetches a variable of a graph fetch a tensor."""
    variable._as_graph_element = lambda: tensor


@contextlib.contextmanager
def options_in_graph() -> Iterator[None]:
    """Hides a warning of TensorFlow: that the options of a dataset may be unknown in a graph."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "To make it possible to preserve tf.data options")
        yield


def variant_tensor(dataset: tf.data.Dataset) -> tf.Tensor:
    """Returns the tensor that stands for a dataset in its graph."""
    return dataset._variant_tensor


# -- the calls of tf.data that built a dataset ----------------------------------------------


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
        text = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant_tensor(dataset),
            external_state_policy=1,  # ignores states
        )
    except tf.errors.OpError:  # it holds too much, or what cannot be written
        return False
    nodes = tf.compat.v1.GraphDef.FromString(text.numpy()).node
    return any(node.attr["deterministic"].s == b"false" for node in nodes)


def interleave_in_order() -> None:
    """Makes `parallel_interleave` ignore `sloppy`, also in functions that datasets call."""
    init = readers.ParallelInterleaveDataset.__init__
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_in_order(*arguments: Any, **options: Any) -> None:
        fields = signature.bind(*arguments, **options).arguments
        init(**{**fields, "sloppy": False})

    readers.ParallelInterleaveDataset.__init__ = init_in_order


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


class SeedOfRanks(int):
    """A seed for random operations that have none themselves; the others do not depend on it."""


def _get_seed(op_seed: int | None) -> tuple[int | None, int | None]:
    is_own = op_seed is not None and isinstance(_owner_of_seed()._seed, SeedOfRanks)
    with seed_hidden() if is_own else contextlib.nullcontext():
        return _get_seed_of_tensorflow(op_seed)


_get_seed_of_tensorflow: Callable[..., tuple[int | None, int | None]] = random_seed.get_seed
random_seed.get_seed = _get_seed


def current_seed() -> int | None:
    """Returns the seed of `tf.random.set_seed`, in the default graph or eagerly."""
    seed: int | None = _owner_of_seed()._seed
    return seed


def set_eager_seed(seed: SeedOfRanks) -> None:
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
