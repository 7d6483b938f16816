"""The input of a training step on a ring: this rank's data, and the weight of each batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

import hostopt
from estimator_ext import _tf_estimator
from estimator_ext.data_workers.service import data_service
from estimator_ext.input.batch_position import BatchCounter
from estimator_ext.input.kinds import log_limits
from estimator_ext.input.state import KINDS
from estimator_ext.pipelines.sharding import dividing, few_files_refused
from estimator_ext.reduction.accumulation import Accumulation
from estimator_ext.reduction.gradient_reduction import GradientReduction
from estimator_ext.reduction.uneven_data import (
    MODES,
    BatchWeights,
    Needs,
    check_endless,
    count_examples,
    has_next,
    needs_of,
    repeat_last_batch,
)
from estimator_ext.strategy.strategy import HostOffloadStrategy


class TrainingInput(NamedTuple):
    """Tensors and hooks of the input of a training.

    Args:
      hooks: hooks that initialize the iterators.
      has_next: scalar of bool that reads a batch; False or an OutOfRangeError means that the data
        have ended.
      counter: None if the batches are not counted.
    """

    features: Any
    labels: Any
    hooks: list[Any]
    has_next: tf.Tensor
    counter: BatchCounter | None


def build_input(
    strategy: HostOffloadStrategy,
    reduction: GradientReduction,
    config: Any,
    call_input_fn: Callable[[tf.distribute.InputContext], Any],
    is_sharded: bool,
    stack: contextlib.ExitStack,
) -> TrainingInput:
    """Builds the input of a training step. Collective.

    Args:
      reduction: gets the accumulation and the weights of batches.
      is_sharded: True if input_fn itself shards the data, because it takes an input context.
      stack: receives the scopes in which the data workers are watched and errors are explained.
    """
    communicator = strategy.communicator
    counter = _new_counter(communicator, getattr(config, "resume_data", KINDS[0]))
    service = stack.enter_context(data_service(strategy, config))
    if service is None:
        stack.enter_context(few_files_refused())
        data = _share_of_rank(strategy, config, call_input_fn, is_sharded)
    else:  # its workers divide the data
        data = call_input_fn(tf.distribute.InputContext(1, 0, strategy.num_replicas_in_sync))
    if communicator.rank == 0:
        log_limits(data, communicator.size, is_counted=counter is not None)
    micro_batches = getattr(config, "accumulate_steps", 1)
    needs = Needs(weights=False, join=False)
    if communicator.size > 1 and not reduction.is_local:
        needs = needs_of(data, communicator, config.session_config)
        if service is not None and not needs.join:
            check_endless(data, config.session_config)
    watch: list[Any] = []
    if service is not None:
        watch, data = [service.watch], service.prepare(data, config)
    is_new: Any = True
    if needs.join:
        # each element is (batch, is_new); the stock function returns them as features and labels
        batch, is_new, hooks = _tf_estimator.parse_input_fn_result(repeat_last_batch(data))
    else:
        *batch, hooks = _tf_estimator.parse_input_fn_result(data)
    if counter is not None:
        batch, is_new = counter.counted((batch, is_new), is_new)
    counts = count_examples(batch, is_new) if needs.weights else []
    if micro_batches > 1:
        accumulation = reduction.accumulation = Accumulation(micro_batches, *counts[:1])
        if counts:
            counts = [accumulation.all_examples, accumulation.total(counts[1], "batches")]
    if counts:
        weights = BatchWeights(*counts, communicator, getattr(config, "uneven_data", MODES[0]))
        reduction.values.weights = weights
        if needs.join and reduction.accumulation is None:  # compute nothing without data
            with tf.control_dependencies([weights.mean_weight]):
                batch = tf.nest.map_structure(tf.identity, batch)
    features, labels = _features_and_labels(batch)
    more = is_new if needs.join else has_next((features, labels))
    return TrainingInput(features, labels, [*watch, *hooks], more, counter)


def _features_and_labels(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (list, tuple)):
        return batch, None
    if len(batch) != 2:
        raise ValueError("input_fn should return (features, labels) as a len 2 tuple.")
    return batch[0], batch[1]


def _share_of_rank(
    strategy: HostOffloadStrategy,
    config: Any,
    call_input_fn: Callable[[tf.distribute.InputContext], Any],
    is_sharded: bool,
) -> Any:
    communicator, context = strategy.communicator, strategy.extended.input_context()
    if communicator.size == 1 or is_sharded:
        return call_input_fn(context)
    policy = strategy.extended.auto_shard
    with dividing(communicator, context, policy, config.session_config) as divide:
        return divide(call_input_fn(context))


def _new_counter(communicator: hostopt.Communicator, kind: str) -> BatchCounter | None:
    communicator.check_same({"resume_data": repr(kind)}, "the configurations of the ranks")
    return None if kind == KINDS[0] else BatchCounter()
