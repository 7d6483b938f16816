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
from tensorflow.python.distribute.one_device_strategy import (
    OneDeviceExtended,
    _OneDeviceReplicaContext,
)
from tensorflow.python.distribute.v1 import input_lib as input_lib_v1
from tensorflow.python.framework.ops import colocate_with as colocate_with_op

import hostopt
from estimator_ext.accumulation import Accumulation
from estimator_ext.cached_reads import read_where_needed
from estimator_ext.conditional_reductions import refuse_reductions_of_some_ranks
from estimator_ext.deferred_reductions import DeferredReductions
from estimator_ext.fingerprint import Updates
from estimator_ext.gradient_marks import marks_of_graph
from estimator_ext.graph import data_before, depends_on, operations_before, walk
from estimator_ext.sharding import check_policy
from estimator_ext.skipped_updates import SkippedUpdates
from estimator_ext.sync_on_read import is_sync_on_read
from estimator_ext.uneven_data import BatchWeights
from hostopt.connect import exit_with_error_code
from hostopt.nonfinite import NonFiniteCheck
from hostopt.options import shown
from hostopt.tensorflow import ops
from hostopt.tensorflow.background import HOST_DEVICE
from hostopt.tensorflow.reductions import (
    AnyReducer,
    Reduction,
    check_gradients,
    reduce_together,
)

__all__: list[str] = []

VIRTUAL_ACCELERATOR = "/device:CPU:1"
_MOST_DEVICES = 1023  # a session makes all CPU devices up to the one that is named


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
      auto_shard: how TensorFlow divides the dataset of an input_fn that has no argument
        input_context. "data": each rank reads all of it and keeps its part; "file": each rank
        reads its part of the files; "off": each rank has all data. None does as "off" and warns.
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
      evaluator_timeout_s: an evaluator that sees nothing of the chief for longer gives up.

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
        auto_shard: str | None = None,
        rendezvous_timeout_s: float = 300.0,
        stall_warning_s: float = 30.0,
        collective_timeout_s: float = 300.0,
        checksum: bool | None = None,
        nonfinite: str = "error",
        desync_check_steps: int = 1000,
        token_file: str | None = None,
        tls_dir: str | None = None,
        insecure: bool = False,
        evaluator_timeout_s: float = 3600.0,
    ) -> None:
        exit_with_error_code()
        check_policy(auto_shard)
        _check_flag("variables_on_host", variables_on_host)
        _check_flag("sparse_as_dense", sparse_as_dense)
        if accelerator is not None:
            _check_device(accelerator)
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
            evaluator_timeout_s=evaluator_timeout_s,
        ).with_environment()
        device = accelerator or _find_accelerator(self.cluster)
        super().__init__(
            _HostOffloadExtended(
                self, device, variables_on_host, sparse_as_dense, auto_shard, cluster_resolver
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
          A copy with the virtual accelerator, if it is used; an evaluator sees no GPU.
        """
        config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
        if config_proto is not None:
            config.CopyFrom(config_proto)
        device = tf.DeviceSpec.from_string(self.accelerator)
        if device.device_type == "CPU":
            config.device_count["CPU"] = max(config.device_count["CPU"], device.device_index + 1)
        if self.cluster.role == "evaluator":
            config.device_count["GPU"] = 0
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
      auto_shard: how datasets are divided that input_fn does not divide.
      cluster_resolver: what the user named the cluster with.
    """

    def __init__(
        self,
        strategy: HostOffloadStrategy,
        device: str,
        variables_on_host: bool,
        sparse_as_dense: bool,
        auto_shard: str | None,
        cluster_resolver: Any,
    ) -> None:
        super().__init__(strategy, device)
        self.auto_shard = auto_shard
        self._variables_on_host = variables_on_host
        self._sparse_as_dense = sparse_as_dense
        self._cluster_resolver = cluster_resolver
        self._reducers: list[Any] = []
        self._reduced: dict[Any, tf.Tensor] = {}  # gradients by variable; not to be reduced again
        # True for programs that know nothing of ranks: what they make of gradients, such as
        # clipping, is to see those of all ranks, also where their optimizer would reduce later
        self.reduces_at_backward = False
        self._forget_training()

    def _forget_training(self) -> None:
        """What belongs to the training graph that is built."""
        self._initialise_together = True
        self.model_knows_size = False  # it has asked for it, and may scale its loss by it
        self.deferred: DeferredReductions | None = None
        self._skipping = SkippedUpdates()
        self.flags = ops.Flags()
        self.accumulation: Accumulation | None = None
        self.sums: set[tf.Operation] = set()  # of one rank's micro-batches
        self.weights: BatchWeights | None = None
        self._loss_weight: tf.Tensor | None = None

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
        if self._num_replicas_in_sync > 1:
            graph = tf.compat.v1.get_default_graph()
            self.deferred = DeferredReductions(strategy.communicator, graph, self.flags)
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
    def uses_gradients_of_graph(self) -> bool:
        """Whether it matters where the training graph computes its gradients."""
        is_alone = self._num_replicas_in_sync == 1 and self.accumulation is None
        return not is_alone or self._strategy.options.nonfinite == "skip"

    def check_skipped(self, updates: Updates) -> None:
        """Makes sure that updates can be left out, if the option `nonfinite` asks for it."""
        if self._strategy.options.nonfinite == "skip":
            self._skipping.check(updates)

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
        cached = on_host and kwargs.get("trainable") is not False and dtype.is_floating
        is_chosen = kwargs.get("caching_device") is not None  # by the program
        if cached:
            kwargs["caching_device"] = self._device  # 7. read once a step, for the forward pass
        with tf.device(HOST_DEVICE if on_host else self._device):
            variable = next_creator(**kwargs)
        if cached:
            read_where_needed(variable, is_chosen)
        return variable

    def read_var(self, replica_local_var: tf.Variable) -> tf.Tensor:
        value = tf.identity(replica_local_var)
        if not is_sync_on_read(replica_local_var):
            return value
        mean = replica_local_var.aggregation == tf.VariableAggregation.MEAN
        op = tf.distribute.ReduceOp.MEAN if mean else tf.distribute.ReduceOp.SUM
        return self._reduce_to(op, value, None, None)

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        with tf.device(self._device), _ReplicaContext(self._container_strategy()):
            return fn(*args, **kwargs)

    # -- reductions ------------------------------------------------------------------------

    def build_step(
        self,
        targets: Sequence[tf.Operation],
        is_same: Callable[[tf.Tensor], bool],
        loss: tf.Tensor,
        is_mean: bool,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Builds what `deferred` has noted, and the reduction of the loss.

        All ranks call this together.

        Args:
          targets: what runs in each step.
          is_same: whether all ranks have the same value of a tensor.
          loss: the loss of this rank.
          is_mean: True for the mean over the ranks, False for the sum.

        Returns:
          The reduced loss, and tensors that are there once all reductions have been made.
        """
        loss = self._weighted_loss(loss, is_mean)
        if self._loss_weight is not None:
            self._loss_weight.op._update_input(0, self.weight(is_mean))
        deferred, self.deferred = self.deferred, None  # what comes later is built at once
        if deferred is None:
            return loss, []
        loss = tf.reshape(loss, [])  # its shape may not be known: [] or, as in stock, [1]
        op = hostopt.ReduceOp.AVERAGE if is_mean else hostopt.ReduceOp.SUM
        reduction = Reduction(loss, "the loss", op, is_gradient=False)
        targets = [*targets, *([] if self.weights is None else [self.weights.in_mean.op])]
        repeated = [] if self.accumulation is None else self.accumulation.additions
        refuse_reductions_of_some_ranks(operations_before(targets), is_same)
        if self.weights is not None:
            deferred.refuse_before(repeated)
        self._take_reducers(deferred.build(targets, is_same, reduction, repeated))
        if deferred.loss is not None:
            return deferred.loss, deferred.last_results
        return self._reduce_loss(loss, is_mean, deferred.last_results), deferred.last_results

    def _weighted_loss(self, loss: tf.Tensor, is_mean: bool) -> tf.Tensor:
        weight = self.weight(is_mean)
        if weight is None:
            return loss
        factor = tf.cast(weight, loss.dtype)
        return tf.where(tf.equal(factor, 0), tf.zeros_like(loss), loss * factor)

    def _reduce_loss(self, loss: tf.Tensor, is_mean: bool, last: Sequence[tf.Tensor]) -> tf.Tensor:
        """Read after the gradients, for which the ranks have waited anyway."""
        if last and loss.dtype == tf.float32 and loss.shape.rank == 0:
            communicator = self._strategy.communicator
            total = ops.sum_posted(loss, "the loss", communicator, last, self.flags)
            return total / self._num_replicas_in_sync if is_mean else total
        return self._reduce_tensor(loss, "the loss", is_mean)

    def weight(self, of_mean: bool) -> tf.Tensor | None:
        """What this rank's gradients and loss count in a step; None if all ranks count 1."""
        if self.weights is None:
            return None
        return self.weights.in_mean if of_mean else self.weights.in_sum

    def _weight_of_loss(self) -> tf.Tensor:
        """The weight of this rank's loss; whether it is part of a mean is known in the end."""
        if self._loss_weight is None:
            weight = self.weights.in_mean
            with weight.graph.as_default(), tf.control_dependencies(None), tf.device(HOST_DEVICE):
                self._loss_weight = tf.raw_ops.PlaceholderWithDefault(input=weight, shape=[])
        return self._loss_weight

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        del options
        is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
        if self._num_replicas_in_sync == 1 or (is_mean and _is_mirrored(value)):
            return value
        tensor = tf.convert_to_tensor(value)
        return self._reduce_differentiably(tensor, _name(destinations, tensor), is_mean)

    def _reduce_differentiably(self, tensor: tf.Tensor, name: str, is_mean: bool) -> tf.Tensor:
        """A reduction whose gradient is that of `all_reduce`: the cotangent, reduced alike."""
        if not tensor.dtype.is_floating:
            return self._reduce_tensor(tensor, name, is_mean)

        def gradient(cotangent: Any) -> tf.Tensor:
            cotangent = tf.convert_to_tensor(cotangent)
            if self.weights is None:
                return self._reduce_differentiably(cotangent, f"{name}/gradient", is_mean)
            # the losses of other ranks count by their examples; what this rank makes of the
            # result will be multiplied by its own weight
            weight = tf.cast(self._weight_of_loss(), cotangent.dtype)
            weighted = tf.math.multiply_no_nan(cotangent, weight)
            total = self._reduce_differentiably(weighted, f"{name}/gradient", is_mean)
            return tf.math.divide_no_nan(total, weight)

        @tf.custom_gradient
        def reduce(value: tf.Tensor) -> Any:
            return self._reduce_tensor(value, name, is_mean), gradient

        with tf.device(HOST_DEVICE):
            return reduce(tensor)

    def _reduce_tensor(self, tensor: tf.Tensor, name: str, is_mean: bool) -> tf.Tensor:
        with tf.control_dependencies([] if self.weights is None else [self.weights.in_mean]):
            tensor = tf.identity(tensor)  # nothing travels in a step that has no data
        op = hostopt.ReduceOp.SUM
        if is_mean and tensor.dtype.is_floating:
            op, is_mean = hostopt.ReduceOp.AVERAGE, False
        reduction = Reduction(tensor, name, op, is_gradient=False)
        can_take = self.deferred is not None and self.deferred.can_take([tensor])
        if can_take and tensor.shape.is_fully_defined():
            total = self.deferred.add(reduction)
        else:
            total = ops.all_reduce(tensor, self._strategy.communicator, op, name)
            if can_take:
                self.deferred.add_built(total)
        size = tf.cast(self._num_replicas_in_sync, total.dtype)
        return tf.math.divide(total, size) if is_mean else total

    def _batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any
    ) -> list[Any]:
        del options
        pairs = list(value_destination_pairs)
        if not pairs:  # what an optimizer of TensorFlow makes of gradients that are all None
            raise ValueError(
                "No gradients provided for any variable. Look whether the loss depends on the "
                "variables that are to be trained"
            )
        # an optimizer passes variables as destinations, `all_reduce` of the replica context none
        gradients = [pair for pair in pairs if _is_gradient(*pair)]
        reduced = iter(self._reduce_pairs(reduce_op, gradients))
        return [
            next(reduced) if _is_gradient(*pair) else self._reduce_value(reduce_op, *pair)
            for pair in pairs
        ]

    def _reduce_value(self, reduce_op: Any, value: Any, destination: Any) -> Any:
        """Reduces what is no gradient of a variable, such as a norm or a number of examples."""
        if self._num_replicas_in_sync > 1 and isinstance(value, tf.IndexedSlices):
            dense = self._reduce_to(reduce_op, value, destination, None)
            with tf.device(HOST_DEVICE):
                rows = tf.range(tf.shape(dense)[0])
                indices = tf.cast(rows, value.indices.dtype)
                return tf.IndexedSlices(dense, indices, tf.shape(dense))
        return self._reduce_to(reduce_op, value, destination, None)

    def reduce_now(
        self, pairs: Sequence[tuple[Any, tf.Variable]], nonfinite: str | None
    ) -> list[Any]:
        """Sums gradients; the next reduction passes on, as it is, what is made of the sums.

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
        left = [
            i
            for i, pair in enumerate(pairs)
            if not self._take_reduced(*pair) and not self._is_mended(results[i])
        ]
        gradients = [(results[i], *_name_and_shape(pairs[i][1], results[i])) for i in left]
        sums = self.sum_gradients(gradients, loss_is_scaled(), nonfinite)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            with tf.device(HOST_DEVICE):
                sums = [divided(total, self._num_replicas_in_sync) for total in sums]
        for i, total in zip(left, sums):
            results[i] = total
        return results

    def _take_reduced(self, value: Any, destination: Any) -> bool:
        reference = destination.ref() if isinstance(destination, tf.Variable) else None
        total = self._reduced.pop(reference, None)
        if total is None:
            return False
        value = getattr(value, "values", value)
        if value.graph is not total.graph:  # taken for granted in a branch, which has its own
            return True
        return depends_on([value.op], [total.op], data_before)

    def _is_mended(self, value: Any) -> bool:
        """Whether a gradient is reduced when the step is complete, where backward has made it."""
        marks = marks_of_graph()
        if not self.reduces_at_backward or self.model_knows_size or not marks:
            return False
        op = getattr(value, "values", value).op
        if op in marks:  # and is what an optimizer has computed, or has to be divided
            return not (marks[op].is_scaled or marks[op].is_sum)
        made_of = walk([op], lambda each: [] if each in marks else data_before(each))
        return any(each in marks for each in made_of)

    def sum_gradients(
        self,
        gradients: Sequence[tuple[Any, str, tuple[int, ...]]],
        of_mean: bool,
        nonfinite: str | None = None,
    ) -> list[Any]:
        """Sums gradients over the ranks, dense and sparse ones.

        Args:
          gradients: of each the tensor or `tf.IndexedSlices`, the name of its variable, and the
            shape of a row.
          of_mean: True if the sums make a mean, in which a rank counts by its examples.
          nonfinite: as for `hostopt.nonfinite.NonFiniteCheck`.

        Returns:
          The sums, on the host.
        """
        if not gradients:
            return []
        values, names = [value for value, *_ in gradients], [name for _, name, _ in gradients]
        if self._sparse_as_dense or self.accumulation is not None:
            values = [tf.convert_to_tensor(value) for value in values]
        if self.accumulation is not None:
            values = [self.accumulation.mean(v, name) for v, name in zip(values, names)]
        if self._num_replicas_in_sync == 1:
            checked = self._check_alone(values, names, nonfinite)
            if self.accumulation is not None:
                self.sums.update(total.op for total in checked)
            return checked
        reductions = [
            Reduction(value, name, row_shape=row_shape, sums_rows=False)
            for value, (_, name, row_shape) in zip(values, gradients)
        ]
        weight = self.weight(of_mean)
        if self.deferred and self.deferred.can_take(values):
            sums = [self.deferred.add(each, weight, nonfinite) for each in reductions]
        else:
            communicator = self._strategy.communicator
            sums, reducers = reduce_together(reductions, communicator, weight, nonfinite)
            self._take_reducers(reducers)
        self._watch(sums, nonfinite)
        return sums

    def _check_alone(
        self, values: Sequence[Any], names: Sequence[str], nonfinite: str | None
    ) -> list[Any]:
        """With one rank nothing is reduced."""
        check = NonFiniteCheck(self._strategy.communicator, nonfinite)
        self._skipping.checks.append(check)
        results = check_gradients(values, names, self._strategy.communicator, check)
        self._watch(results, nonfinite)
        return results

    def _watch(self, sums: Sequence[Any], nonfinite: str | None) -> None:
        if (nonfinite or self._strategy.options.nonfinite) == "skip":
            self._skipping.watch([getattr(total, "values", total) for total in sums])

    def _take_reducers(self, reducers: Sequence[AnyReducer]) -> None:
        self._reducers += reducers
        self._skipping.checks += [reducer.check for reducer in reducers]

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

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        if not isinstance(colocate_with_variable, tf.Variable):
            raise hostopt.ConfigError(
                f"an optimizer is to be placed beside {colocate_with_variable.name!r}, wanted a "
                "variable: SyncReplicasOptimizer is for workers with parameter servers. Use the "
                "optimizer that it wraps, as gradients are reduced over all ranks anyway"
            )
        super()._validate_colocate_with_variable(colocate_with_variable)

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


class _ReplicaContext(_OneDeviceReplicaContext):
    """What a model_fn runs in; TensorFlow's counts each rank once in gradients of `all_reduce`."""

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Reduces tensors over the ranks, as `tf.distribute.ReplicaContext.all_reduce` does.

        Args:
          reduce_op: `tf.distribute.ReduceOp`, or its name.
          value: tensors and `tf.IndexedSlices`, in any structure.
          options: not used.

        Returns:
          The results, in the same structure.
        """
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


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise hostopt.ConfigError(
            f"{name} is {shown(value)}, wanted True or False. Give one of them, or leave it out"
        )


def _check_device(name: Any) -> None:
    try:
        device = tf.DeviceSpec.from_string(name)
    except (TypeError, ValueError, AttributeError):
        device = None
    if not (device and device.device_type and 0 <= (device.device_index or 0) <= _MOST_DEVICES):
        raise hostopt.ConfigError(
            f"accelerator is {shown(name)}, wanted the name of a device with a number up to "
            f"{_MOST_DEVICES}. Give one such as '/device:GPU:0', or leave it out"
        )


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


def divided(total: Any, count: int) -> Any:
    """Divides a sum by the number of ranks.

    Args:
      total: tensor or sparse gradient.
      count: the number.

    Returns:
      The same kind of value.
    """
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(total.values / count, total.indices, total.dense_shape)
    return total / count


def _is_mirrored(value: Any) -> bool:
    """Whether a value is a variable that is the same on all ranks."""
    return isinstance(value, tf.Variable) and value.trainable and not is_sync_on_read(value)


def _is_gradient(value: Any, destination: Any) -> bool:
    """Whether a pair that is to be reduced is a gradient and its variable."""
    return isinstance(destination, tf.Variable) and not isinstance(value, tf.Variable)


def _name(destination: Any, value: Any) -> str:
    """What all ranks call a value that is reduced: the name of its variable, or its own."""
    if isinstance(destination, tf.Variable):
        return destination.op.name
    return getattr(value, "values", value).op.name


def _name_and_shape(destination: Any, value: Any) -> tuple[str, tuple[int, ...]]:
    """Name of a gradient's variable, and of a sparse gradient the shape of a row."""
    name = _name(destination, value)
    if not isinstance(value, tf.IndexedSlices):
        return name, ()
    shape = destination.shape if isinstance(destination, tf.Variable) else value.shape
    for row in (shape[1:], value.values.shape[1:]):
        if row.is_fully_defined():
            return name, tuple(row.as_list())
    raise hostopt.ConfigError(
        f"the gradient of {name!r} is sparse, and {name!r} is of shape {shape}, wanted one whose "
        "rows have a known shape. Create the variable with a static shape"
    )
