"""train_and_evaluate: each process trains, evaluates or both, by its role in the cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_estimator import Estimator, EvalSpec, TrainingExecutor, TrainSpec
from estimator_ext._tf_estimator import train_and_evaluate as stock_train_and_evaluate
from estimator_ext.checkpoints.model_dir_lock import note_ring, training_in, training_without_ring
from estimator_ext.evaluation.evaluation import (
    EndMarker,
    evaluate_announced,
    evaluate_final,
    evaluate_until_end,
    recall_best,
)
from estimator_ext.evaluation.evaluators import connect_evaluators, with_evaluators
from estimator_ext.strategy.strategy import HostOffloadStrategy
from hostopt.connect import start_beside_ring

_log = tf.get_logger()


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec | Sequence[EvalSpec]
) -> tuple[Mapping[str, Any] | None, list[Any] | dict[str, Any]]:
    """Trains on all ranks and evaluates in parallel; has the signature of the stock function.

    The chief and the workers train. An evaluator evaluates and exports each new checkpoint until
    the chief has ended, early or not. Several evaluators share the data of each checkpoint, or
    have one EvalSpec each. In a cluster without an evaluator, the chief evaluates the final
    checkpoint. Without a cluster, one process trains and evaluates in turn. Without a
    `HostOffloadStrategy` this is the stock function.

    Args:
      estimator: an `estimator_ext.Estimator`.
      train_spec: a `tf.estimator.TrainSpec`.
      eval_spec: a `tf.estimator.EvalSpec`, whose input_fn has an argument input_context if there
        are several evaluators. Or a list of them with a name each: evaluator i uses EvalSpec i;
        without an evaluator, all are evaluated at the end only.

    Returns:
      (metrics, export results) of the last evaluation in an evaluator, or in the chief if there
      is none; (None, []) elsewhere. Of several evaluators, evaluator 0 exports. A process that
      evaluates a list of EvalSpecs returns two dicts, by name.

    Raises:
      hostopt.ConfigError: the evaluators of the cluster do not fit eval_spec.
      hostopt.HostOptError: the ring failed, or an evaluator lost the chief.
      TypeError: an argument is of a wrong type.
    """
    eval_specs = _check_specs(eval_spec)
    TrainingExecutor(estimator, train_spec, eval_specs[0])  # checks its arguments
    strategy = estimator.config.train_distribute
    if not isinstance(strategy, HostOffloadStrategy) or strategy.cluster.task is None:
        with training_without_ring(estimator.model_dir, estimator.config):
            if len(eval_specs) == 1:
                recall_best(estimator, eval_specs[0])
                results = stock_train_and_evaluate(estimator, train_spec, eval_specs[0])
                return results or (None, [])  # an evaluator gets None
            _train(estimator, train_spec)
            return evaluate_final(estimator, train_spec, eval_specs)
    if strategy.cluster.role == "evaluator":
        start_beside_ring(strategy.cluster, strategy.options)
        index, count = strategy.cluster.task.index, len(strategy.cluster.evaluators)
        return _run_evaluator(index, count, estimator, train_spec, eval_specs)
    if not strategy.cluster.is_chief:
        _train(estimator, train_spec)
        return None, []
    return _run_chief(strategy, estimator, train_spec, eval_specs)


def _check_specs(eval_spec: EvalSpec | Sequence[EvalSpec]) -> list[EvalSpec]:
    several = isinstance(eval_spec, (list, tuple)) and not isinstance(eval_spec, EvalSpec)
    eval_specs: list[EvalSpec] = list(eval_spec) if several else [eval_spec]
    for spec in eval_specs:
        if not isinstance(spec, EvalSpec):
            raise TypeError(
                f"`eval_spec` must have type `tf.estimator.EvalSpec`, or be a list of them. Got: "
                f"{type(spec)}"
            )
    names = [spec.name for spec in eval_specs]
    if not names or (len(names) > 1 and (not all(names) or len(set(names)) < len(names))):
        raise hostopt.ConfigError(
            f"the EvalSpecs are named {names}, wanted one EvalSpec, or several with different "
            "names. Give each a name, such as EvalSpec(..., name='night')"
        )
    return eval_specs


def _run_chief(
    strategy: HostOffloadStrategy,
    estimator: Estimator,
    train_spec: TrainSpec,
    eval_specs: list[EvalSpec],
) -> tuple[Any, Any]:
    marker = EndMarker(estimator.model_dir)
    with contextlib.ExitStack() as lock:
        try:
            lock.enter_context(training_in(estimator.model_dir))
            note_ring(estimator.model_dir, strategy.cluster)
            marker.remove()
        except hostopt.HostOptError as error:
            strategy.communicator.abort(error)  # connects first, as the other ranks wait
            raise
        _train(estimator, train_spec)
        results: tuple[Any, Any] = (None, [])
        if not strategy.cluster.evaluators:
            _log.info("the cluster has no evaluator: the chief evaluates the final checkpoint")
            results = evaluate_final(estimator, train_spec, eval_specs)
        marker.write(tf.train.latest_checkpoint(estimator.model_dir))
    return results


def _run_evaluator(
    index: int,
    count: int,
    estimator: Estimator,
    train_spec: TrainSpec,
    eval_specs: list[EvalSpec],
) -> tuple[Any, Any]:
    """Evaluates alone, with one of several EvalSpecs, or together with other evaluators."""
    if len(eval_specs) > 1:
        if index >= len(eval_specs) or count not in (0, len(eval_specs)):
            names = [spec.name for spec in eval_specs]
            raise hostopt.ConfigError(
                f"evaluator {index} of {count or 'an unknown number'} has the EvalSpecs {names}, "
                f"wanted one for each evaluator. Start {len(names)} evaluators"
            )
        return evaluate_until_end(estimator, train_spec, eval_specs[index])
    (eval_spec,) = eval_specs
    if index == 0 and count <= 1:
        return evaluate_until_end(estimator, train_spec, eval_spec)
    strategy = estimator.config.train_distribute
    with (
        connect_evaluators(strategy, eval_spec.input_fn) as evaluators,
        with_evaluators(estimator, evaluators) as shared,
    ):
        if index > 0:
            return evaluate_announced(shared, estimator.model_dir, eval_spec, evaluators)
        results = evaluate_until_end(shared, train_spec, eval_spec, evaluators.announce)
        evaluators.announce(ended=True)
        return results


def _train(estimator: Estimator, train_spec: TrainSpec) -> None:
    estimator.train(
        train_spec.input_fn,
        hooks=train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=train_spec.saving_listeners,
    )
