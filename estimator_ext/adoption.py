"""Trains the stock estimators of an unmodified program on all ranks."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from estimator_ext import _tf_estimator, tpu
from estimator_ext._tf_private import DIVIDE_LOSSES, caller_of
from estimator_ext.errors import UnsupportedError
from estimator_ext.estimator import adopt
from estimator_ext.strategy import HostOffloadStrategy
from estimator_ext.training import train_and_evaluate

__all__: list[str] = []

_log = tf.get_logger()

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

    Gradients are reduced to those of one process, which is what functions of TensorFlow and Keras
    get that divide a loss by the number of ranks. If the program itself reads this number,
    optimizers reduce as under any strategy.

    Args:
      auto_shard: as for `HostOffloadStrategy`.
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
        divides = function in DIVIDE_LOSSES or function in _tf_estimator.DIVIDE_LOSSES
        if divides and reduction.follows_gradients:
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
    chosen, size = config.train_distribute, strategy.cluster.size
    if isinstance(chosen, _SINGLE_PROCESS) and size > 1:
        raise UnsupportedError(
            f"the program trains with {type(chosen).__name__}, which supports one process, in a "
            f"cluster of {size} ranks. Remove it: the ranks have a "
            "HostOffloadStrategy"
        )
    return config
