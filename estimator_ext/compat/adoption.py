"""Trains the stock estimators of an unmodified program on all ranks."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import multiprocessing
import os
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import spawn
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext import _tf_estimator, tpu
from estimator_ext._tf_private import interleave_in_order
from estimator_ext.checkpoints.model_dir_lock import training_without_ring
from estimator_ext.compat.atomic_files import write_atomically
from estimator_ext.compat.compat import (
    install,
    restore_python_names,
    serve_horovod,
    use_v1_api,
)
from estimator_ext.errors import UnsupportedError
from estimator_ext.estimator.estimator import HostOffloadEstimator, adopt
from estimator_ext.estimator.run_config import adopt_cluster
from estimator_ext.estimator.training import train_and_evaluate
from estimator_ext.strategy.strategy import HostOffloadStrategy, StrategyOfRanks
from hostopt import process_ring
from hostopt.launch.environment import tf_config_of

_log = tf.get_logger()

_APIS = (tf.distribute, tf.compat.v1.distribute)
_PARAMETER_SERVERS = tuple(api.experimental.ParameterServerStrategy for api in _APIS)
_MULTI_WORKER = (
    tf.distribute.MultiWorkerMirroredStrategy,
    *(api.experimental.MultiWorkerMirroredStrategy for api in _APIS),
)


class Ranks:
    """The ranks that an unmodified program trains on.

    A program may set TF_CONFIG itself. So it is read whenever the program creates a configuration,
    an estimator or a strategy for several workers.
    """

    def __init__(self, auto_shard: str, loss_is: str = "", used: Any = None) -> None:
        self._options = auto_shard, loss_is
        # shared with children; one that is 0 counts as False
        self.used = multiprocessing.RawValue("b") if used is None else used
        self._strategy: StrategyOfRanks | None = None
        self._cluster: hostopt.Cluster | None = None
        self._config = ""  # its TF_CONFIG
        self._unused = random.getstate(), _state_of_numpy()

    @property
    def are_used(self) -> bool:
        """True if the program or a child has created an estimator or strategy or joined a ring."""
        return bool(self.used.value)

    def note_use(self) -> None:
        """Makes `are_used` true."""
        self.used.value = True

    def find(self, resolver: Any = None) -> hostopt.Cluster | None:
        """Returns the cluster that this process belongs to, or None.

        A cluster is never left: a program that unsets TF_CONFIG still trains with the others.

        Args:
          resolver: cluster resolver of the program, which counts if TF_CONFIG names no cluster.
        """
        named = hostopt.Cluster.from_tf_config()
        if named.task is None and resolver is not None:
            named = hostopt.Cluster.from_resolver(resolver)
            if named.task is not None:
                jobs, task = resolver.cluster_spec().as_dict(), named.task
                os.environ["TF_CONFIG"] = tf_config_of(jobs, (task.type, task.index))
        if named.task is None:
            return self._cluster
        if self._cluster is None:
            self._cluster = named
            self._config = os.environ.get("TF_CONFIG", "")
            if named.size > 1:
                self._act_as_one_process(named)
        joined = self._cluster
        if (named.rank, named.size) != (joined.rank, joined.size):
            raise UnsupportedError(
                f"the program has changed TF_CONFIG: it names {named.task.name} of {named.size} "
                f"ranks, but this process is {joined.task and joined.task.name} of {joined.size}. "
                "Start as many processes as the program names, or keep it from setting TF_CONFIG"
            )
        return joined

    def join(self, resolver: Any = None) -> StrategyOfRanks | None:
        """Returns the strategy of the cluster that this process belongs to, or None.

        It starts TensorFlow's devices, which programs configure before: so call it late.
        """
        if self.find(resolver) is not None and self._strategy is None:
            present = os.environ.get("TF_CONFIG")  # the program may have changed or unset it
            os.environ["TF_CONFIG"] = self._config
            try:
                self._strategy = StrategyOfRanks(*self._options)
            finally:
                if present is None:
                    del os.environ["TF_CONFIG"]
                else:
                    os.environ["TF_CONFIG"] = present
        return self._strategy

    def _act_as_one_process(self, cluster: hostopt.Cluster) -> None:
        """Makes Python's shuffles the same on all ranks, and the files those of one process."""
        seed = zlib.crc32(repr(cluster.ring).encode())  # differs between runs
        of_python, of_numpy = self._unused
        if random.getstate() == of_python:  # or else the program has seeded it
            random.seed(seed)
        if _state_of_numpy() == of_numpy:
            np.random.seed(seed)
        write_atomically(cluster.rank or 0)
        if self._options[0] == "data":
            interleave_in_order()


def _state_of_numpy() -> str:  # of any bit generator
    return json.dumps(np.random.get_state(legacy=False), default=np.ndarray.tolist)


def prepare_program(
    auto_shard: str, loss_is: str, is_v1: bool, reduces_itself: bool, used: Any = None
) -> Ranks:
    """Makes this process, and interpreters that it spawns, run a program of TensorFlow 2.15.

    Args:
      is_v1: True if `import tensorflow` imports the API of TensorFlow 1.
      reduces_itself: True for a program that uses Horovod; its estimators remain the stock ones.
      used: that of the ranks of the process that has spawned this one.
    """
    restore_python_names()
    install(contrib=True)
    if is_v1:
        use_v1_api()
    ranks = Ranks(auto_shard, loss_is, used)
    if reduces_itself:
        serve_horovod()
        process_ring.at_first_join.append(ranks.note_use)
    else:
        _replace_strategies(ranks)
        _adopt_configurations(ranks)
        _adopt_estimators(ranks)
    call_in_children(prepare_program, auto_shard, loss_is, is_v1, reduces_itself, ranks.used)
    return ranks


def _replace_strategies(ranks: Ranks) -> None:
    """Replaces strategies for several workers in a cluster, and refuses parameter servers."""

    def refuse(self: Any, *arguments: Any, **options: Any) -> None:
        raise UnsupportedError(
            "the program creates a ParameterServerStrategy, but there are no parameter servers. "
            "Remove it: the ranks have a HostOffloadStrategy, and each holds all variables"
        )

    def make(kind: type, *arguments: Any, **options: Any) -> Any:
        given = (*arguments, *options.values())
        resolvers = [each for each in given if callable(getattr(each, "cluster_spec", None))]
        strategy = ranks.join(*resolvers)
        if strategy is None:
            return object.__new__(kind)
        ranks.note_use()
        strategy.extended.reduces_at_backward = False  # the program knows of ranks
        return strategy  # of another class, so Python does not call __init__

    for kind in _PARAMETER_SERVERS:
        kind.__init__ = refuse
    for kind in _MULTI_WORKER:
        kind.__new__ = staticmethod(make)


def _adopt_configurations(ranks: Ranks) -> None:
    """Gives each RunConfig the strategy of the ranks, unless it has one."""
    init = _tf_estimator.RunConfig.__init__
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_on_ranks(self: Any, *arguments: Any, **options: Any) -> None:
        strategy = ranks.join()
        if strategy is None:
            init(self, *arguments, **options)
            return
        fields = signature.bind(self, *arguments, **options).arguments
        experimental: Any = fields.get("experimental_distribute")
        chosen = getattr(experimental, "train_distribute", None)
        if chosen is None:
            fields["train_distribute"] = _replaced(fields.get("train_distribute"), strategy)
        else:
            replaced = _replaced(chosen, strategy)
            fields["experimental_distribute"] = experimental._replace(train_distribute=replaced)
        if fields.get("eval_distribute") is strategy:
            del fields["eval_distribute"]  # one process evaluates
        init(**fields)
        if self.train_distribute is strategy:
            adopt_cluster(self, strategy)

    _tf_estimator.RunConfig.__init__ = init_on_ranks


def _adopt_estimators(ranks: Ranks) -> None:
    """Makes every estimator train on the ranks, unless its configuration has another strategy.

    Without a cluster an estimator is the stock one, but locks its model_dir while it trains.
    The stock `train_and_evaluate` and `tpu` are replaced by those of this package.
    """
    stock = _tf_estimator.estimator_v1.Estimator  # tf.estimator.Estimator is a subclass
    init = stock.__init__

    @functools.wraps(init)
    def init_on_ranks(
        self: Any,
        model_fn: Any,
        model_dir: Any = None,
        config: Any = None,
        params: Any = None,
        warm_start_from: Any = None,
    ) -> None:
        strategy = ranks.join()
        if strategy is not None:
            config = _on_ranks(config, strategy)
        init(self, model_fn, model_dir, config, params, warm_start_from)
        ranks.note_use()
        if strategy is not None and config.train_distribute is strategy:
            adopt(self)

    train = stock.train

    @functools.wraps(train)
    def train_locked(self: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(self, HostOffloadEstimator):  # which does so itself
            return train(self, *arguments, **options)
        with training_without_ring(self._model_dir, self._config):
            return train(self, *arguments, **options)

    stock.__init__ = init_on_ranks
    stock.train = train_locked
    for api in (_tf_estimator.estimator_v1, _tf_estimator.estimator_v2):
        api.train_and_evaluate = _train_and_evaluate
    _tf_estimator.estimator_v1.tpu = tpu


def _on_ranks(config: Any, strategy: StrategyOfRanks) -> Any:
    """Returns a copy of the configuration, which trains on the ranks."""
    config = _tf_estimator.RunConfig() if config is None else copy.copy(config)
    if not isinstance(config, _tf_estimator.RunConfig):
        return config  # the stock class raises the error
    # it may be older than TF_CONFIG, or a strategy of the program
    config._train_distribute = _replaced(config.train_distribute, strategy)
    return config


def _replaced(chosen: Any, strategy: StrategyOfRanks) -> Any:
    """Returns the strategy of the ranks, unless the program has chosen one that covers them.

    A strategy of one replica has no effect on a training, so that of the ranks may replace it.
    """
    size = strategy.cluster.size
    if chosen is None:
        return strategy
    if isinstance(chosen, HostOffloadStrategy) or size == 1:
        return chosen
    name, replicas = type(chosen).__name__, chosen.num_replicas_in_sync
    if replicas > 1:
        raise UnsupportedError(
            f"the program trains with {name} on {replicas} devices of each process, in a cluster "
            f"of {size} ranks. Let it use one device: start a rank for each"
        )
    _log.warning("the ranks train with HostOffloadStrategy instead of %s on one device", name)
    return strategy


def _train_and_evaluate(estimator: Any, train_spec: Any, eval_spec: Any) -> Any:
    """Does what the stock function does; a rank that has not evaluated does so when asked."""
    strategy = getattr(estimator, "_train_distribution", None)
    if not isinstance(strategy, HostOffloadStrategy):
        return _tf_estimator.train_and_evaluate(estimator, train_spec, eval_spec)
    metrics, exports = train_and_evaluate(estimator, train_spec, eval_spec)
    is_unmodified = isinstance(strategy, StrategyOfRanks) and strategy.cluster.rank is not None
    if metrics is None and is_unmodified and isinstance(eval_spec, _tf_estimator.EvalSpec):
        metrics = _MetricsWhenRead(estimator, eval_spec)
    return metrics, exports


class _MetricsWhenRead(Mapping[str, Any]):
    """The metrics of the last checkpoint, which are computed when the program reads one."""

    def __init__(self, estimator: Any, spec: Any) -> None:
        self._estimator, self._spec = estimator, spec

    @functools.cached_property
    def _metrics(self) -> dict[str, Any]:
        spec = self._spec
        evaluate = self._estimator.evaluate
        return dict(evaluate(spec.input_fn, spec.steps, spec.hooks, name=spec.name))

    def __getitem__(self, name: str) -> Any:
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __repr__(self) -> str:
        return repr(self._metrics) if "_metrics" in vars(self) else "{not evaluated on this rank}"


# -- children of multiprocessing -------------------------------------------------------------

# A call in each interpreter that `multiprocessing` spawns, before it imports the program. Such a
# child gets a description of its parent first, and imports the program as that says. So the call
# is a part of the description, and happens when the child reads it.


class _Call(functools.partial[Any]):
    """A call that is made where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.func, self.args


def call_in_children(function: Callable[..., Any], *arguments: Any) -> None:
    """Makes children of `multiprocessing` with the methods "spawn" and "forkserver" call it.

    They must be able to import the function and to unpickle its arguments.
    """
    describe = spawn.get_preparation_data
    call = _Call(function, *arguments)

    @functools.wraps(describe)
    def describe_with_call(name: str) -> dict[str, Any]:
        return {**describe(name), call_in_children.__module__: call}

    spawn.get_preparation_data = describe_with_call
