"""Coordinated stops and saves: all ranks stop after the same step, and know when the chief saves.

Before each step a rank adds its requests to a sum over the ranks, which shares the message of the
loss if there is one. All ranks have the sum when the step has ended. A stop that only one rank
requests therefore happens one step later, after the same step on all ranks. A stop that all ranks
know beforehand, such as at max_steps, happens immediately.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import (
    SaverHook,
    cancel_stop,
    interval_of,
    last_steps,
    set_timer,
    timer_of,
)
from estimator_ext.graphs.global_step import read_global_step
from estimator_ext.input.state import InputStates
from estimator_ext.reduction.divided_slots import DividedSlots
from estimator_ext.variables.sync_on_read import SyncOnRead
from hostopt.collectives.communicator import all_gather_json
from hostopt.tensorflow.ops import StopSaveFlags

_log = tf.get_logger()


class Coordinated(NamedTuple):
    """Parts of a training that all ranks must handle at the same steps."""

    flags: StopSaveFlags  # requests of the ranks; may travel with the loss
    sync_on_read: SyncOnRead  # variables that differ by rank
    divided: DividedSlots  # of which each rank has a part
    input_states: InputStates  # of all ranks
    savers: Sequence[SaverHook]  # hooks of this rank that save checkpoints

    def coordinate_saves(self) -> None:
        """Makes the savers save only after steps that all ranks know of."""
        for saver in self.savers:
            set_timer(saver, _CoordinatedTimer(timer_of(saver), self.flags))

    def is_save_due(self, step: int) -> bool:
        """Returns True if a hook of this rank should save after a step."""
        return any(timer_of(saver).is_due(step) for saver in self.savers)

    def collect(self, session: tf.compat.v1.Session, *, has_more: bool = False) -> None:
        """Collects on the chief what it is about to save. Collective: all ranks must call it."""
        self.sync_on_read.aggregate_to_chief(session)
        self.divided.gather(session)
        self.input_states.gather(session, has_more=has_more)

    def resume(self, session: tf.compat.v1.Session) -> None:
        """Returns to the state of this rank, because a step follows."""
        self.sync_on_read.restore_local(session)
        self.divided.release(session)
        self.input_states.forget()


class BeginStopSaveHook(tf.compat.v1.train.SessionRunHook):
    """Exchanges the flags of each step and collects on the chief what it is about to save.

    It must come before all other hooks. All ranks must have it, and `EndStopSaveHook`.
    """

    def __init__(self, communicator: hostopt.Communicator, coordinated: Coordinated) -> None:
        self._communicator = communicator
        self._flags_sum = None
        if not coordinated.flags.travel:
            self._flags_sum = communicator.open_scalar_sum("requests to stop or save")
        self._coordinated, self._flags = coordinated, coordinated.flags
        self._step = 0
        self._increment = 0  # of global_step in a step, which need not be 1; 0 while unknown

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Stores the first step, and prepares what the chief saves before it."""
        self._coordinated.divided.initialize(session)
        self._step = read_global_step(session)

    def before_run(self, run_context: Any) -> None:
        """Sends the requests of this rank."""
        self._coordinated.resume(run_context.session)
        self._flags.save = self._coordinated.is_save_due(self._step + (self._increment or 1))
        if self._flags_sum is not None:
            self._flags_sum.start(0.0, float(self._flags.local))

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Receives the requests of all ranks; collects on the chief what it is about to save."""
        if self._flags_sum is not None:
            self._flags.set_total(float(self._flags_sum.wait()[1]))
        self._count(run_context.session)
        if self._flags.ranks_saving:
            self._coordinated.collect(run_context.session)

    def _count(self, session: tf.compat.v1.Session) -> None:
        """Updates the step; reads it only if needed, as that takes as long as a small step."""
        step = self._step + self._increment
        if self._coordinated.savers and (self._flags.ranks_saving or not self._increment):
            step = read_global_step(session)
            self._increment = self._increment or step - self._step
        self._step = step

    def end(self, session: tf.compat.v1.Session) -> None:
        """Collects on the chief what it saves at the end."""
        self._communicator.finish("the last step")  # ranks that have more steps report an error
        self._coordinated.resume(session)
        self._coordinated.collect(session)


class EndStopSaveHook(tf.compat.v1.train.SessionRunHook):
    """Turns a stop that a hook of this rank requests into a stop of all ranks.

    It must come after all other hooks. All ranks must have it. They stop at once at `last_step`,
    the first at which a `StopAtStepHook` of every rank stops.
    """

    def __init__(
        self, communicator: hostopt.Communicator, flags: StopSaveFlags, hooks: Sequence[Any]
    ) -> None:
        self._communicator = communicator.duplicate("the steps at which ranks stop")
        self._flags = flags
        self._hooks = hooks
        self.last_step = sys.maxsize

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Finds the step at which all ranks stop."""
        of_ranks = all_gather_json(self._communicator, last_steps(self._hooks))
        of_all = set.intersection(*map(set, of_ranks))
        self.last_step = min(of_all, default=sys.maxsize)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Stops if a rank has requested it; postpones a stop that only this rank knows of."""
        if self._flags.ranks_stopping:
            _log.info("training stops: requested by %d rank(s)", self._flags.ranks_stopping)
            run_context.request_stop()
        elif run_context.stop_requested and read_global_step(run_context.session) < self.last_step:
            cancel_stop(run_context)
            self._flags.stop = True


class _CoordinatedTimer(tf.compat.v1.train.SecondOrStepTimer):
    """Triggers a save only if it was due before the step, so that all ranks know of it."""

    def __init__(self, timer: tf.compat.v1.train.SecondOrStepTimer, flags: StopSaveFlags) -> None:
        super().__init__(*interval_of(timer))
        self._flags = flags

    def is_due(self, step: int) -> bool:
        return bool(super().should_trigger_for_step(step))

    def should_trigger_for_step(self, step: int) -> bool:
        return bool(self._flags.ranks_saving) and self.is_due(step)
