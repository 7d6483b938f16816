"""Trains the stock estimators of an unmodified program on all ranks."""

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

# Libraries that read the number of ranks; this does not show that the model uses it.
_FRAMEWORKS = ("tensorflow.", "keras.", "tf_keras.", "hostopt", "estimator_ext")
_APIS = (tf.distribute, tf.compat.v1.distribute)
# Strategies within one process; two processes would train two models.
_SINGLE_PROCESS = tuple(
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
    """A strategy for programs that were written for a single process.

    Gradients are reduced as soon as backward computes them, to the values of a single process. If
    the model reads the number of ranks, optimizers reduce as under any strategy. Heads of canned
    estimators do so, to divide their loss by it.

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
            self.extended.reduction.model_knows_size = True
        return int(self.extended._num_replicas_in_sync)


def refuse_parameter_servers() -> None:
    """Makes the constructor of ParameterServerStrategy raise UnsupportedError."""

    def refuse(self: Any, *arguments: Any, **options: Any) -> None:
        del self, arguments, options
        raise UnsupportedError(
            "the program creates a ParameterServerStrategy, but there are no parameter servers. "
            "Remove it: the ranks have a HostOffloadStrategy, and each holds all variables"
        )

    for kind in _PARAMETER_SERVERS:
        kind.__init__ = refuse


def train_on_ranks(strategy: HostOffloadStrategy, on_create: Callable[[Any], Any]) -> None:
    """Makes every estimator of this process train with a strategy.

    An estimator whose configuration has a strategy keeps it. The stock `train_and_evaluate` and
    `tpu` are replaced by those of this package.

    Args:
      strategy: strategy of the cluster that this process belongs to.
      on_create: called with each new estimator.
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
        config = _on_ranks(config, strategy)
        init(self, model_fn, model_dir, config, params, warm_start_from)
        on_create(self)
        if config.train_distribute is strategy:
            adopt(self)

    stock.__init__ = init_on_ranks
    for api in (_tf_estimator.estimator_v1, _tf_estimator.estimator_v2):
        api.train_and_evaluate = train_and_evaluate
    _tf_estimator.estimator_v1.tpu = tpu


def _on_ranks(config: Any, strategy: HostOffloadStrategy) -> Any:
    """Returns a copy of the configuration, with the strategy if it has none."""
    config = _tf_estimator.RunConfig() if config is None else copy.copy(config)
    if not isinstance(config, _tf_estimator.RunConfig):
        return config  # the stock class raises the error
    if config.train_distribute is None:
        config._train_distribute = strategy
    chosen = config.train_distribute
    if isinstance(chosen, _SINGLE_PROCESS) and strategy.num_replicas_in_sync > 1:
        raise UnsupportedError(
            f"the program trains with {type(chosen).__name__}, which supports one process, in a "
            f"cluster of {strategy.num_replicas_in_sync} ranks. Remove it: the ranks have a "
            "HostOffloadStrategy"
        )
    return config
