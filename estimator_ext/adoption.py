"""Stock estimators of a program that nobody edits, trained on the ranks of its cluster."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from estimator_ext import _tf_estimator, tpu
from estimator_ext.errors import UnsupportedError
from estimator_ext.estimator import adopt
from estimator_ext.strategy import HostOffloadStrategy
from estimator_ext.training import train_and_evaluate

__all__: list[str] = []

# Modules that ask for the number of ranks for reasons of their own.
_FRAMEWORKS = ("tensorflow.", "keras.", "tf_keras.", "hostopt", "estimator_ext")
_APIS = (tf.distribute, tf.compat.v1.distribute)
# know one process; two of them would train two models
_OF_ONE_PROCESS = tuple(
    kind
    for api in _APIS
    for kind in (
        api.MirroredStrategy,
        api.OneDeviceStrategy,
        api.experimental.CentralStorageStrategy,
    )
)
_PARAMETER_SERVERS = tuple(api.experimental.ParameterServerStrategy for api in _APIS)


class StrategyOfRanks(HostOffloadStrategy):
    """A strategy for programs that know nothing of ranks.

    Gradients are reduced where backward makes them, to what one process would have. If the model
    asks for the number of ranks, as the heads of canned estimators do to divide their loss by it,
    optimizers reduce as under any strategy.

    Args:
      auto_shard: as for `HostOffloadStrategy`.
    """

    def __init__(self, auto_shard: str) -> None:
        super().__init__(auto_shard=auto_shard)
        self.extended.reduces_at_backward = True

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of ranks."""
        if not sys._getframe(1).f_globals.get("__name__", "").startswith(_FRAMEWORKS):
            self.extended.model_knows_size = True
        return int(self.extended._num_replicas_in_sync)


def refuse_parameter_servers() -> None:
    """Has a program that makes a ParameterServerStrategy end with an UnsupportedError."""

    def refuse(self: Any, *arguments: Any, **options: Any) -> None:
        del self, arguments, options
        raise UnsupportedError(
            "the program makes a ParameterServerStrategy, and there are no parameter servers. "
            "Leave it out: the ranks have a HostOffloadStrategy, and each has all variables"
        )

    for kind in _PARAMETER_SERVERS:
        kind.__init__ = refuse


def train_on_ranks(strategy: HostOffloadStrategy, when_made: Callable[[Any], Any]) -> None:
    """Has every estimator of this process train with a strategy, and the stock names use it.

    An estimator whose configuration names a strategy keeps that.

    Args:
      strategy: of the cluster that this process belongs to.
      when_made: called with each estimator.
    """
    stock = _tf_estimator.estimator_v1.Estimator  # of which that of tf.estimator is a subclass
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
        config = _on_ranks(config, strategy)
        init(self, model_fn, model_dir, config, params, warm_start_from)
        when_made(self)
        if config.train_distribute is strategy:
            adopt(self)

    stock.__init__ = init_on_ranks
    for api in (_tf_estimator.estimator_v1, _tf_estimator.estimator_v2):
        api.train_and_evaluate = train_and_evaluate
    _tf_estimator.estimator_v1.tpu = tpu


def _on_ranks(config: Any, strategy: HostOffloadStrategy) -> Any:
    """A configuration with the strategy, if it has none; the user's object stays as it is."""
    config = _tf_estimator.RunConfig() if config is None else copy.copy(config)
    if not isinstance(config, _tf_estimator.RunConfig):
        return config  # the stock class says so
    if config.train_distribute is None:
        config._train_distribute = strategy
    own = config.train_distribute
    if isinstance(own, _OF_ONE_PROCESS) and strategy.num_replicas_in_sync > 1:
        raise UnsupportedError(
            f"the program trains with {type(own).__name__}, which knows one process, in a cluster "
            f"of {strategy.num_replicas_in_sync} ranks. Leave it out: the ranks have a "
            "HostOffloadStrategy"
        )
    return config
