"""The part of HostOffloadStrategy that TensorFlow calls: placement of variables, and input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import (
    DistributedDataset,
    DistributedDatasetsFromFunction,
    DistributedDatasetsFromFunctionV1,
    DistributedDatasetV1,
    DistributedVariable,
    InputFunctionIterator,
    InputWorkers,
    OneDeviceExtended,
    OneDeviceReplicaContext,
    ResourceVariable,
    UpdateContext,
    colocate_with,
    control_dependencies_of,
    record_operation,
    scaled_loss,
    select_replica,
    set_initializer,
    variable_accessed,
)
from estimator_ext.reduction.gradient_reduction import GradientReduction
from estimator_ext.variables.sync_on_read import is_sync_on_read
from hostopt.tensorflow import ops
from hostopt.tensorflow._tf_private import is_recording
from hostopt.tensorflow.background import HOST_DEVICE
from hostopt.tensorflow.sparse import slices_of


class _RankExtended(OneDeviceExtended):
    """One rank of a cluster: its role and its shard of the input."""

    @property
    def _strategy(self) -> Any:
        return self._container_strategy()

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1 if self._strategy.local_steps.is_used else self._size

    @property
    def _size(self) -> int:
        return int(self._strategy.cluster.size)

    @property
    def experimental_between_graph(self) -> bool:
        return True

    @property
    def should_checkpoint(self) -> bool:
        return bool(self._strategy.cluster.is_chief)

    should_save_summary = should_checkpoint

    def input_context(self) -> tf.distribute.InputContext:
        """Returns the number of ranks and the index of this one, for an input_fn."""
        size = self._size
        return tf.distribute.InputContext(size, self._strategy.cluster.rank or 0, size)

    def _input_workers_with_options(self, options: Any = None) -> InputWorkers:
        # batches stay on the host until the accelerator reads them
        return InputWorkers([(HOST_DEVICE, (HOST_DEVICE,))])

    def _make_input_fn_iterator(self, input_fn: Any, replication_mode: Any = None) -> Any:
        # with one replica per worker both replication modes are the same
        return InputFunctionIterator(
            input_fn, self._input_workers, [self.input_context()], self._strategy
        )

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        kind = DistributedDataset if in_functions() else DistributedDatasetV1
        return kind(
            dataset=dataset,
            input_workers=self._input_workers_with_options(options),
            strategy=self._strategy,
            num_replicas_in_sync=self._num_replicas_in_sync,
            input_context=self.input_context(),
            options=options,
        )

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        kind = (
            DistributedDatasetsFromFunction
            if in_functions()
            else DistributedDatasetsFromFunctionV1
        )
        return kind(
            input_workers=self._input_workers_with_options(options),
            strategy=self._strategy,
            input_contexts=[self.input_context()],
            dataset_fn=dataset_fn,
            options=options,
        )


class HostOffloadExtended(_RankExtended):
    """Forward and backward on `device`; variables, updates and reductions on the host."""

    def __init__(
        self,
        strategy: Any,
        device: str,
        variables_on_host: bool,
        sparse_as_dense: bool,
        auto_shard: str | None,
        cluster_resolver: Any,
    ) -> None:
        super().__init__(strategy, device)
        self.auto_shard = auto_shard
        self.reduces_at_backward, self.loss_is = False, ""  # see `GradientReduction`
        self.variables_on_host = variables_on_host
        self._sparse_as_dense = sparse_as_dense
        self._cluster_resolver = cluster_resolver  # read by tf.distribute.Strategy
        self._default_reduction = GradientReduction(strategy, sparse_as_dense)
        self.reduction = self._default_reduction  # of the graph under construction

    @contextlib.contextmanager
    def training_graph(self) -> Iterator[GradientReduction]:
        """Makes the default graph the training graph of an Estimator.

        Within the block the strategy is in scope, optimizers scale losses, variables keep their
        initializers (a hook broadcasts their values), and reductions are built by
        `GradientReduction.build_step`. The block lasts as long as the training.
        """
        strategy, default = self._strategy, self._default_reduction
        graph = tf.compat.v1.get_default_graph()
        self.reduction = reduction = GradientReduction(
            strategy, self._sparse_as_dense, self.reduces_at_backward, graph
        )
        reduction.model_knows_size = default.model_knows_size  # if it asked before the training
        try:
            # an error reaches the other ranks first: reducers that close may wait for a peer
            with strategy.propagate_errors(), strategy.scope(), scaled_loss(strategy):
                # the strategy's getter drops partitioners, which the other graphs do not
                tf.compat.v1.get_variable_scope().set_custom_getter(None)
                yield reduction
        finally:
            default.model_knows_size = ""
            self.reduction = default
            reduction.close()

    @contextlib.contextmanager
    def separate_reduction(self) -> Iterator[None]:
        """Scope of operations that are not part of the step of a training graph."""
        reduction = self.reduction
        self.reduction = GradientReduction(self._strategy, self._sparse_as_dense)
        try:
            yield
        finally:
            self.reduction = reduction

    def close_reducers(self) -> None:
        """Ends the threads of the reducers of all graphs built so far."""
        self.reduction.close()
        self._default_reduction.close()

    # -- variables -------------------------------------------------------------------------

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        variable = _like_reference_in_version_1(self._place_variable(next_creator, **kwargs))
        if self.reduction is self._default_reduction and self._size > 1:
            # only the initializer takes rank 0's value: TensorFlow also uses initial_value
            name = f"the initial value of {variable.op.name!r}"
            value = ops.broadcast(variable.initial_value, self._strategy.communicator, name)
            with tf.device(variable.device):
                set_initializer(variable, variable.assign(value, read_value=False))
        return variable

    def _place_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        colocated = kwargs.pop("colocate_with", None)
        if isinstance(colocated, (list, tuple)):  # the devices that non_slot_devices returned
            with tf.device(colocated[0]):
                return next_creator(**kwargs)
        if colocated is not None:  # a slot is placed beside its variable
            with tf.device(None), colocate_with(colocated):
                return next_creator(**kwargs)
        dtype = tf.as_dtype(kwargs.get("dtype") or tf.float32)
        on_host = self.variables_on_host or dtype.is_integer
        is_cached = on_host and kwargs.get("trainable") is not False and dtype.is_floating
        is_chosen = kwargs.get("caching_device") is not None  # by the program
        if is_cached:
            kwargs["caching_device"] = self._device  # [G7]
        with tf.device(HOST_DEVICE if on_host else self._device):
            variable = next_creator(**kwargs)
        if is_cached:
            _read_where_needed(variable, is_chosen)
        return variable

    def read_var(self, replica_local_var: tf.Variable) -> tf.Tensor:
        if isinstance(replica_local_var, DistributedVariable):
            return replica_local_var._get_cross_replica()
        value = tf.identity(replica_local_var)
        if in_functions() or not is_sync_on_read(replica_local_var):
            return value
        mean = replica_local_var.aggregation == tf.VariableAggregation.MEAN
        op = tf.distribute.ReduceOp.MEAN if mean else tf.distribute.ReduceOp.SUM
        return self._reduce_to(op, value, None, None)

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        with tf.device(self._device), ReplicaContext(self._strategy):
            return fn(*args, **kwargs)

    # -- reductions ------------------------------------------------------------------------

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
        is_trained = isinstance(value, tf.Variable) and value.trainable
        is_mirrored = is_trained and not is_sync_on_read(value)
        if self._num_replicas_in_sync == 1 or (is_mean and is_mirrored):
            return value
        tensor = tf.convert_to_tensor(value)
        named = destinations if isinstance(destinations, tf.Variable) else tensor
        return self.reduction.values.reduce(tensor, named.op.name, is_mean)

    def _batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any
    ) -> list[Any]:
        pairs = list(value_destination_pairs)
        if self.reduction.follows_gradients and reduce_op == tf.distribute.ReduceOp.SUM:
            pairs = [  # a program may give accumulators as gradients
                (tf.convert_to_tensor(value) if _are_variables(value, each) else value, each)
                for value, each in pairs
            ]
        if not pairs:  # an optimizer of TensorFlow drops gradients that are None
            raise ValueError(
                "No gradients provided for any variable. Check whether the loss depends on the "
                "variables that are to be trained"
            )
        # an optimizer passes variables as destinations, `all_reduce` of the replica context none
        gradients = [pair for pair in pairs if _is_gradient(*pair)]
        reduced = iter(self.reduction.reduce_pairs(reduce_op, gradients))
        return [
            next(reduced) if _is_gradient(*pair) else self._reduce_value(reduce_op, *pair)
            for pair in pairs
        ]

    def _reduce_value(self, reduce_op: Any, value: Any, destination: Any) -> Any:
        result = self._reduce_to(reduce_op, value, destination, None)
        if isinstance(value, tf.IndexedSlices) and not isinstance(result, tf.IndexedSlices):
            with tf.device(HOST_DEVICE):
                return slices_of(result, value.indices.dtype)
        return result

    # -- updates ---------------------------------------------------------------------------

    def _update(self, var: tf.Variable, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        """Runs the user's optimizer on the device of the variable: [G6]."""
        if var is not tf.compat.v1.train.get_global_step():  # which counts skipped updates too
            fn = self.reduction.skipping.guard(fn)
        return self._on_device(var.device, fn, (var, *args), kwargs, group)

    def _update_non_slot(
        self, colocate_with: Any, fn: Any, args: Any, kwargs: Any, group: bool
    ) -> Any:
        fn = self.reduction.skipping.guard(fn)
        return self._on_device(colocate_with[0], fn, args, kwargs, group)

    def _on_device(self, device: str, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        with tf.device(device), UpdateContext(0):
            result = fn(*select_replica(0, args), **select_replica(0, kwargs))
            return result if group else tf.nest.map_structure(self._local_results, result)

    def non_slot_devices(self, var_list: Any) -> tuple[str]:
        return (HOST_DEVICE if self.variables_on_host else self._device,)

    @property
    def parameter_devices(self) -> tuple[str]:
        return self.non_slot_devices(None)

    # -- refusals --------------------------------------------------------------------------

    def _configure(self, *args: Any, **kwargs: Any) -> None:
        """Refuses the stock Estimator and its coordinator, which call this, with several ranks."""
        if self._size > 1:
            raise hostopt.ConfigError(
                "tf.estimator.Estimator cannot train with a HostOffloadStrategy of "
                f"{self._size} ranks. Use estimator_ext.Estimator, estimator_ext.adopt(estimator) "
                "for a canned one, or start the program with python -m estimator_ext"
            )

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        if not isinstance(colocate_with_variable, tf.Variable):
            raise hostopt.ConfigError(
                f"an optimizer is to be placed beside {colocate_with_variable.name!r}, wanted a "
                "variable: SyncReplicasOptimizer is for workers with parameter servers. Use the "
                "optimizer that it wraps, as gradients are reduced over all ranks anyway"
            )
        super()._validate_colocate_with_variable(colocate_with_variable)


class ReplicaContext(OneDeviceReplicaContext):
    """Context of a model_fn, in which `all_reduce` reduces over the ranks.

    The gradient of TensorFlow's own `all_reduce` would count each rank once.
    """

    def __init__(self, strategy: Any, replica: int = 0) -> None:
        tf.distribute.ReplicaContext.__init__(self, strategy, replica)

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Reduces tensors over the ranks, as `tf.distribute.ReplicaContext.all_reduce` does."""
        if isinstance(reduce_op, str):
            reduce_op = tf.distribute.ReduceOp(reduce_op.upper())

        def reduce(strategy: Any, *values: Any) -> Any:
            pairs = [(each, None) for each in values]
            return strategy.extended.batch_reduce_to(reduce_op, pairs, options)

        tensors = [
            each if isinstance(each, tf.IndexedSlices) else tf.convert_to_tensor(each)
            for each in tf.nest.flatten(value)
        ]
        if not tensors:
            return value
        return tf.nest.pack_sequence_as(value, self.merge_call(reduce, args=tensors))


def in_functions() -> bool:
    """Returns True eagerly and in functions, False in a graph of TensorFlow 1."""
    return bool(tf.compat.v1.executing_eagerly_outside_functions())


def _is_gradient(value: Any, destination: Any) -> bool:
    return isinstance(destination, tf.Variable) and not isinstance(value, tf.Variable)


def _are_variables(*values: Any) -> bool:
    return all(isinstance(each, tf.Variable) for each in values)


# -- reads of variables ----------------------------------------------------------------------


def _read_where_needed(variable: Any, always_cached: bool) -> None:
    """Makes tapes record each read of a variable, and reads it again under control dependencies.

    TensorFlow returns the same cached tensor for each read. It is older than any GradientTape, so
    the tape would not know it as the value of the variable, and the gradient would be None. It is
    also older than any update, so a read after an update would return the old value. Within a
    branch, a loop or a function, a tape of the graph around it would see only the old tensor. With
    `always_cached` the program has chosen the device, and gets the cached value as in TensorFlow.
    """
    cached_value = variable.value

    def value() -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        if not always_cached and control_dependencies_of(graph):
            return variable.read_value()
        if is_recording() and graph is not variable.handle.graph:
            return variable.read_value()
        cached = cached_value()
        if not is_recording():
            return cached
        variable_accessed(variable)
        with tf.device(cached.device):
            result = tf.identity(cached)  # a tape needs a new tensor for each read
        record_operation(
            "ReadVariableOp",
            [result],
            [variable.handle],
            backward_function=lambda gradient: [gradient],
            forward_function=lambda tangent: [tangent],
        )
        return result

    variable.value = value


class _LikeReference(ResourceVariable):
    """A variable with what programs read of a reference variable of TensorFlow 1."""

    def __bool__(self) -> bool:  # true without being read
        return True

    def _ref(self) -> tf.Tensor:
        return self.value()


def _like_reference_in_version_1(variable: Any) -> Any:
    """Makes `average if average else variable` choose in TensorFlow 1 as it does without ranks.

    A strategy always creates resource variables, whose truth is that of their value.
    """
    if not tf.compat.v1.resource_variables_enabled() and type(variable) is ResourceVariable:
        variable.__class__ = _LikeReference
    return variable
