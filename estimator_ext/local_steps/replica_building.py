"""Builds the synchronisation of ranks that train by themselves, and compares their steps."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import saved_as
from estimator_ext.checkpoints.saving import has_own_saver
from estimator_ext.graphs.fingerprint import read_updates
from estimator_ext.local_steps.outer_step import SCOPE, OuterStep
from estimator_ext.local_steps.replicas import Replicas
from estimator_ext.spec import operations_of_step
from estimator_ext.strategy.local_steps import LocalSteps

# They compute a variable from its slots, and hardly from its value.
_FROM_SLOTS = re.compile(r"(?:^|; )((?:Resource)?(?:Sparse)?Apply(?:Ftrl(?:V2)?|AdagradDA))\(")


def build_replicas(strategy: Any, spec: Any, data: Collection[tf.Operation]) -> Replicas | None:
    """Builds the outer steps, if there are any.

    Collective: all ranks must call it.

    Args:
      spec: spec of the step, in the default graph.

    Returns:
      The models of all ranks; None if the ranks reduce gradients in each step.

    Raises:
      hostopt.ConfigError: a variable cannot be synchronised, its optimizer would undo it, or a
        saver of the model_fn would not save the slots of the outer optimizer.
      hostopt.CollectiveMismatchError: ranks have different steps, outer steps or options.
    """
    options, communicator = strategy.local_steps, strategy.communicator
    if not options.is_used:
        return None
    if options.outer_optimizer is not None and has_own_saver(spec):
        raise hostopt.ConfigError(
            "model_fn creates a saver, which does not save the slots of outer_optimizer. Leave "
            "the saver to the Estimator, or leave outer_optimizer out"
        )
    updates = read_updates(operations_of_step(spec), data)
    _check_optimizers(options, updates.texts)
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


def _check_optimizers(options: LocalSteps, updates: Mapping[str, str]) -> None:
    """Checks that the next step of an optimizer does not undo a synchronisation."""
    if options.slot_rule == "average" and options.outer_optimizer is None:
        return
    for name, text in updates.items():
        found = _FROM_SLOTS.search(text)
        if found:
            raise hostopt.ConfigError(
                f"{found[1]} computes variable {name!r} from its slots, so the next step would "
                "undo a synchronisation with outer_optimizer, sync_delay, or another sync_slots "
                "than 'average'. Leave them out, or use another optimizer than Ftrl and AdagradDA"
            )


def check_outer_slots(checkpoint: str) -> None:
    """Checks that a checkpoint has the slots of the outer optimizer in the default graph.

    Args:
      checkpoint: path of the checkpoint from which the training resumes.

    Raises:
      hostopt.CheckpointError: it does not.
    """
    variables = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, f"{SCOPE}/")
    if not variables:
        return
    saved = tf.train.load_checkpoint(checkpoint).get_variable_to_shape_map()
    missing = [name for name, _ in map(saved_as, variables) if name not in saved]
    if missing:
        raise hostopt.CheckpointError(
            f"{checkpoint} has no {missing[0]!r}, a slot of outer_optimizer: it was saved with "
            "other options. Use the same options, or start in another model_dir with "
            f"warm_start_from={checkpoint!r}"
        )
