"""Several evaluators: each evaluates a slice of the data of every checkpoint.

An evaluation, in which all evaluators make the same calls::

    [E1] evaluator 0 announces a checkpoint, or nothing, or the end
    [E2] each restores the checkpoint, and all confirm it: it may be deleted by now, or damaged
    [E3] each evaluates its slice
    [E4] the metric variables are summed, and evaluator 0 writes the results

While there is no new checkpoint, evaluator 0 announces nothing twice a second as a sign of life.
In an evaluation the others wait for the slowest evaluator, and for the exports of evaluator 0.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext.checkpoints.file_errors import io_error
from estimator_ext.checkpoints.reading import is_intact
from hostopt.connect import connect_ring

# Minimum of collective_timeout_s between evaluators, as one may need much longer than another. A
# dead process is detected at once.
_MIN_TIMEOUT_S = 3600.0


class Evaluators:
    """The evaluators of a cluster, as seen by one of them."""

    def __init__(self, communicator: hostopt.Communicator) -> None:
        self.communicator = communicator
        self._unconfirmed = ""  # checkpoint that not all have confirmed to be restored

    @property
    def index(self) -> int:
        """Index of this evaluator; evaluator 0 leads and writes."""
        return self.communicator.rank

    @property
    def input_context(self) -> tf.distribute.InputContext:
        """Slice of the data of this evaluator; batches are as large as with one evaluator."""
        return tf.distribute.InputContext(self.communicator.size, self.index, 1)

    def local_steps(self, steps: int | None) -> int | None:
        """Returns this evaluator's share of the steps of all evaluators; None is for all data."""
        size = self.communicator.size
        if steps is None:
            return None
        if steps < size:
            raise hostopt.ConfigError(
                f"EvalSpec.steps is {steps} for {size} evaluators, which share the steps. Give at "
                f"least {size}, or start fewer evaluators"
            )
        return steps // size + (self.index < steps % size)

    def announce(self, **message: Any) -> None:
        """[E1] Announces the next evaluation; evaluator 0 calls it.

        Args:
          **message: checkpoint: file name of the checkpoint; ended: training has ended; nothing:
            a sign of life.
        """
        self._exchange(message)

    def wait_for_checkpoint(self) -> str | None:
        """[E1] Waits for the next evaluation; all evaluators but evaluator 0 call it.

        Returns the file name of the checkpoint in model_dir; None at the end.
        """
        message: dict[str, Any] = {}
        while "checkpoint" not in message:
            message = self._exchange({})
            if "ended" in message:
                return None
        return str(message["checkpoint"])

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        encoded = json.dumps(message).encode()
        messages = self.communicator.all_gather_bytes(encoded, "the next evaluation")
        return dict(json.loads(messages[0]))

    @contextlib.contextmanager
    def evaluation(self, checkpoint: str, model_dir: str) -> Iterator[None]:
        """Scope of one evaluation, which evaluator 0 announces.

        Args:
          model_dir: directory of the files that this evaluator writes.

        Raises:
          hostopt.CheckpointError: an evaluator could not restore the checkpoint. Only after this
            error there may be another evaluation.
        """
        if self.index == 0:
            self.announce(checkpoint=os.path.basename(checkpoint))
        self._unconfirmed = checkpoint
        try:
            yield
        except hostopt.HostOptError:
            raise
        except BaseException as error:
            may_be_damage = isinstance(error, (ValueError, IndexError, tf.errors.OpError))
            if self._unconfirmed and may_be_damage and not is_intact(checkpoint):
                self.confirm_restored(False)
            translated = io_error(error, model_dir)
            self.communicator.abort(translated or error)
            if translated is not None:
                raise translated from error
            raise

    def confirm_restored(self, success: bool = True) -> None:
        """[E2] Raises an error on all evaluators unless all have restored the checkpoint.

        Collective: all evaluators must call it.
        """
        checkpoint, self._unconfirmed = self._unconfirmed, ""
        answers = self.communicator.all_gather_bytes(
            b"1" if success else b"", f"who has restored {os.path.basename(checkpoint)}"
        )
        ring = self.communicator.transport.cluster.ring
        failed = [task.name for task, answer in zip(ring, answers) if not answer]
        if failed:
            raise hostopt.CheckpointError(
                f"{', '.join(failed)} could not read {checkpoint}. Give all evaluators the "
                "chief's model_dir; if training deletes checkpoints too early, raise "
                "keep_checkpoint_max"
            )


@contextlib.contextmanager
def connect_evaluators(strategy: Any, input_fn: Callable[..., Any]) -> Iterator[Evaluators]:
    """Connects the evaluators; an error in the block ends all of them."""
    ring = strategy.cluster.evaluator_ring()
    if "input_context" not in inspect.signature(input_fn).parameters:
        raise hostopt.ConfigError(
            "the input_fn of EvalSpec has no argument input_context, so each example would be "
            f"counted {ring.size} times. Let it take input_context and return "
            "dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id), "
            "or give train_and_evaluate one EvalSpec for each evaluator"
        )
    communication = strategy.options.communication
    options = dataclasses.replace(
        strategy.options,
        communication="auto" if communication == "mpi" else communication,
        debug_dir=None,  # the ranks that train write there
        collective_timeout_s=max(strategy.options.collective_timeout_s, _MIN_TIMEOUT_S),
        timeline=None,
    )
    with connect_ring(ring, options) as communicator:
        yield Evaluators(communicator)


@contextlib.contextmanager
def with_evaluators(estimator: Any, evaluators: Evaluators) -> Iterator[Any]:
    """Creates a copy of an Estimator to evaluate with others; only evaluator 0 keeps model_dir."""
    shared = copy.copy(estimator)
    shared._evaluators = evaluators
    with tempfile.TemporaryDirectory() as scratch:
        if evaluators.index > 0:
            shared._model_dir = scratch
        yield shared
