"""Estimator: the stock Estimator, trained on the ranks of a HostOffloadStrategy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from estimator_ext import _tf_estimator
from estimator_ext.errors import UnsupportedError
from estimator_ext.estimator.host_offload_estimator import HostOffloadEstimator


class Estimator(HostOffloadEstimator):
    """Trains and evaluates a model_fn; takes the arguments of `tf.estimator.Estimator`.

    With a `HostOffloadStrategy` as `RunConfig.train_distribute` every rank trains. Gradients are
    reduced over the ranks on the host. Rank 0 alone restores and writes checkpoints and summaries;
    the other ranks start with its values. Without such a strategy it is the stock class.

    Batch sizes are global. Each process finds its batch size in `params["batch_size"]`, in
    input_fn and model_fn. In training it is the global size divided by the number of workers; one
    process evaluates or predicts. The params of the user are not changed. `predict` has the
    additional argument num_predictions: the number of examples after which it ends.

    input_fn, model_fn and params follow the stock rules. The strict rules of accelerator
    estimators apply with `RunConfig(strict=True)`, with iterations_per_loop above 1, and with a
    batch size.

    Args:
      model_fn: returns an `estimator_ext.EstimatorSpec` or a `tf.estimator.EstimatorSpec`.
      model_dir: directory in which rank 0 restores and writes, and in which evaluators read.
      config: an `estimator_ext.RunConfig` or `tf.estimator.RunConfig`.
      params: dict for model_fn and input_fn, if they have an argument `params`.
      warm_start_from: checkpoint or settings from which rank 0 starts a new training.
      train_batch_size: number of examples in a training step of all workers.
      eval_batch_size: number of examples in a batch of evaluation.
      predict_batch_size: number of examples in a batch of prediction.

    Raises:
      ValueError: a batch size is not a positive integer, or not divisible by the number of
        workers, or params has a batch size too; by the strict rules, params has the reserved key
        'input_fn'.
      hostopt.ConfigError: eval_distribute is a `HostOffloadStrategy`.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: Any = None,
        config: Any = None,
        params: dict[str, Any] | None = None,
        warm_start_from: Any = None,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
    ) -> None:
        super().__init__(model_fn, model_dir, config, params, warm_start_from)
        self._join_cluster(train_batch_size, eval_batch_size, predict_batch_size)


def adopt(estimator: Any) -> Any:
    """Makes an estimator of any class train like `Estimator`, in place.

    This is for canned estimators and subclasses of `tf.estimator.Estimator`.

    Args:
      estimator: a `tf.estimator.Estimator` whose config has a `HostOffloadStrategy` as
        train_distribute.

    Raises:
      hostopt.ConfigError: eval_distribute is a `HostOffloadStrategy`.
      UnsupportedError: the class overrides `train`, and there are several ranks.
    """
    kind = type(estimator)
    if not issubclass(kind, HostOffloadEstimator):
        _check_trains_as_stock(estimator)
        estimator.__class__ = _adopted(kind)
        estimator._join_cluster()
    return estimator


def _check_trains_as_stock(estimator: Any) -> None:
    kind, strategy = type(estimator), estimator._train_distribution
    if (
        kind.train is not _tf_estimator.estimator_v1.Estimator.train
        and strategy.num_replicas_in_sync > 1
    ):
        raise UnsupportedError(
            f"{kind.__module__}.{kind.__qualname__} overrides the method `train`, which does not "
            f"support ranks, and there are {strategy.num_replicas_in_sync}. Train it in one "
            "process, without `hostopt run`"
        )


@functools.cache
def _adopted(kind: type) -> type:
    members: dict[str, Any] = {"__module__": kind.__module__}
    if not issubclass(kind, _tf_estimator.Estimator):  # a class of tf.compat.v1 that exports
        members["export_savedmodel"] = kind.export_savedmodel
    bases = () if issubclass(HostOffloadEstimator, kind) else (kind,)
    return type(kind.__name__, (*bases, HostOffloadEstimator), members)
