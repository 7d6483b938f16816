"""Stock estimators of a program that nobody edits, trained on the ranks of its cluster."""

from __future__ import annotations

import copy
import functools
from typing import Any

from estimator_ext import _tf_estimator, tpu
from estimator_ext.estimator import adopt
from estimator_ext.strategy import HostOffloadStrategy
from estimator_ext.training import train_and_evaluate

__all__: list[str] = []


def train_on_ranks(strategy: HostOffloadStrategy) -> None:
    """Has every estimator of this process train with a strategy, and the stock names use it.

    An estimator whose configuration names a strategy keeps that.

    Args:
      strategy: of the cluster that this process belongs to.
    """
    strategy.extended.reduces_at_backward = True
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
        if config.train_distribute is strategy:
            adopt(self)

    stock.__init__ = init_on_ranks
    for api in (_tf_estimator.estimator_v1, _tf_estimator.estimator_v2):
        api.train_and_evaluate = train_and_evaluate
    _tf_estimator.estimator_v1.tpu = tpu


def _on_ranks(config: Any, strategy: HostOffloadStrategy) -> Any:
    config = _tf_estimator.RunConfig() if config is None else copy.copy(config)
    if config.train_distribute is None:
        config._train_distribute = strategy
    return config
