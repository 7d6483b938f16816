"""HostOffloadStrategy: the strategy that users hold, with its options and its connection."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import DIVIDE_LOSSES, caller_of
from estimator_ext.errors import UnsupportedError
from estimator_ext.pipelines.sharding import check_policy
from estimator_ext.strategy.devices import find_accelerator, is_gpu
from estimator_ext.strategy.function_extended import FunctionExtended
from estimator_ext.strategy.local_steps import LocalSteps
from hostopt.adapters.discover import set_tf_config
from hostopt.cluster import tf_config
from hostopt.cluster.cluster import core_count
from hostopt.connect import exit_with_error_code
from hostopt.options import shown
from hostopt.tensorflow._tf_private import fork_guard
from hostopt.tensorflow.background import HOST_DEVICE

_log = tf.get_logger()
_T = TypeVar("_T")


class HostOffloadStrategy(tf.compat.v1.distribute.Strategy):
    """Synchronous data parallelism with variables, optimizer slots and reductions on the host.

    The accelerator of this process runs forward and backward. The host sums the gradients over
    the ranks of the cluster while backward continues, and the optimizer updates the variables on
    the host.

    Args:
      cluster_resolver: the cluster and this task, such as
        `tf.distribute.cluster_resolver.TFConfigClusterResolver()`; TF_CONFIG by default.
      variables_on_host: True keeps variables and slots in host memory, and caches a copy of each
        trainable variable on the accelerator in each step. False keeps them on the accelerator.
      accelerator: device of forward and backward. The default is the first GPU or, without a
        GPU, the CPU. Of several GPUs, each rank of a host takes one.
      sparse_as_dense: True makes sparse gradients (`tf.IndexedSlices`) dense before they travel.
        False sends the rows of each rank to all ranks, uncompressed.
      auto_shard: how TensorFlow shards the dataset of an input_fn without an argument
        input_context. "data": each rank reads all data and keeps its shard. "file": each rank
        reads its shard of the files. "off": each rank uses all data. None acts like "off" and
        warns. For `experimental_distribute_dataset` and `Model.fit` it replaces the policy in the
        options of the dataset, and None keeps it.
      **options: options of the ring, as for `hostopt.Options`, such as `bucket_mb`,
        `communication`, `compression`, `collective_timeout_s` or `token_file`; and of local
        steps, as for `LocalSteps`: `sync_every`, `sync_secs`, `sync_warmup_steps`,
        `outer_optimizer`, `sync_slots`, `sync_compression`, `sync_fragments`, `sync_delay`.

    Raises:
      hostopt.ConfigError: the resolver, TF_CONFIG or an option is invalid, or this process was
        forked from one that had used TensorFlow.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        variables_on_host: bool = True,
        accelerator: str | None = None,
        *,
        sparse_as_dense: bool = False,
        auto_shard: str | None = None,
        **options: Any,
    ) -> None:
        exit_with_error_code()
        fork_guard.check()
        local_steps = {each.name for each in dataclasses.fields(LocalSteps)} & options.keys()
        self.local_steps = LocalSteps(**{name: options.pop(name) for name in local_steps})
        check_policy(auto_shard)
        _check_flag("variables_on_host", variables_on_host)
        _check_flag("sparse_as_dense", sparse_as_dense)
        self.options = hostopt.Options(**options).with_environment()
        if self.options.shard_optimizer and self.local_steps.is_used:
            raise hostopt.ConfigError(
                "shard_optimizer is True, and sync_every, sync_secs or outer_optimizer lets each "
                "rank update its own variables. Leave one of them out"
            )
        if tf_config.read_tf_config(os.environ) or not _names_cluster(cluster_resolver):
            set_tf_config(self.options)
        self.cluster = hostopt.Cluster.from_resolver(cluster_resolver)
        if cluster_resolver is None:  # programs ask `strategy.cluster_resolver` for their task
            cluster_resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        self.own_device = find_accelerator(self.cluster, accelerator)
        super().__init__(
            FunctionExtended(
                self,
                self.own_device.device,
                variables_on_host,
                sparse_as_dense,
                auto_shard,
                cluster_resolver,
            )
        )
        self._communicator: hostopt.Communicator | None = None
        self._last_error: BaseException | None = None
        self._connecting = threading.Lock()

    @property
    def communicator(self) -> hostopt.Communicator:
        """The connection to the other ranks; the first access waits until all are connected."""
        with self._connecting:
            if self._communicator is None:
                fork_guard.check()  # the parent may have created the strategy
                self._communicator = hostopt.connect(self.cluster, self.options)
            return self._communicator

    @property
    def accelerator(self) -> str:
        """Device of forward and backward."""
        return str(self.extended.worker_devices[0])

    def update_config_proto(
        self, config_proto: tf.compat.v1.ConfigProto | None
    ) -> tf.compat.v1.ConfigProto:
        """Adds the devices of this strategy to the configuration of a session.

        Args:
          config_proto: configuration of a session, or None.

        Returns:
          A copy with the accelerator of this rank, and without GPUs except on ranks. Threads do
          not spin if a rank has one core.
        """
        config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
        if config_proto is not None:
            config.CopyFrom(config_proto)
        self.own_device.configure(config)
        if core_count(self.cluster) == 1:
            # idle threads of TensorFlow would spin on the only core, which others need
            config.experimental.disable_thread_spinning = True
        if self.extended.variables_on_host and is_gpu(self.accelerator) and self.cluster.size == 1:
            # Copies are five times as fast from pinned memory. Two ranks of one host lost more
            # than that; several ranks pin only the variables that are copied (CopiesHook).
            config.gpu_options.force_gpu_compatible = True
        if self.cluster.rank is None:
            config.device_count["GPU"] = 0
        return config

    def record_timeline(self, path: str | os.PathLike[str]) -> None:
        """Records a timeline from the rendezvous on.

        Args:
          path: as for `Options.timeline`; HOSTOPT_TIMELINE overrides it.

        Raises:
          hostopt.ConfigError: the ranks are connected already, with another timeline or none.
        """
        options = dataclasses.replace(self.options, timeline=path).with_environment()
        if self._communicator is not None and options != self.options:
            raise hostopt.ConfigError(
                f"timeline {options.timeline!r} is given to a strategy that is connected to the "
                f"other ranks with timeline {self.options.timeline!r}. Make the RunConfig first"
            )
        self.options = options

    def leave_records_in(self, model_dir: str) -> None:
        """Sets the directory for stacks and events of an abort, if local and no option does."""
        if self.options.debug_dir is None and "://" not in model_dir:
            recorder = self.communicator.transport.recorder
            recorder.directory = os.path.join(model_dir, "hostopt-debug")

    @contextlib.contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Aborts the other ranks if an error leaves the block, and raises errors they report.

        TensorFlow replaces an error in a callback with one of its own types. This block raises the
        original error.

        Raises:
          hostopt.HostOptError: a collective failed, even if TensorFlow changed the error's type.
        """
        try:
            yield
        except hostopt.HostOptError as error:
            self._abort(error)
            raise
        except BaseException as error:
            root = self._communicator.transport.error if self._communicator else None
            if error is self._last_error:  # an inner block has handled it
                raise
            if root is not None and isinstance(error, (tf.errors.OpError, RuntimeError)):
                raise root from error
            self._abort(error)
            raise

    def _abort(self, error: BaseException) -> None:
        self._last_error = error
        if self._communicator is not None:
            self._communicator.abort(error)

    def close(self) -> None:
        """Disconnects from the other ranks; the next access to `communicator` connects again."""
        with self._connecting:
            self.extended.close_reducers()
            if self._communicator is not None:
                self._communicator.close()
                self._communicator = None

    def run(
        self,
        fn: Callable[..., _T],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> _T:
        """Calls a function as the step of this rank, as `tf.distribute.Strategy.run` does.

        Args:
          fn: the function, in which optimizers reduce gradients over the ranks.
          args: its arguments, such as the next batch of a distributed dataset.
          kwargs: its arguments by name.
          options: `tf.distribute.RunOptions`, which have no effect.

        Returns:
          The result of this rank; `reduce` and `gather` combine the results of all ranks.
        """
        if self.local_steps.is_used:
            raise hostopt.ConfigError(
                "sync_every, sync_secs or outer_optimizer is set, and strategy.run reduces "
                "gradients in each step. Train with estimator_ext.Estimator, or leave them out"
            )
        results: _T = super().run(fn, args, kwargs, options)
        return results if self.cluster.size == 1 else _join_results(self, fn, results)

    def gather(self, value: tf.Tensor | tf.distribute.DistributedValues, axis: int) -> tf.Tensor:
        """Joins the values of all ranks, as `tf.distribute.Strategy.gather` does.

        Collective: all ranks must call it.

        Args:
          value: tensor, or result of `run`. Its size along `axis` may differ between ranks.
          axis: number of the dimension along which values are joined, from 0.

        Returns:
          The joined value, on each rank.
        """
        return self.extended._local_results(self.extended._gather_to(value, HOST_DEVICE, axis))[0]

    def __deepcopy__(self, memo: object) -> HostOffloadStrategy:
        return self  # Estimator copies its configuration; all copies share one connection


class StrategyOfRanks(HostOffloadStrategy):
    """A strategy for programs that were written for a single process.

    Gradients are reduced to those of one process, which is what functions of TensorFlow and Keras
    get that divide a loss by the number of ranks. If the program itself reads this number,
    optimizers reduce as under any strategy.

    Args:
      loss_is: "mean" or "sum" if the user says what the losses are; if empty, their graphs do.
    """

    def __init__(self, auto_shard: str, loss_is: str = "") -> None:
        super().__init__(auto_shard=auto_shard)
        self.extended.reduces_at_backward = True
        self.extended.loss_is = loss_is

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of ranks; 1 for a function that divides a loss by it."""
        size, reduction = int(self.extended._num_replicas_in_sync), self.extended.reduction
        function, place, is_library = caller_of(sys._getframe(1))
        if size == 1 or reduction.model_knows_size:
            return size
        if function in DIVIDE_LOSSES and reduction.follows_gradients:
            reduction.has_divided = True
            return 1
        if is_library:
            return size
        if reduction.has_divided:
            raise UnsupportedError(
                f"the program reads num_replicas_in_sync in {place}, after a loss was computed as "
                "in one process. Read it before the loss, or not at all"
            )
        reduction.model_knows_size = place
        text = "the program reads the number of %d ranks in %s: optimizers reduce gradients as "
        _log.info(text + "under any strategy", size, place)
        return size


def _names_cluster(resolver: Any) -> bool:
    """Returns False if a resolver names no cluster; TensorFlow's own read TF_CONFIG when asked."""
    cluster_spec = getattr(resolver, "cluster_spec", None)
    return callable(cluster_spec) and bool(cluster_spec())


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise hostopt.ConfigError(
            f"{name} is {shown(value)}, wanted True or False. Give one of them, or leave it out"
        )


# -- results of Keras 2 ----------------------------------------------------------------------

# Keras joins the results of replicas in one process. It joins the results of ranks only for the
# strategies of TensorFlow. So `predict` would return the predictions of one rank, and a
# `train_step` that returns a loss instead of metrics would report the loss of one rank.

_MODULE = "engine.training"  # in keras.src of TensorFlow 2.15, and in tf_keras.src
_STEPS = ("predict_step", "train_step", "test_step")


def _join_results(strategy: Any, fn: Callable[..., Any], results: Any) -> Any:
    """Joins predictions in rank order, and averages results of the program's own step."""
    fn = getattr(fn, "python_function", fn)  # of a function with jit_compile
    if not getattr(fn, "__module__", "").endswith(_MODULE):
        return results
    # by what it calls: Keras converts it with AutoGraph or not, depending on the version
    called = next((step for step in _STEPS if step in fn.__code__.co_names), None)
    with strategy.scope():
        if called == "predict_step":
            return tf.nest.map_structure(lambda each: strategy.gather(each, 0), results)
        if called is not None and _is_own(fn, called):
            return tf.nest.map_structure(lambda each: _mean(strategy, each), results)
    return results


def _is_own(fn: Callable[..., Any], step: str) -> bool:
    method = getattr(type(inspect.getclosurevars(fn).nonlocals.get("model")), step, None)
    return not getattr(method, "__module__", "").endswith(_MODULE)


def _mean(strategy: Any, value: Any) -> Any:
    value = tf.convert_to_tensor(value)
    if not value.dtype.is_floating:
        return value
    return strategy.reduce(tf.distribute.ReduceOp.MEAN, value, axis=None)


def _signature() -> inspect.Signature:
    """Returns the arguments of the strategy, with those that `options` stands for, for `help`."""
    *own, _ = inspect.signature(HostOffloadStrategy.__init__).parameters.values()
    named = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default)
        for kind in (hostopt.Options, LocalSteps)
        for each in dataclasses.fields(kind)
    ]
    return inspect.Signature([*own, *named])


# on the function, as a subclass may have other arguments
vars(HostOffloadStrategy.__init__)["__signature__"] = _signature()
