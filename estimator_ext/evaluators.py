"""Several evaluators evaluate each checkpoint together, each a slice of the data.

A round, in which all make the same calls::

    1. evaluator 0 says which checkpoint it is, or that there is none yet, or that this is the end
    2. each reads the checkpoint, and says whether it could: it may be deleted by now, or damaged
    3. each evaluates its slice
    4. what they have counted is summed, and evaluator 0 writes the result

While there is nothing to do evaluator 0 begins a round every half second, so nobody waits long
without a sign of life. In a round they wait for the slowest, and for the exports of evaluator 0.
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
from estimator_ext.checkpoints import is_whole
from estimator_ext.file_errors import error_of_file
from hostopt.connect import meet

__all__: list[str] = []

# How much longer than another an evaluator may need, where collective_timeout_s is less. A process
# that has died is noticed at once.
_SLOWEST_S = 3600.0


class Evaluators:
    """The evaluators of one cluster, from the side of one of them.

    Args:
      communicator: their ring.
    """

    def __init__(self, communicator: hostopt.Communicator) -> None:
        self.communicator = communicator
        self._unread = ""  # checkpoint of which not all have said whether they could read it

    @property
    def index(self) -> int:
        """Which evaluator this is; 0 leads and writes."""
        return self.communicator.rank

    @property
    def input_context(self) -> tf.distribute.InputContext:
        """Which slice of the data this evaluator reads; batches are as large as with one."""
        return tf.distribute.InputContext(self.communicator.size, self.index, 1)

    def share(self, steps: int | None) -> int | None:
        """This evaluator's part of the steps that all do together; None for all data.

        Raises:
          hostopt.ConfigError: there are fewer steps than evaluators.
        """
        size = self.communicator.size
        if steps is None:
            return None
        if steps < size:
            raise hostopt.ConfigError(
                f"EvalSpec.steps is {steps} for {size} evaluators, which divide the steps among "
                f"them. Give at least {size}, or start fewer evaluators"
            )
        return steps // size + (self.index < steps % size)

    def say(self, **note: Any) -> None:
        """1. Begin a round; evaluator 0 calls this.

        Args:
          **note: checkpoint: file name of what to evaluate; ended: that this was the last round;
            nothing: that evaluator 0 is there.
        """
        self._exchange(note)

    def hear(self) -> str | None:
        """1. Wait for the next checkpoint; all but evaluator 0 call this.

        Returns:
          Its file name in model_dir; None at the end.
        """
        note: dict[str, Any] = {}
        while "checkpoint" not in note:
            note = self._exchange({})
            if "ended" in note:
                return None
        return str(note["checkpoint"])

    def _exchange(self, note: dict[str, Any]) -> dict[str, Any]:
        notes = self.communicator.all_gather_bytes(json.dumps(note).encode(), "the next round")
        return dict(json.loads(notes[0]))

    @contextlib.contextmanager
    def round(self, checkpoint: str, model_dir: str) -> Iterator[None]:
        """Scope of one evaluation, which evaluator 0 begins for all.

        Args:
          checkpoint: path of what is evaluated.
          model_dir: where this evaluator writes.

        Yields:
          Nothing.

        Raises:
          hostopt.CheckpointError: the checkpoint could not be read by all. After this
            error alone there may be another round.
        """
        if self.index == 0:
            self.say(checkpoint=os.path.basename(checkpoint))
        self._unread = checkpoint
        try:
            yield
        except hostopt.HostOptError:
            raise
        except BaseException as error:
            of_reading = isinstance(error, (ValueError, IndexError, tf.errors.OpError))
            if self._unread and of_reading and not is_whole(checkpoint):
                self.have_read(False)
            of_file = error_of_file(error, model_dir)
            self.communicator.abort(of_file or error)
            if of_file is not None:
                raise of_file from error
            raise

    def have_read(self, success: bool = True) -> None:
        """2. Say that this evaluator has read the checkpoint, and wait until all have.

        Args:
          success: False where it was gone or damaged.

        Raises:
          hostopt.CheckpointError: somebody could not read it; on all evaluators.
        """
        checkpoint, self._unread = self._unread, ""
        answers = self.communicator.all_gather_bytes(
            b"1" if success else b"", f"who has read {os.path.basename(checkpoint)}"
        )
        ring = self.communicator.transport.cluster.ring
        gone = [task.name for task, answer in zip(ring, answers) if not answer]
        if gone:
            raise hostopt.CheckpointError(
                f"{', '.join(gone)} could not read {checkpoint}. All evaluators need the chief's "
                "model_dir; where training deletes its checkpoints early, raise "
                "keep_checkpoint_max"
            )


@contextlib.contextmanager
def meet_evaluators(strategy: Any, input_fn: Callable[..., Any]) -> Iterator[Evaluators]:
    """Meet the other evaluators; an error that leaves the block ends them too.

    Args:
      strategy: a `HostOffloadStrategy` that knows the cluster.
      input_fn: what all evaluate.

    Yields:
      The evaluators.

    Raises:
      hostopt.ConfigError: input_fn knows no slices, or the evaluators have no addresses.
      hostopt.HostOptError: an evaluator failed, left or timed out.
    """
    ring = strategy.cluster.evaluator_ring()
    if "input_context" not in inspect.signature(input_fn).parameters:
        raise hostopt.ConfigError(
            f"the input_fn of EvalSpec has no argument input_context, so {ring.size} evaluators "
            "would count each example as many times. Let it take input_context and return "
            "dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id), "
            "or give train_and_evaluate one EvalSpec for each evaluator"
        )
    options = dataclasses.replace(
        strategy.options,
        debug_dir=None,  # the ranks that train write there
        collective_timeout_s=max(strategy.options.collective_timeout_s, _SLOWEST_S),
        timeline=None,
    )
    with meet(ring, options) as communicator:
        yield Evaluators(communicator)


@contextlib.contextmanager
def with_evaluators(estimator: Any, evaluators: Evaluators) -> Iterator[Any]:
    """An Estimator that evaluates with others; what all but evaluator 0 write is thrown away.

    Args:
      estimator: an `estimator_ext.Estimator`.
      evaluators: the others, and this one.

    Yields:
      A copy.
    """
    shared = copy.copy(estimator)
    shared._evaluators = evaluators
    with tempfile.TemporaryDirectory() as scratch:
        if evaluators.index > 0:
            shared._model_dir = scratch
        yield shared
