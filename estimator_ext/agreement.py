"""What the ranks agree on in each step: that all stop after it, that the chief saves after it.

Each rank tells the others what it wants before a step, together with its loss where that travels
anyway, and all know the sum when the step has ended. So a stop that only one rank is asked for
happens one step later, on all ranks after the same step; those that all ranks know beforehand, as
of max_steps, happen at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext.input_state import InputStates
from estimator_ext.sync_on_read import SyncOnRead
from hostopt.posted_sum import open_posted_sum
from hostopt.tensorflow.ops import Flags

__all__: list[str] = []

_log = tf.get_logger()

_Saver = tf.compat.v1.train.CheckpointSaverHook


class BeginAgreementHook(tf.compat.v1.train.SessionRunHook):
    """Exchanges the flags of a step, and gathers what the chief saves; before all other hooks.

    All ranks must have it, and `EndAgreementHook`.

    Args:
      communicator: the ring.
      flags: travel with the reported loss, where that is posted.
      sync_on_read: variables that differ by rank.
      input_states: how far the data of the ranks are read.
      savers: hooks of this rank that save checkpoints.
    """

    def __init__(
        self,
        communicator: hostopt.Communicator,
        flags: Flags,
        sync_on_read: SyncOnRead,
        input_states: InputStates,
        savers: Sequence[_Saver],
    ) -> None:
        self._communicator = communicator
        self._posted = None
        if not flags.travel:
            self._posted = open_posted_sum(communicator, "requests to stop or save")
        self._flags = flags
        self._sync_on_read = sync_on_read
        self._input_states = input_states
        for saver in savers:
            saver._timer = _AgreedTimer(saver._timer, flags)
        self._timers = [saver._timer for saver in savers]
        self._step = 0
        self._increment = 0  # of a step; 0 until it is known, as a train_op may not count in ones

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Note the step from which steps are counted.

        Args:
          session: the session of this rank.
          coord: not used.
        """
        del coord
        self._step = int(session.run(tf.compat.v1.train.get_global_step()))

    def before_run(self, run_context: Any) -> None:
        """Tell the others what this rank wants.

        Args:
          run_context: of this step.
        """
        self._sync_on_read.take_back(run_context.session)
        self._input_states.forget()
        next_step = self._step + (self._increment or 1)
        self._flags.save = any(timer.is_due(next_step) for timer in self._timers)
        if self._posted is not None:
            self._posted.post(0.0, float(self._flags.own))

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Learn what the others want; give the chief what it is about to save.

        Args:
          run_context: of this step.
          run_values: not used.

        Raises:
          hostopt.HostOptError: a rank failed, left or timed out.
        """
        del run_values
        if self._posted is not None:
            self._flags.agree(float(self._posted.collect()[1]))
        self._count(run_context.session)
        if self._flags.ranks_saving:
            self._sync_on_read.gather(run_context.session)
            self._input_states.gather(run_context.session)

    def _count(self, session: tf.compat.v1.Session) -> None:
        """Keep the step up to date; reading it takes as long as a small step, so not each time."""
        step = self._step + self._increment
        if self._timers and (self._flags.ranks_saving or not self._increment):
            step = int(session.run(tf.compat.v1.train.get_global_step()))
            self._increment = self._increment or step - self._step
        self._step = step

    def end(self, session: tf.compat.v1.Session) -> None:
        """Give the chief what it saves at the end.

        Args:
          session: the session of this rank.

        Raises:
          hostopt.HostOptError: a rank failed, left or timed out.
        """
        self._communicator.finish("the last step")  # or a rank that has more would not hear it
        self._sync_on_read.take_back(session)
        self._sync_on_read.gather(session)
        self._input_states.gather(session)


class EndAgreementHook(tf.compat.v1.train.SessionRunHook):
    """Turns a stop that a hook of this rank requests into one of all ranks; after all other hooks.

    Args:
      communicator: the ring.
      flags: those of `BeginAgreementHook`.
      hooks: those of this rank; `StopAtStepHook`s of the same step on all ranks need no agreement.
    """

    def __init__(
        self, communicator: hostopt.Communicator, flags: Flags, hooks: Sequence[Any]
    ) -> None:
        self._communicator = communicator.duplicate("the steps at which ranks stop")
        self._flags = flags
        self._hooks = [h for h in hooks if isinstance(h, tf.compat.v1.train.StopAtStepHook)]
        self._agreed_steps: set[int] = set()

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Find the steps at which all ranks stop anyway.

        Args:
          session: not used.
          coord: not used.

        Raises:
          hostopt.HostOptError: a rank failed, left or timed out.
        """
        del session, coord
        own = json.dumps([int(hook._last_step) for hook in self._hooks]).encode()
        steps = [set(json.loads(each)) for each in self._communicator.all_gather_bytes(own)]
        self._agreed_steps = set.intersection(*steps)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Stop where a rank wants it, and put off what only this rank knows.

        Args:
          run_context: of this step.
          run_values: not used.
        """
        del run_values
        if self._flags.ranks_stopping:
            _log.info("training stops: asked for by %d rank(s)", self._flags.ranks_stopping)
            run_context.request_stop()
        elif run_context.stop_requested:
            step = run_context.session.run(tf.compat.v1.train.get_global_step())
            if not any(step >= last for last in self._agreed_steps):
                run_context._stop_requested = False
                self._flags.stop = True


class _AgreedTimer(tf.compat.v1.train.SecondOrStepTimer):
    """Triggers a save that was due before the step, as all ranks know then."""

    def __init__(self, timer: tf.compat.v1.train.SecondOrStepTimer, flags: Flags) -> None:
        super().__init__(timer._every_secs, timer._every_steps)
        self._flags = flags

    def is_due(self, step: int) -> bool:
        """Whether a save should follow a step."""
        return bool(super().should_trigger_for_step(step))

    def should_trigger_for_step(self, step: int) -> bool:
        """Whether it does."""
        return bool(self._flags.ranks_saving) and self.is_due(step)
