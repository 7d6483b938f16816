"""Synchronisations of ranks that train by themselves in between.

All ranks count the same number of steps to the next synchronisation. It begins with an exchange of
what each rank has done and wants. Everything that all ranks must do together happens after it:
saves, evaluations and stops.

About once a second the ranks exchange whether one of them requests a stop, such as after SIGTERM.
Nobody waits for the answer before the next exchange. If there is a request, the synchronisation
takes place at once, after the same step on all ranks.

A rank whose data have ended takes part in all exchanges, without steps, until all data have ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext.coordinated_stop import CoordinatedTimer, EndStopSaveHook
from estimator_ext.input_state import InputStates
from estimator_ext.local_steps import LocalSteps
from estimator_ext.replicas import Replicas
from estimator_ext.sync_on_read import SyncOnRead, assign
from hostopt.tensorflow.ops import StopSaveFlags

__all__: list[str] = []

_CHECK_S = 1.0  # between two exchanges of requests to stop


class _State(NamedTuple):
    """What a rank has done since the last synchronisation, and wants.

    Args:
      examples: number of its examples.
      step: its global_step.
      step_s: duration of its steps, in seconds; 0 if it has made none.
      saves: 1 if it is about to save.
      stops: 1 if it requests a stop.
      has_ended: 1 if its data or its training have ended.
      checksum: CRC-32 of its variables after the last synchronisation.
    """

    examples: float
    step: float
    step_s: float
    saves: float
    stops: float
    has_ended: float
    checksum: float


class SyncHook(tf.compat.v1.train.SessionRunHook):
    """Synchronises the ranks; it must come before hooks that save. All ranks must have it.

    Args:
      communicator: a `duplicate` that nothing else uses.
      options: when ranks synchronise.
      replicas: the variables of all ranks.
      flags: requests of the ranks.
      sync_on_read: variables that differ by rank.
      input_states: states of the input iterators of all ranks.
      savers: hooks of this rank that save checkpoints.
      stops: the hook that ends the training on all ranks.
      examples: scalar, the number of examples in a step.
      ends_together: True if all ranks stop when the data of one have ended.
      checks: True if ranks compare their variables.
    """

    def __init__(
        self,
        communicator: hostopt.Communicator,
        options: LocalSteps,
        replicas: Replicas,
        flags: StopSaveFlags,
        sync_on_read: SyncOnRead,
        input_states: InputStates,
        savers: Sequence[tf.compat.v1.train.CheckpointSaverHook],
        stops: EndStopSaveHook,
        examples: tf.Tensor,
        ends_together: bool,
        checks: bool,
    ) -> None:
        self._communicator = communicator
        self._options = options
        self._replicas = replicas
        self._flags = flags
        self._sync_on_read = sync_on_read
        self._input_states = input_states
        self._stops = stops
        self._examples_in_step = examples
        self._ends_together = ends_together
        self._checks = checks
        for saver in savers:
            saver._timer = CoordinatedTimer(saver._timer, flags)
        self._timers = [saver._timer for saver in savers]
        self._global_step: Any = None
        self._step = self._first_step = 0
        self._increment = 0  # of global_step in a step; 0 while unknown
        self._requests = communicator.open_scalar_sum("requests to stop")
        self._has_asked = False  # a sum of requests has started
        self._interval = 0  # steps from the last synchronisation to the next; 0 at first
        self._check_steps = 1  # between two exchanges of requests
        self._position = 0  # steps since the last synchronisation, of a rank that has data
        self._steps = self._examples = 0  # of this rank, since the last synchronisation
        self._since_s = 0.0

    def begin(self) -> None:
        """Finds global_step."""
        self._global_step = tf.compat.v1.train.get_global_step()

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Stores the first step."""
        del coord
        self._step = self._first_step = int(session.run(self._global_step))

    def before_run(self, run_context: Any) -> Any:
        """Fetches the number of examples."""
        session = run_context.session
        if not self._interval:  # the hooks have broadcast the variables
            self._replicas.begin(session)
            self._begin_interval(0.0)
        self._sync_on_read.restore_local(session)
        self._input_states.forget()
        self._flags.set_total(0.0)
        return tf.compat.v1.train.SessionRunArgs(self._examples_in_step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Synchronises if it is time."""
        session = run_context.session
        self._examples += int(run_values.results)
        self._steps += 1
        if not self._increment:
            self._increment = int(session.run(self._global_step)) - self._step
        self._step += self._increment
        if self._is_due():
            self._synchronise(session, has_ended=False)

    def end(self, session: tf.compat.v1.Session) -> None:
        """Synchronises until all ranks have ended, and collects on the chief what it saves."""
        if not self._interval:  # ended before its first step
            self._replicas.begin(session)
            self._begin_interval(0.0)
        self._sync_on_read.restore_local(session)
        while not (self._is_due() and self._synchronise(session, has_ended=True)):
            pass
        self._communicator.finish("the last step")
        self._sync_on_read.aggregate_to_chief(session)
        self._input_states.gather(session)

    def _is_due(self) -> bool:
        """Counts a step, and returns True if a synchronisation follows it on all ranks."""
        self._position += 1
        if self._position >= self._interval:
            return True
        return self._position % self._check_steps == 0 and self._is_stop_requested()

    def _is_stop_requested(self) -> bool:
        """Returns True if a rank had requested a stop at the previous exchange."""
        if self._has_asked and self._take_requests():
            return True
        self._requests.start(float(self._flags.stop), 0.0)
        self._has_asked = True
        return False

    def _take_requests(self) -> bool:
        self._has_asked = False
        return self._requests.wait()[0] > 0

    def _synchronise(self, session: tf.compat.v1.Session, *, has_ended: bool) -> bool:
        """Synchronises the ranks, and returns True if all of them have ended."""
        if self._has_asked:
            self._take_requests()
        is_due = any(timer.is_due(self._step) for timer in self._timers)
        self._flags.save = is_due and not has_ended
        states = self._exchange(has_ended)
        ended = sum(state.has_ended for state in states)
        stopping = sum(state.stops for state in states)
        all_ended = ended == len(states)
        if self._ends_together and ended and not all_ended:
            stopping = max(stopping, 1.0)
        self._flags.ranks_saving = int(sum(state.saves for state in states))
        self._flags.ranks_stopping = int(stopping)
        step = max(int(state.step) for state in states)
        is_last = bool(stopping or all_ended or self._stops.is_common_last(step))
        is_full = is_last or bool(self._flags.ranks_saving)
        examples = sum(state.examples for state in states)
        if examples:
            weight = states[self._communicator.rank].examples / examples
            self._replicas.synchronise(session, weight, self._step, is_full=is_full)
        self._adopt_step(session, step)
        self._begin_interval(max(state.step_s for state in states), is_last=is_last)
        if self._flags.ranks_saving:
            self._sync_on_read.aggregate_to_chief(session)
            self._input_states.gather(session)
        return all_ended

    def _exchange(self, has_ended: bool) -> list[_State]:
        step_s = (time.monotonic() - self._since_s) / self._steps if self._steps else 0.0
        local = _State(
            self._examples,
            self._step,
            step_s,
            self._flags.save,
            self._flags.stop,
            has_ended,
            self._replicas.anchor_checksum() if self._checks else 0,
        )
        name = f"the states of the ranks after step {self._step}"
        gathered = self._communicator.all_gather(np.array(local, np.float64), "synchronisation")
        states = [_State(*row) for row in gathered.tolist()]
        differing = [r for r, each in enumerate(states) if each.checksum != states[0].checksum]
        if differing:
            raise self._mismatch(differing, name)
        return states

    def _mismatch(self, differing: Sequence[int], name: str) -> hostopt.CollectiveMismatchError:
        cluster = self._communicator.transport.cluster
        return hostopt.CollectiveMismatchError(
            f"after the last synchronisation the variables of {cluster.describe(0)} and "
            f"{', '.join(map(cluster.describe, differing))} differed ({name}), but all ranks "
            "should have had the same values. Look for a hook, a callback or a session.run that "
            "changes variables on one rank, and resume from an earlier checkpoint",
            **cluster.attributes(differing[0]),
            step=self._step,
        )

    def _adopt_step(self, session: tf.compat.v1.Session, step: int) -> None:
        """Sets global_step to that of the rank with the most steps."""
        if step != self._step:
            assign(session, [self._global_step], [np.int64(step)])
            self._step = step

    def _begin_interval(self, step_s: float, *, is_last: bool = False) -> None:
        interval = self._options.interval(self._step - self._first_step, step_s)
        left = self._stops.steps_left(self._step)
        if left is not None:
            interval = min(interval, -(-left // (self._increment or 1)))
        self._interval = 1 if is_last else max(interval, 1)
        self._check_steps = max(1, int(_CHECK_S / step_s)) if step_s else 1
        self._position = self._steps = self._examples = 0
        self._since_s = time.monotonic()
