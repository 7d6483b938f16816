"""Synchronisations of ranks that train by themselves in between.

All ranks count the same number of steps to the next synchronisation, of one fragment of the model
after the other. It begins with an exchange of what each rank has done and wants. Everything that
all ranks must do together happens after a synchronisation of the whole model: saves, evaluations
and stops.

With a delay, a synchronisation of a fragment runs in the background::

    step       t                       t + delay                t + interval
    this rank  takes the difference    applies its mean         takes the next one
    thread     |--- exchange, reduce ---|

About once a second the ranks exchange whether one of them requests a stop, such as after SIGTERM.
Nobody waits for the answer before the next exchange. If there is a request, the synchronisation
takes place at once, after the same step on all ranks.

A rank whose data have ended takes part in all exchanges, without steps, until all data have ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext._tf_private import save, timer_of
from estimator_ext.local_steps.replicas import Fragment, Replicas
from estimator_ext.options import options_of
from estimator_ext.session.coordinated_stop import Coordinated, EndStopSaveHook
from estimator_ext.session.preemption import PreemptionHook
from estimator_ext.strategy.local_steps import LocalSteps
from estimator_ext.variables.sync_on_read import assign
from hostopt.tensorflow.ops import StopSaveFlags

_NO_EXAMPLES = 1e-6  # weight of a step whose examples are unknown, or that has none
_CHECK_S = 1.0  # between two exchanges of requests to stop


class _RankState(NamedTuple):
    """Progress of a rank since the last synchronisation, and its requests, which are 1 or 0."""

    step: float
    increment: float  # of global_step in its steps; 0 while unknown
    step_s: float  # duration of its steps; 0 if it has made none
    saves: float  # it is about to save
    stops: float  # it requests a stop
    has_ended: float  # its data or its training have ended
    checksum: float  # CRC-32 of its variables after the last synchronisation


@dataclass(eq=False)
class SyncHook(tf.compat.v1.train.SessionRunHook):
    """Synchronises the ranks; it must come before hooks that save. All ranks must have it."""

    communicator: hostopt.Communicator
    coordinated: Coordinated
    strategy: Any
    replicas: Replicas
    stops: EndStopSaveHook
    examples_in_step: tf.Tensor  # scalar
    config: Any
    hooks: Sequence[Any]  # of this rank, of which one knows its signals

    def __post_init__(self) -> None:
        self._options = self.strategy.local_steps
        self._flags = self.coordinated.flags
        self._schedule = _SyncSchedule(self.communicator, self._options, self._flags, self.stops)
        # of accumulated micro-batches only the last one is counted
        self._knows_examples = options_of(self.config).accumulate_steps == 1
        self._ends_together = options_of(self.config).uneven_data == "stop"
        self._checks = self.strategy.options.desync_check_steps > 0
        self._preemptions = [each for each in self.hooks if isinstance(each, PreemptionHook)]
        # the main thread and the one in the background take turns in collectives
        self._background = ThreadPoolExecutor(1, thread_name_prefix="hostopt-synchronisation")
        # a synchronisation in the background
        self._pending: tuple[Fragment, Future[list[_RankState]]] | None = None
        self._global_step: Any = None
        self._step = 0  # of this rank
        self._increment = 0  # of global_step in a step of this rank; 0 while unknown
        self._steps = 0  # of this rank, since the last synchronisation
        # numbers of examples since the last synchronisation of each fragment
        self._examples = [0.0] * len(self.replicas.fragments)
        self._since_s = 0.0
        self._next_fragment = 0  # the same on all ranks

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Stores the first step."""
        self._global_step = tf.compat.v1.train.get_global_step()
        self._step = int(session.run(self._global_step))

    def before_run(self, run_context: Any) -> Any:
        """Fetches the number of examples."""
        session = run_context.session
        self._begin(session)
        self.coordinated.resume(session)
        self._flags.set_total(0.0)
        if not self._steps:  # saves and evaluations do not count
            self._since_s = time.monotonic()
        return tf.compat.v1.train.SessionRunArgs(self.examples_in_step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Synchronises if it is time."""
        session, count = run_context.session, float(run_values.results)
        count = count if count and self._knows_examples else _NO_EXAMPLES
        self._examples = [examples + count for examples in self._examples]
        self._steps += 1
        if not self._increment:
            self._increment = int(session.run(self._global_step)) - self._step
        self._step += self._increment
        self.communicator.transport.training_step = self._step  # for `hostopt status`
        if self._is_due(session):
            self._synchronise(session, has_ended=False)

    def end(self, session: tf.compat.v1.Session) -> None:
        """Synchronises until all ranks have ended, and collects on the chief what it saves."""
        self._begin(session)
        self.coordinated.resume(session)
        while not (self._is_due(session) and self._synchronise(session, has_ended=True)):
            self._flags.stop |= any(preemption.signum for preemption in self._preemptions)
        self._background.shutdown(wait=False)
        self.communicator.finish("the last step")
        self.coordinated.collect(session)

    def _begin(self, session: tf.compat.v1.Session) -> None:
        if not self._schedule.has_begun:  # the hooks have broadcast the variables
            self.replicas.begin(session)
            self._schedule.begin(self._step)

    def _is_due(self, session: tf.compat.v1.Session) -> bool:
        """Counts a step, and returns True if a synchronisation follows it on all ranks."""
        self._schedule.position += 1
        if self._schedule.position == self._options.sync_delay:
            self._finish_pending(session)
        return self._schedule.is_due(self._local_step_s())

    def _local_step_s(self) -> float:
        return (time.monotonic() - self._since_s) / self._steps if self._steps else 0.0

    # -- synchronisations -------------------------------------------------------------------

    def _synchronise(self, session: tf.compat.v1.Session, *, has_ended: bool) -> bool:
        """Synchronises the ranks, or begins to; returns True if all of them have ended."""
        step, schedule = self._schedule.end_interval(), self._schedule
        self._finish_pending(session)  # if the interval is shorter than the delay
        latest = max(step, self._step)  # this rank may have no data left
        self._flags.save = self.coordinated.is_save_due(latest)
        is_warm_up = step <= self._options.sync_warmup_steps
        if self._options.sync_delay and not (is_warm_up or schedule.is_whole_next):
            self._start(session, has_ended)
            schedule.begin(step)
            return False
        states, examples = self._exchange(self._state(has_ended), self._examples)
        step = max(int(state.step) for state in states)
        all_ended = self._note_requests(states)
        is_last = all_ended or bool(self._flags.ranks_stopping or self.stops.last_step == step)
        is_whole = is_last or schedule.is_whole_next or bool(self._flags.ranks_saving)
        self._reduce(session, examples, is_whole, is_warm_up)
        schedule.is_whole_next = False
        if step != self._step:  # that of the rank with the most steps
            assign(session, [self._global_step], [np.int64(step)])
        self._step = step
        schedule.note_speed(states)
        schedule.begin(step, is_last=is_last)
        if self._flags.ranks_saving:
            self.coordinated.collect(session, has_more=not all_ended)
            if has_ended and not all_ended:
                self._save_meanwhile(session)
        return all_ended

    def _save_meanwhile(self, session: tf.compat.v1.Session) -> None:
        """Saves on the chief if its data have ended and those of others have not."""
        for saver in self.coordinated.savers:
            timer = timer_of(saver)
            if timer.is_due(self._step):
                timer.update_last_triggered_step(self._step)
                save(saver, session, self._step)
        self.coordinated.resume(session)

    def _state(self, has_ended: bool) -> _RankState:
        fragment = self.replicas.fragments[self._next_fragment]
        state = _RankState(
            self._step,
            self._increment,
            self._local_step_s(),
            self._flags.save,
            self._flags.stop,
            has_ended,
            fragment.checksum() if self._checks else 0,
        )
        self._steps = 0
        return state

    def _note_requests(self, states: Sequence[_RankState]) -> bool:
        """Sets the flags for the other hooks, and returns True if all ranks have ended."""
        ended = sum(state.has_ended for state in states)
        stopping = sum(state.stops for state in states)
        if self._ends_together and ended:
            stopping = max(stopping, 1)
        self._flags.ranks_saving = int(sum(state.saves for state in states))
        self._flags.ranks_stopping = int(stopping)
        return ended == len(states)

    def _reduce(
        self,
        session: tf.compat.v1.Session,
        examples: Sequence[Sequence[float]],
        is_whole: bool,
        is_warm_up: bool,
    ) -> None:
        """Synchronises the next fragment, or the whole model, and waits for it."""
        fragments = self.replicas.fragments
        numbers = range(len(fragments)) if is_whole or is_warm_up else [self._next_fragment]
        for number in numbers:
            if not sum(examples[number]):  # no rank has made a step
                continue
            weight = self._weight(examples[number])
            fragments[number].take(session, self._step)
            fragments[number].reduce(weight, is_whole=is_whole)
            fragments[number].apply(session, self._step)
            self._examples[number] = 0.0
        if is_whole:
            self.replicas.complete(session, self._weight(examples[0]), self._step)
        # a training that resumes from a checkpoint begins with the first fragment, too
        self._next_fragment = 0 if is_whole else (self._next_fragment + 1) % len(fragments)

    def _start(self, session: tf.compat.v1.Session, has_ended: bool) -> None:
        """Begins the synchronisation of the next fragment in the background."""
        state, number = self._state(has_ended), self._next_fragment
        fragment, examples = self.replicas.fragments[number], self._examples[number]

        def exchange_and_reduce() -> list[_RankState]:
            states, (counts,) = self._exchange(state, [examples])
            fragment.reduce(self._weight(counts), is_whole=False)
            return states

        fragment.take(session, self._step)
        self._pending = fragment, self._background.submit(exchange_and_reduce)
        self._examples[number] = 0.0
        self._next_fragment = (number + 1) % len(self.replicas.fragments)

    def _finish_pending(self, session: tf.compat.v1.Session) -> None:
        """Applies the synchronisation that runs in the background, if there is one."""
        if self._pending is None:
            return
        (fragment, future), self._pending = self._pending, None
        states = future.result()
        fragment.apply(session, self._step, is_late=True)
        requests = sum(state.saves + state.stops + state.has_ended for state in states)
        self._schedule.is_whole_next |= bool(requests)
        self._schedule.note_speed(states)

    def _exchange(
        self, state: _RankState, examples: Sequence[float]
    ) -> tuple[list[_RankState], list[list[float]]]:
        """Exchanges states, and examples since each fragment was synchronised. Collective."""
        local = np.array([*state, *examples], np.float64)
        rows = self.communicator.all_gather(local, "the states of the ranks")
        states = [_RankState(*row) for row in rows[:, : len(state)].tolist()]
        differing = [r for r, each in enumerate(states) if each.checksum != states[0].checksum]
        if differing:
            cluster = self.communicator.transport.cluster
            raise hostopt.CollectiveMismatchError(
                f"after the synchronisation before step {int(state.step)} the variables of "
                f"{cluster.describe(0)} and {', '.join(map(cluster.describe, differing))} "
                "differed, but all ranks should have had the same values. Look for a hook or a "
                "session.run that changes variables of one rank before the first step, or for "
                "faulty memory, and resume from an earlier checkpoint",
                **cluster.attributes(differing[0]),
                step=int(state.step),
            )
        return states, rows[:, len(state) :].T.tolist()

    def _weight(self, examples: Sequence[float]) -> float:
        total = sum(examples)
        return examples[self.communicator.rank] / total if total else 1 / len(examples)


@dataclass(eq=False)
class _SyncSchedule:
    """Counts the steps to the next synchronisation, and learns early of requests to stop.

    The ranks synchronise after the same steps. One whose data have ended counts on, without steps.
    """

    communicator: hostopt.Communicator
    options: LocalSteps
    flags: StopSaveFlags
    stops: EndStopSaveHook

    def __post_init__(self) -> None:
        self._requests = self.communicator.open_scalar_sum("requests to stop")
        self._has_asked = False  # a sum of requests has started
        self.has_begun = False
        self._interval = 0  # steps between two synchronisations
        self._check_steps = 1  # between two exchanges of requests
        self._next_check = 1  # position
        self.step = 0  # global_step of the ranks that have data, at the last synchronisation
        self.position = 0  # number of steps since then
        self._step_s = 0.0  # duration of a step on the slowest rank; 0 while unknown
        self._increment = 1  # of global_step in a step
        self.is_whole_next = False  # the next synchronisation is that of the whole model

    def note_speed(self, states: Sequence[_RankState]) -> None:
        self._step_s = max(state.step_s for state in states)
        self._increment = max(1, *(int(state.increment) for state in states))

    def begin(self, step: int, *, is_last: bool = False) -> None:
        """Begins the steps to the next synchronisation, if any follow the last one."""
        self.has_begun = True
        step_s, increment = self._step_s, self._increment
        interval = self.options.interval(step, step_s)
        left = self.stops.last_step - step
        if left <= interval * increment:
            interval = -(-left // increment)
            self.is_whole_next = True
        self._interval = 1 if is_last else max(interval, 1)
        self._check_steps = max(1, int(_CHECK_S / step_s)) if step_s else 1
        self.step, self.position, self._next_check = step, 0, self._check_steps

    def is_due(self, step_s: float) -> bool:
        """Returns True if a synchronisation follows a step on all ranks; call it once a step.

        `step_s` is the duration of a step of this rank; 0 without steps.
        """
        if self.position >= self._interval:
            return True
        if self.position < self._next_check:
            return False
        if self.take_requests():
            return True
        self._requests.start(float(self.flags.stop), step_s)
        self._has_asked = True
        self._next_check = self.position + self._check_steps
        return False

    def take_requests(self) -> bool:
        """Waits for the last exchange; returns True if a rank had requested a stop before it."""
        if not self._has_asked:
            return False
        self._has_asked = False
        requests, total_s = map(float, self._requests.wait())
        is_requested = requests > 0
        self.is_whole_next |= is_requested
        step_s = total_s / self.communicator.size  # the same bits on all ranks
        self._check_steps = max(1, int(_CHECK_S / step_s)) if step_s else 2 * self._check_steps
        return is_requested

    def end_interval(self) -> int:
        """Returns global_step of the ranks that have data, at a synchronisation."""
        self.take_requests()
        return self.step + self.position * self._increment
