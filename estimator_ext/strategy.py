"""HostOffloadStrategy: one replica a process, variables on the host, gradients over the ring."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, input_lib
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended
from tensorflow.python.distribute.v1 import input_lib as input_lib_v1
from tensorflow.python.framework.ops import colocate_with as colocate_with_op

import hostopt
from estimator_ext.accumulation import Accumulation
from estimator_ext.skipped_updates import SkippedUpdates
from estimator_ext.sync_on_read import is_sync_on_read
from estimator_ext.uneven_data import BatchWeights
from hostopt.connect import exit_with_error_code
from hostopt.nonfinite import NonFiniteCheck
from hostopt.tensorflow import ops
from hostopt.tensorflow.ops import HOST_DEVICE

__all__: list[str] = []

VIRTUAL_ACCELERATOR = "/device:CPU:1"
# Inter-op threads beyond the cores: the waits for the ring and the loss must starve nobody.
_WAITING_THREADS = 2


class HostOffloadStrategy(tf.compat.v1.distribute.Strategy):
    """Synchronous data parallelism in which the host holds variables, slots and reductions.

    Forward and backward run on the accelerator of this process. Gradients are summed over the
    ranks of the cluster, on the host, while backward goes on, and the optimizer updates the
    variables there.

    Args:
      cluster_resolver: names the ring and this task, such as
        `tf.distribute.cluster_resolver.TFConfigClusterResolver()`; TF_CONFIG by default.
      variables_on_host: True keeps variables and slots in host memory, with a copy of each
        trainable variable cached on the accelerator for a step; False keeps them on the
        accelerator.
      accelerator: device of forward and backward; the first GPU by default, and where there is
        none the virtual accelerator, the second CPU device of the session.
      communication: "auto" reduces in shared memory among ranks of one host and over gRPC between
        hosts; "grpc" uses gRPC alone; "shm" is an error where a host's ranks cannot share memory.
      bucket_mb: size of a gradient bucket in MiB; its bytes are a multiple of 128.
      compression: "fp16" or "bf16" halves float32 gradients on the wire between hosts; None sends
        them whole. Sums are made in float32.
      sparse_as_dense: True makes sparse gradients (`tf.IndexedSlices`) dense before they travel;
        False sends the rows that each rank has to all ranks, uncompressed.
      rendezvous_timeout_s: how long to wait for all ranks to appear.
      stall_warning_s: a rank that waits longer says for whom.
      collective_timeout_s: a rank that waits longer without progress gives up.
      checksum: True has a checksum of its data travel with each message; None does so where a peer
        is reached over a network without TLS, and not where all addresses are loopback ones.
      nonfinite: what happens where a reduced gradient holds NaN or Inf. "error" ends the training,
        "skip" leaves the step's update out on all ranks, "warn" says so and goes on.
      desync_check_steps: every so many steps the ranks compare their variables; 0 for never.
      token_file: file that holds the token which all ranks share, readable by its owner alone; the
        variable HOSTOPT_TOKEN may hold the token itself instead.
      tls_dir: directory with ca.pem, cert.pem and key.pem, for mutual TLS between the ranks.
      insecure: True lets ranks on several machines meet without token and TLS.

    Raises:
      hostopt.ConfigError: the resolver, TF_CONFIG or an option cannot be used.
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        variables_on_host: bool = True,
        accelerator: str | None = None,
        *,
        communication: str = "auto",
        bucket_mb: float = 25.0,
        compression: str | None = None,
        sparse_as_dense: bool = False,
        rendezvous_timeout_s: float = 300.0,
        stall_warning_s: float = 30.0,
        collective_timeout_s: float = 300.0,
        checksum: bool | None = None,
        nonfinite: str = "error",
        desync_check_steps: int = 1000,
        token_file: str | None = None,
        tls_dir: str | None = None,
        insecure: bool = False,
    ) -> None:
        exit_with_error_code()
        self.cluster = hostopt.Cluster.from_resolver(cluster_resolver)
        self.options = hostopt.Options(
            communication=communication,
            bucket_mb=bucket_mb,
            compression=compression,
            rendezvous_timeout_s=rendezvous_timeout_s,
            stall_warning_s=stall_warning_s,
            collective_timeout_s=collective_timeout_s,
            checksum=checksum,
            nonfinite=nonfinite,
            desync_check_steps=desync_check_steps,
            token_file=token_file,
            tls_dir=tls_dir,
            insecure=insecure,
        ).with_environment()
        device = accelerator or _find_accelerator(self.cluster)
        super().__init__(
            _HostOffloadExtended(
                self, device, variables_on_host, sparse_as_dense, cluster_resolver
            )
        )
        self._communicator: hostopt.Communicator | None = None
        self._told: BaseException | None = None
        self._connecting = threading.Lock()

    @property
    def communicator(self) -> hostopt.Communicator:
        """The ring; the first access meets the other ranks and waits for them."""
        with self._connecting:
            if self._communicator is None:
                self._communicator = hostopt.connect(self.cluster, self.options)
            return self._communicator

    @property
    def accelerator(self) -> str:
        """Device of forward and backward."""
        return self.extended.worker_devices[0]

    def update_config_proto(
        self, config_proto: tf.compat.v1.ConfigProto
    ) -> tf.compat.v1.ConfigProto:
        """Give a session what this strategy needs.

        Args:
          config_proto: configuration of a session, or None.

        Returns:
          A copy with the virtual accelerator, where it is used, and with threads enough of its
          own that waiting for the ring does not hold up backward; an evaluator sees no GPU.
        """
        config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
        if config_proto is not None:
            config.CopyFrom(config_proto)
        device = tf.DeviceSpec.from_string(self.accelerator)
        if device.device_type == "CPU":
            config.device_count["CPU"] = max(config.device_count["CPU"], device.device_index + 1)
        if self.cluster.role == "evaluator":
            config.device_count["GPU"] = 0
        elif self.cluster.size > 1 and not config.inter_op_parallelism_threads:
            config.inter_op_parallelism_threads = _threads_with_waiting_ones()
            config.use_per_session_threads = True
        return config

    def training_config(self, config_proto: tf.compat.v1.ConfigProto) -> tf.compat.v1.ConfigProto:
        """`update_config_proto` for a training session, when it is known how the ranks reduce.

        Args:
          config_proto: configuration of a session, or None.

        Returns:
          A copy; where all ranks share memory, without threads that wait, as none has to: more
          threads than cores slow a step down.
        """
        config = self.update_config_proto(config_proto)
        added = config.inter_op_parallelism_threads == _threads_with_waiting_ones()
        if added and config.use_per_session_threads and self.communicator.on_one_host:
            config.ClearField("inter_op_parallelism_threads")
            config.ClearField("use_per_session_threads")
        return config

    def record_timeline(self, path: str) -> None:
        """Record a timeline from the time when this rank meets the others.

        Args:
          path: what `Options.timeline` says; HOSTOPT_TIMELINE overrides it.

        Raises:
          hostopt.ConfigError: the ranks have met already, with another timeline or none.
        """
        options = dataclasses.replace(self.options, timeline=path).with_environment()
        if self._communicator is not None and options != self.options:
            raise hostopt.ConfigError(
                f"timeline {options.timeline!r} is given to a strategy that has met the other "
                f"ranks with timeline {self.options.timeline!r}. Make the RunConfig first"
            )
        self.options = options

    def leave_records_in(self, model_dir: str) -> None:
        """Have an abort leave stacks and last events in a directory, if no option names another.

        Args:
          model_dir: of the training; one that is no local path gets none.
        """
        if self.options.debug_dir is None and "://" not in model_dir:
            recorder = self.communicator.transport.recorder
            recorder.directory = os.path.join(model_dir, "hostopt-debug")

    @contextlib.contextmanager
    def errors_told(self) -> Iterator[None]:
        """Tell the other ranks of an error that leaves the block, and raise what they report.

        TensorFlow turns an error of the ring into one of its own; the error that comes out of
        this block is the first one, typed.

        Yields:
          Nothing.

        Raises:
          hostopt.HostOptError: the ring has failed, whatever TensorFlow made of it.
        """
        try:
            yield
        except hostopt.HostOptError as error:
            self._abort(error)
            raise
        except BaseException as error:
            root = self._communicator.transport.error if self._communicator else None
            if error is self._told:  # by a block inside of this one
                raise
            if root is not None and isinstance(error, (tf.errors.OpError, RuntimeError)):
                raise root from error
            self._abort(error)
            raise

    def _abort(self, error: BaseException) -> None:
        self._told = error
        if self._communicator is not None:
            self._communicator.abort(error)

    def close(self) -> None:
        """Leave the ring in good order; the next access to `communicator` meets it again."""
        with self._connecting:
            self.extended.close_reducers()
            if self._communicator is not None:
                self._communicator.close()
                self._communicator = None

    def __deepcopy__(self, memo: object) -> HostOffloadStrategy:
        return self  # Estimator copies its configuration; a copy still talks over one ring


class _HostOffloadExtended(OneDeviceExtended):
    """One replica on `device`; variables and reductions on the host.

    Args:
      strategy: the strategy that users hold.
      device: the accelerator.
      variables_on_host: False keeps variables on the accelerator.
      sparse_as_dense: True makes sparse gradients dense.
      cluster_resolver: what the user named the cluster with.
    """

    def __init__(
        self,
        strategy: HostOffloadStrategy,
        device: str,
        variables_on_host: bool,
        sparse_as_dense: bool,
        cluster_resolver: Any,
    ) -> None:
        super().__init__(strategy, device)
        self._variables_on_host = variables_on_host
        self._sparse_as_dense = sparse_as_dense
        self._cluster_resolver = cluster_resolver
        self._reducers: list[Any] = []
        self._reduced: dict[Any, tf.Tensor] = {}  # gradients by variable; not to be reduced again
        self._forget_training()

    def _forget_training(self) -> None:
        """What belongs to the training graph that is built."""
        self._initialise_together = True
        self._sums: list[tf.Tensor] = []  # of the gradients
        self._skipping = SkippedUpdates()
        self.flags = ops.Flags()
        self.accumulation: Accumulation | None = None
        self.weights: BatchWeights | None = None

    @property
    def _strategy(self) -> HostOffloadStrategy:
        return self._container_strategy()

    @contextlib.contextmanager
    def training_graph(self) -> Iterator[None]:
        """Scope of an Estimator's graph: scaled losses, initializers of its own, one life.

        Yields:
          Nothing.
        """
        strategy = self._strategy
        self._initialise_together = False  # a hook broadcasts, after a restore too
        try:
            # an error is told before the reducers are closed, which may be waiting for a peer
            scaled = strategy._scale_loss_for_estimator_enabled()
            with strategy.errors_told(), strategy.scope(), scaled:
                yield
        finally:
            self._reduced.clear()
            self._forget_training()
            self.close_reducers()

    @property
    def reducers(self) -> tuple[Any, ...]:
        """What sums the gradients of the graphs built so far."""
        return tuple(self._reducers)

    def close_reducers(self) -> None:
        """End the communication threads of the graphs built so far."""
        for reducer in self._reducers:
            reducer.close()
        self._reducers.clear()

    # -- variables -------------------------------------------------------------------------

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        variable = self._place_variable(next_creator, **kwargs)
        if self._initialise_together and self._num_replicas_in_sync > 1:
            # only the initializer asks rank 0: TensorFlow also uses initial_value by itself
            what = f"the initial value of {variable.op.name!r}"
            value = ops.broadcast(variable.initial_value, self._strategy.communicator, what=what)
            with tf.device(variable.device):
                variable._initializer_op = variable.assign(value, read_value=False)
        return variable

    def _place_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        colocate_with = kwargs.pop("colocate_with", None)
        if isinstance(colocate_with, (list, tuple)):  # what non_slot_devices returned
            with tf.device(colocate_with[0]):
                return next_creator(**kwargs)
        if colocate_with is not None:  # a slot, beside its variable
            with tf.device(None), colocate_with_op(colocate_with):
                return next_creator(**kwargs)
        dtype = tf.as_dtype(kwargs.get("dtype") or tf.float32)
        on_host = self._variables_on_host or dtype.is_integer
        if on_host and kwargs.get("trainable") is not False and dtype.is_floating:
            kwargs["caching_device"] = self._device  # 7. read once a step, for the forward pass
        with tf.device(HOST_DEVICE if on_host else self._device):
            return next_creator(**kwargs)

    def read_var(self, replica_local_var: tf.Variable) -> tf.Tensor:
        value = tf.identity(replica_local_var)
        if not is_sync_on_read(replica_local_var):
            return value
        mean = replica_local_var.aggregation == tf.VariableAggregation.MEAN
        op = tf.distribute.ReduceOp.MEAN if mean else tf.distribute.ReduceOp.SUM
        return self._reduce_to(op, value, None, None)

    # -- reductions ------------------------------------------------------------------------

    def reduce_loss(self, reduce_op: Any, loss: tf.Tensor) -> tf.Tensor:
        """Reduce what is only reported, at a moment when it holds up nothing.

        Args:
          reduce_op: a `tf.distribute.ReduceOp`.
          loss: the loss of this rank.

        Returns:
          The reduced loss. It is read after the gradients, for which the ranks have waited anyway.
        """
        size = self._num_replicas_in_sync
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        weight = self._weight(mean)
        if weight is not None:
            factor = tf.cast(weight, loss.dtype)
            loss = tf.where(tf.equal(factor, 0), tf.zeros_like(loss), loss * factor)
        if size > 1 and self._sums and loss.dtype == tf.float32 and loss.shape.rank == 0:
            communicator = self._strategy.communicator
            total = ops.sum_posted(loss, communicator, self._sums, self.flags)
            return total / size if mean else total
        return self._strategy.reduce(reduce_op, loss, axis=None)

    def _weight(self, of_mean: bool) -> tf.Tensor | None:
        """What this rank's gradients and loss count in a step; None where all ranks count 1."""
        if self.weights is None:
            return None
        return self.weights.in_mean if of_mean else self.weights.in_sum

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        del destinations, options
        if self._num_replicas_in_sync == 1:
            return value
        live = [] if self.weights is None else [self.weights.in_mean]
        with tf.control_dependencies(live):  # nothing travels in a step that has no data
            tensor = tf.identity(tf.convert_to_tensor(value))
        total = ops.all_reduce(tensor, self._strategy.communicator)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            total = tf.math.divide(total, tf.cast(self._num_replicas_in_sync, total.dtype))
        return total

    def _batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any
    ) -> list[Any]:
        del options
        return self._reduce_pairs(reduce_op, list(value_destination_pairs))

    def reduce_now(
        self, pairs: Sequence[tuple[Any, tf.Variable]], nonfinite: str | None
    ) -> list[Any]:
        """Sum gradients; the next reduction passes on, as it is, what is made of the sums.

        Args:
          pairs: gradients and their variables.
          nonfinite: as for `hostopt.nonfinite.NonFiniteCheck`.

        Returns:
          The sums.
        """
        sums = self._reduce_pairs(tf.distribute.ReduceOp.SUM, pairs, nonfinite)
        self._reduced.update(
            (v.ref(), getattr(total, "values", total)) for total, (_, v) in zip(sums, pairs)
        )
        return sums

    def _reduce_pairs(
        self, reduce_op: Any, pairs: Sequence[tuple[Any, Any]], nonfinite: str | None = None
    ) -> list[Any]:
        """2-5. Gradients to the host, through the ring, and back as sums or means."""
        results = [value for value, _ in pairs]
        left = [i for i, pair in enumerate(pairs) if not self._take_reduced(*pair)]
        names = [_name(pairs[i][1], i) for i in left]
        sums = self._sum([results[i] for i in left], names, nonfinite)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            with tf.device(HOST_DEVICE):
                sums = [_divided(total, self._num_replicas_in_sync) for total in sums]
        for i, total in zip(left, sums):
            results[i] = total
        return results

    def _take_reduced(self, value: Any, destination: Any) -> bool:
        reference = destination.ref() if isinstance(destination, tf.Variable) else None
        total = self._reduced.pop(reference, None)
        return total is not None and _is_made_of(getattr(value, "values", value), total)

    def _sum(
        self, values: Sequence[Any], names: Sequence[str], nonfinite: str | None
    ) -> list[Any]:
        """Sums over the ranks, of gradients that are dense or sparse."""
        if not values:
            return []
        sparse = [isinstance(value, tf.IndexedSlices) for value in values]
        if self._sparse_as_dense or self.accumulation is not None:
            values = [tf.convert_to_tensor(value) for value in values]
            sparse = [False] * len(values)
        if self.accumulation is not None:
            values = [self.accumulation.mean(v, name) for v, name in zip(values, names)]
        communicator = self._strategy.communicator
        check = NonFiniteCheck(communicator, nonfinite)
        weight = self._weight(of_mean=loss_is_scaled())
        dense = [i for i, is_sparse in enumerate(sparse) if not is_sparse]
        results = dict(enumerate(values))
        sums: list[tf.Tensor] = []
        if dense:
            sums, reducer = ops.reduce_in_buckets(
                [tf.convert_to_tensor(values[i]) for i in dense],
                [names[i] for i in dense],
                communicator,
                weight,
                self._sums,
                check,
            )
            results.update(zip(dense, sums))
            if reducer is not None:
                self._reducers.append(reducer)
                self._sums = [*self._sums, *sums]
        # with one rank too: clipping by norm wants each row once; and where this rank has none,
        # another one may have some
        rows = [i for i, is_sparse in enumerate(sparse) if is_sparse]
        slices = [_weighted(values[i], weight) for i in rows]
        found = ops.sum_slices(slices, [names[i] for i in rows], communicator, self._sums, check)
        results.update(zip(rows, found))
        if check.nonfinite == "skip":
            self._skipping.watch(check, [getattr(r, "values", r) for r in results.values()])
        return [results[i] for i in range(len(values))]

    def _update(self, var: tf.Variable, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        """6. The user's optimizer, where the variable is."""
        if var is tf.compat.v1.train.get_global_step():  # it counts the steps without update too
            return self._on_device(var.device, fn, (var, *args), kwargs, group)
        return self._on_device(var.device, self._skipping.guard(fn), (var, *args), kwargs, group)

    def _update_non_slot(
        self, colocate_with: Any, fn: Any, args: Any, kwargs: Any, group: bool
    ) -> Any:
        return self._on_device(colocate_with[0], self._skipping.guard(fn), args, kwargs, group)

    def _on_device(self, device: str, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        with tf.device(device), distribute_lib.UpdateContext(device):
            result = fn(*args, **kwargs)
            return result if group else tf.nest.map_structure(self._local_results, result)

    def non_slot_devices(self, var_list: Any) -> tuple[str]:
        del var_list
        return (HOST_DEVICE if self._variables_on_host else self._device,)

    # -- input -----------------------------------------------------------------------------

    def input_context(self) -> tf.distribute.InputContext:
        """Which part of the input this rank reads."""
        size = self._num_replicas_in_sync
        return tf.distribute.InputContext(size, self._strategy.cluster.rank or 0, size)

    def _input_workers_with_options(self, options: Any = None) -> input_lib.InputWorkers:
        del options  # batches stay on the host until the accelerator reads them
        return input_lib.InputWorkers([(HOST_DEVICE, (HOST_DEVICE,))])

    def _make_input_fn_iterator(self, input_fn: Any, replication_mode: Any = None) -> Any:
        del replication_mode  # one replica a worker: both modes are the same
        return input_lib_v1.InputFunctionIterator(
            input_fn, self._input_workers, [self.input_context()], self._container_strategy()
        )

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        return self._distributed(input_lib.DistributedDataset, input_lib_v1.DistributedDatasetV1)(
            dataset=dataset,
            input_workers=self._input_workers_with_options(options),
            strategy=self._container_strategy(),
            num_replicas_in_sync=self._num_replicas_in_sync,
            input_context=self.input_context(),
            options=options,
        )

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        return self._distributed(
            input_lib.DistributedDatasetsFromFunction,
            input_lib_v1.DistributedDatasetsFromFunctionV1,
        )(
            input_workers=self._input_workers_with_options(options),
            strategy=self._container_strategy(),
            input_contexts=[self.input_context()],
            dataset_fn=dataset_fn,
            options=options,
        )

    @staticmethod
    def _distributed(eager: Any, graph: Any) -> Any:
        """The kind of dataset that can be iterated where this is called."""
        return eager if tf.compat.v1.executing_eagerly_outside_functions() else graph

    # -- facts -----------------------------------------------------------------------------

    def _configure(self, *args: Any, **kwargs: Any) -> None:
        """Called by the stock Estimator and its coordinator only: not for several ranks."""
        if self._num_replicas_in_sync > 1:
            raise hostopt.ConfigError(
                "tf.estimator.Estimator cannot train with a HostOffloadStrategy of "
                f"{self._num_replicas_in_sync} ranks. Use estimator_ext.Estimator, which takes "
                "the same arguments; a canned estimator has them as model_fn and config"
            )

    def _in_multi_worker_mode(self) -> bool:
        return False  # or TensorFlow would wrap each value, though there is one replica only

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._strategy.cluster.size

    @property
    def parameter_devices(self) -> tuple[str]:
        return self.non_slot_devices(None)

    @property
    def experimental_between_graph(self) -> bool:
        return True

    @property
    def should_checkpoint(self) -> bool:
        return self._strategy.cluster.is_chief

    @property
    def should_save_summary(self) -> bool:
        return self._strategy.cluster.is_chief


def _threads_with_waiting_ones() -> int:
    return len(os.sched_getaffinity(0)) + _WAITING_THREADS


def _find_accelerator(cluster: hostopt.Cluster) -> str:
    if cluster.role == "evaluator":  # must not even look for a GPU
        return HOST_DEVICE
    return "/device:GPU:0" if tf.config.list_physical_devices("GPU") else VIRTUAL_ACCELERATOR


def loss_is_scaled() -> bool:
    """Whether the optimizer divides the loss by the number of ranks, as for a mean.

    Returns:
      True where it does in the default graph.
    """
    return getattr(tf.compat.v1.get_default_graph(), "_is_loss_scaled_by_optimizer", False)


def _is_made_of(value: tf.Tensor, part: tf.Tensor) -> bool:
    """Whether a tensor depends on another one; taken for granted where a branch has its own."""
    if value.graph is not part.graph:
        return True
    seen, todo = {value.op}, [value.op]
    while todo:
        op = todo.pop()
        if op is part.op:
            return True
        inputs = {tensor.op for tensor in op.inputs} - seen
        seen |= inputs
        todo += inputs
    return False


def _divided(total: Any, count: int) -> Any:
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(total.values / count, total.indices, total.dense_shape)
    return total / count


def _weighted(slices: tf.IndexedSlices, weight: tf.Tensor | None) -> tf.IndexedSlices:
    """A sparse gradient that counts by a weight; none of its rows where that is 0."""
    if weight is None:
        return slices
    with tf.device(HOST_DEVICE):
        rows = tf.where(tf.equal(weight, 0), 0, tf.shape(slices.indices)[0])
        values = slices.values[:rows] * tf.cast(weight, slices.values.dtype)
        return tf.IndexedSlices(values, slices.indices[:rows], slices.dense_shape)


def _name(destination: Any, index: int) -> str:
    return destination.op.name if isinstance(destination, tf.Variable) else f"value_{index}"
