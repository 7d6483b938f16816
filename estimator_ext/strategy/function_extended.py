"""The part of HostOffloadStrategy that TensorFlow calls in functions of TensorFlow 2 and eagerly.

Graphs of sessions are left to the base class. The ranks match calls by name, as a rank may trace a
function earlier than others, or more often.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext._tf_private import (
    VARIABLE_POLICIES,
    DistributedVariable,
    create_mirrored_variable,
    is_compiled_by_xla,
    select_replica,
    variant_tensor,
)
from estimator_ext.errors import UnsupportedError
from estimator_ext.pipelines.data_order import OrderCheck
from estimator_ext.pipelines.pipeline import reads_files
from estimator_ext.pipelines.sharding import CommonSeed, policy_of, with_policy
from estimator_ext.strategy.extended import HostOffloadExtended, ReplicaContext, in_functions
from estimator_ext.strategy.mirrored_variables import (
    CLASSES,
    HostVariable,
    check_variables,
    refuse_update_outside_run,
)
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.process_ring import ProcessRing
from hostopt.tensorflow.background import HOST_DEVICE
from hostopt.tensorflow.calls import broadcast_values, call_name, gather_rows, reduce_values
from hostopt.tensorflow.gradient_reduction import GradientReduction

_POLICY = tf.data.experimental.AutoShardPolicy
_SAME_ORDER = (
    "Give its shuffles, generators and random numbers seeds that are the same on all ranks; or "
    "let each rank read everything in its own order with AutoShardPolicy.OFF"
)


class _Replica(HostOffloadExtended):
    """This rank as a replica: its ring, device, steps and input."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._seed = CommonSeed(self._strategy.cluster)
        self._ring: ProcessRing | None = None
        self._order: OrderCheck | None = None
        self._runs = threading.local()

    def ring(self) -> ProcessRing:
        """Returns the ring of this strategy; the first call waits until all are connected."""
        if self._ring is None:
            self._ring = ProcessRing(self._strategy.communicator)
        return self._ring

    def close_reducers(self) -> None:
        """Ends the threads of all reducers."""
        super().close_reducers()
        self._order = None
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    @property
    def _is_alone(self) -> bool:
        return self._num_replicas_in_sync == 1

    @property
    def _step_device(self) -> str:
        """Device of forward and backward; the host if it is a CPU device that is not there."""
        device = tf.DeviceSpec.from_string(self._device)
        if device.device_type != "CPU":
            return str(self._device)
        count = len(tf.config.list_logical_devices("CPU"))
        return self._device if (device.device_index or 0) < count else HOST_DEVICE

    # -- replicas --------------------------------------------------------------------------

    def _in_multi_worker_mode(self) -> bool:
        # in graphs TensorFlow would wrap each value, though there is only one replica
        return in_functions() and not self._is_alone

    @property
    def _task_id(self) -> int:  # in the names of directories that ranks but for the chief save to
        return self._strategy.cluster.rank or 0

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> int:
        return 0

    @property
    def experimental_enable_get_next_as_optional(self) -> bool:
        """True if ranks may have different numbers of batches."""
        return in_functions()

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        return (select_replica(0, value),)

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        if not in_functions():
            return super()._call_for_each_replica(fn, args, kwargs)
        was_running, self._runs.now = self.is_running, True
        try:
            replica = ReplicaContext(self._strategy, self._strategy.cluster.rank or 0)
            with tf.device(self._step_device), self._seed.hidden(), replica:
                return fn(*select_replica(0, args), **select_replica(0, kwargs))
        finally:
            self._runs.now = was_running

    @property
    def is_running(self) -> bool:
        """True in a function that `strategy.run` calls, also while it merges replicas."""
        return getattr(self._runs, "now", False)

    # -- input -----------------------------------------------------------------------------

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        _check_no_data_workers(self._strategy.cluster)
        if not self._is_alone:
            if in_functions():
                _check_lengths(self.ring(), dataset)
                dataset = with_policy(dataset, self.auto_shard) if self.auto_shard else dataset
            if self._order is None:
                channel = self._strategy.communicator.duplicate("the order of the data")
                self._order = OrderCheck(channel, _SAME_ORDER)
            dataset = _in_one_order(self._order, dataset, self._seed)
        return super()._experimental_distribute_dataset(dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        def checked(context: tf.distribute.InputContext) -> Any:
            dataset = dataset_fn(context)
            _check_endless(self.ring(), dataset)
            return dataset

        _check_no_data_workers(self._strategy.cluster)
        is_checked = in_functions() and not self._is_alone
        return super()._distribute_datasets_from_function(
            checked if is_checked else dataset_fn, options
        )


class FunctionExtended(_Replica):
    """Variables, reductions and updates; see `HostOffloadExtended` for the arguments."""

    # -- variables -------------------------------------------------------------------------

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if not in_functions():
            return super()._create_variable(next_creator, **kwargs)
        if not self._is_alone:
            _refuse_keras_3()

        def create(**kwargs: Any) -> list[Any]:
            kwargs.pop("colocate_with", None)
            dtype = tf.as_dtype(kwargs.get("dtype") or tf.float32)
            on_host = self.variables_on_host or dtype.is_integer
            if not self._is_alone:
                kwargs["initial_value"] = self._of_rank_0(**kwargs)
            with tf.device(HOST_DEVICE if on_host else self._step_device):
                return [next_creator(**kwargs)]

        return create_mirrored_variable(
            self._strategy, create, CLASSES, VARIABLE_POLICIES, **kwargs
        )

    def _of_rank_0(
        self, initial_value: Any, name: str | None = None, dtype: Any = None, **_: Any
    ) -> Callable[..., tf.Tensor]:
        def value_of_rank_0(**kwargs: Any) -> tf.Tensor:
            value = initial_value(**kwargs) if callable(initial_value) else initial_value
            value = getattr(value, "wrapped_value", value)  # of a checkpoint being restored
            value = tf.convert_to_tensor(value, dtype)
            call = f"the initial value of {name!r}"
            return _broadcast(self.ring(), value, call)

        return value_of_rank_0

    # -- reductions ------------------------------------------------------------------------

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        if not in_functions():
            return super()._reduce_to(reduce_op, value, destinations, options)
        is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
        if self._is_alone or (is_mean and isinstance(value, HostVariable)):
            return _local(value)
        return self._reduce_values(reduce_op, [value])[0]

    def _batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any
    ) -> list[Any]:
        if not in_functions():
            return super()._batch_reduce_to(reduce_op, value_destination_pairs, options)
        pairs = [(_local(value), destination) for value, destination in value_destination_pairs]
        if self._is_alone:
            return [value for value, _ in pairs]
        _refuse_xla()
        is_gradient = [isinstance(each, tf.Variable) for _, each in pairs]
        is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
        gradients = [pair for pair, chosen in zip(pairs, is_gradient) if chosen]
        check_variables(self._strategy, [variable for _, variable in gradients])
        values = [value for (value, _), chosen in zip(pairs, is_gradient) if not chosen]
        reduced = iter(self._reduce_gradients(gradients, is_mean) if gradients else [])
        results = iter(self._reduce_values(reduce_op, values) if values else [])
        return [next(reduced if chosen else results) for chosen in is_gradient]

    def _reduce_values(self, reduce_op: Any, values: Sequence[Any]) -> list[Any]:
        _refuse_xla()
        tensors = [tf.convert_to_tensor(_local(value)) for value in values]
        name, ring = call_name("all_reduce", None, tensors[0]), self.ring()
        with tf.device(HOST_DEVICE):
            results = reduce_values(ring, tensors, ReduceOp.SUM, None, name)
            # named for `is_same_on_all_ranks`: TensorFlow gives the results the inputs as inputs
            sums = [tf.identity(each, name="HostReduced") for each in results]
            if reduce_op == tf.distribute.ReduceOp.MEAN:  # of a floating dtype, also of integers
                return [tf.math.divide(each, ring.size) for each in sums]
            return sums

    def _reduce_gradients(
        self, pairs: Sequence[tuple[Any, tf.Variable]], is_mean: bool
    ) -> list[Any]:
        """Reduces gradients of optimizers in buckets, while backward continues."""
        if self.ring().communicator.transport.options.nonfinite == "skip":
            raise hostopt.ConfigError(
                "nonfinite is 'skip', which only graphs of estimator_ext.Estimator support. Give "
                "the HostOffloadStrategy nonfinite='error' or 'warn'"
            )
        first = pairs[0][1].name.partition(":")[0]
        reduction = GradientReduction(
            f"{len(pairs)} variables from {first}",  # the same on all ranks, whenever they trace
            ReduceOp.AVERAGE if is_mean else ReduceOp.SUM,
            sparse_as_dense=self._sparse_as_dense,
            nonfinite=None,
            ring=self.ring,
        )
        return reduction.reduce([gradient for gradient, _ in pairs], [v for _, v in pairs])

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: Any, options: Any
    ) -> Any:
        value = tf.convert_to_tensor(_local(value))
        if self._is_alone:
            return value
        _refuse_xla()
        axis = int(axis)
        with tf.device(HOST_DEVICE):
            value = tf.experimental.numpy.moveaxis(value, axis, 0) if axis else value
            rows = gather_rows(self.ring(), value, call_name("all_gather", None, value))
            return tf.experimental.numpy.moveaxis(rows, 0, axis) if axis else rows

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        if self._is_alone or not in_functions() or isinstance(tensor, (int, float)):
            return tensor
        _refuse_xla()
        tensor = tf.convert_to_tensor(_local(tensor))
        name = call_name("broadcast", None, tensor)
        return _broadcast(self.ring(), tensor, name)

    # -- updates ---------------------------------------------------------------------------

    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        if not in_functions():
            return super()._update(var, fn, args, kwargs, group)
        if not self._is_alone and not self.is_running:
            refuse_update_outside_run(var, args)
        return self.update_variable(var, fn, args, kwargs, group)

    def update_variable(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        """Calls a function that updates a variable, on the device of the variable."""
        component = var.values[0] if isinstance(var, DistributedVariable) else var
        return self._on_device(component.device, fn, (component, *args), kwargs, group)


def _local(value: Any) -> Any:
    """Returns the value of this replica, without aggregation if it is a variable."""
    if isinstance(value, DistributedVariable):
        return value.values[0].read_value()
    return select_replica(0, value)


def _broadcast(ring: ProcessRing, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Sends the tensor of rank 0 to all ranks, which match the call by name."""
    with tf.device(HOST_DEVICE):
        return broadcast_values(ring, [tensor], 0, name)[0]


def _refuse_xla() -> None:
    """Raises ConfigError in a function with jit_compile=True, in which nothing can be reduced."""
    if not tf.executing_eagerly() and is_compiled_by_xla(tf.compat.v1.get_default_graph()):
        raise hostopt.ConfigError(
            "a function with jit_compile=True reduces values over the ranks, which XLA cannot "
            "compile. Set jit_compile=False in Model.compile or in tf.function"
        )


_KERAS_3 = "keras.src.backend.tensorflow.core"


def _refuse_keras_3() -> None:
    """Raises ConfigError if Keras 3 creates a variable."""
    frame: Any = sys._getframe(1) if _KERAS_3 in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == _KERAS_3:
            raise hostopt.ConfigError(
                "a model or an optimizer of Keras 3 is created in the scope of a "
                "HostOffloadStrategy of several ranks. Use hostopt.keras.DistributedOptimizer "
                "without a strategy, or Keras 2: install tf_keras and set TF_USE_LEGACY_KERAS=1"
            )
        frame = frame.f_back


# -- datasets --------------------------------------------------------------------------------


def _in_one_order(check: OrderCheck, dataset: Any, seed: CommonSeed) -> Any:
    """Checks that ranks that shard by position have the same data in one order; collective."""
    policy = policy_of(dataset)
    graph = getattr(variant_tensor(dataset), "graph", None)
    # what a function has created cannot be read
    if policy in (_POLICY.OFF, _POLICY.FILE) or (graph is not None and graph.building_function):
        return dataset
    with tf.init_scope() if graph is None else contextlib.nullcontext():
        if policy == _POLICY.AUTO and reads_files(dataset):  # each rank reads its part of them
            return dataset
        dataset, number = check.in_one_order(dataset)
        seed.renew(number)
    return dataset


def _check_no_data_workers(cluster: hostopt.Cluster) -> None:
    """Checks that no data workers wait for a pipeline that they will not get."""
    if cluster.data:
        raise UnsupportedError(
            f"the cluster has {len(cluster.data)} data workers, which prepare the data of "
            "Estimator.train only, and this program distributes a dataset by itself. Start it "
            "without --data-workers"
        )


def _check_lengths(ring: ProcessRing, dataset: Any) -> None:
    """Compares the numbers of batches of the ranks; collective."""
    lengths = _lengths(ring, dataset)
    if len({*lengths}) > 1:
        raise hostopt.ConfigError(
            f"the datasets of the ranks differ in their number of batches ({_shown(lengths)}). "
            "Give all ranks the same dataset, which is sharded, or as many batches with repeat() "
            "and take()"
        )


def _check_endless(ring: ProcessRing, dataset: Any) -> None:
    """Checks that the dataset of each rank ends, or of none; collective.

    Ranks whose datasets end ask each other before each batch, and those without a batch get an
    empty one. A rank whose dataset is endless does not ask.
    """
    lengths = _lengths(ring, dataset)
    endless = [length == tf.data.INFINITE_CARDINALITY for length in lengths]
    if any(endless) and not all(endless):
        raise hostopt.ConfigError(
            f"some ranks have endless datasets, and others not ({_shown(lengths)}). Call repeat() "
            "on all ranks, or end all datasets with take()"
        )


def _lengths(ring: ProcessRing, dataset: Any) -> list[int]:
    with tf.init_scope():  # a dataset that a function has created cannot be asked
        is_known = not hasattr(variant_tensor(dataset), "graph")
        length = int(dataset.cardinality()) if is_known else tf.data.UNKNOWN_CARDINALITY
    local = np.array([length], np.int64)
    lengths: list[int] = ring.named.all_gather(local, "the lengths of the datasets").tolist()
    return lengths


def _shown(lengths: list[int]) -> str:
    names = {tf.data.INFINITE_CARDINALITY: "endless", tf.data.UNKNOWN_CARDINALITY: "unknown"}
    return ", ".join(f"rank {i}: {names.get(n, n)}" for i, n in enumerate(lengths))
