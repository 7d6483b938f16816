"""Builds the synchronisation of ranks that train by themselves, and compares their steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from estimator_ext.fingerprint import read_updates
from estimator_ext.outer_step import OuterStep
from estimator_ext.replicas import Replicas

__all__: list[str] = []


def build_replicas(
    strategy: Any, targets: Sequence[tf.Operation], data: Collection[tf.Operation]
) -> Replicas:
    """Builds the outer steps, if there are any.

    Collective: all ranks must call it.

    Args:
      strategy: the `HostOffloadStrategy` of the training.
      targets: operations that run in a step, in the default graph.
      data: operations of this rank's input.

    Returns:
      The models of all ranks.

    Raises:
      hostopt.CollectiveMismatchError: ranks have different steps, outer steps or options.
    """
    options, communicator = strategy.local_steps, strategy.communicator
    updates = read_updates(targets, data)
    steps: list[OuterStep] = []

    def new_outer(variables: Sequence[tf.Variable]) -> OuterStep:
        steps.append(OuterStep(strategy, options.new_outer_optimizer(), variables))
        return steps[-1]

    replicas = Replicas(
        communicator.duplicate("synchronisation of the variables"),
        options,
        updates.changes,
        new_outer if options.outer_optimizer is not None else None,
    )
    texts = {**updates.texts, **options.texts()}
    for outer in steps:
        found = read_updates([outer.operation], outer.operations).texts
        texts.update({f"{name} in the outer step": text for name, text in found.items()})
    communicator.check_same(texts, "the updates of variables")
    return replicas
