"""Groups of tasks that start together, end together and restart together.

All ranks are one group, and each evaluator and each data worker is another. A group makes
attempts::

    start --> all tasks ended --> classify exits --> success, or failed for good
      ^                                |
      `----------- back-off <----------`  worth a retry
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hostopt.cluster.tf_config import CHIEF, WORKER
from hostopt.errors import ConfigError, HostOptError, ResourceError
from hostopt.launch import restarts, task_process
from hostopt.launch.engine import Engine, Place, Poll, Settings, TaskId
from hostopt.launch.environment import tf_config_of
from hostopt.launch.monitor import Monitor
from hostopt.launch.restarts import RestartDecision, Restarts, Slots, TaskExit
from hostopt.launch.task_process import TaskProcess
from hostopt.process import descriptors, error_report
from hostopt.telemetry import progress

_POLL_S = 0.1  # between two looks at places that are not ready
GRACE_S = 10.0  # from the first failure to SIGTERM for the other tasks
KILL_S = 5.0  # from SIGTERM to SIGKILL
KILL_AGAIN_S = 2.0  # between SIGKILLs, in case a stopped supervisor does not deliver them
# From a signal to SIGKILL. Meanwhile ranks save a checkpoint, for up to 25 s; Kubernetes kills
# after 30 s. SIGINT has no deadline: the user can send it again.
PREEMPTION_S = 28.0
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GracePeriod = Sequence[tuple[float, int]]  # seconds from now, and the signal that is due then
_LOG = logging.getLogger(__name__)


def start_error(error: OSError) -> HostOptError:
    """Returns the error to report if not all tasks could be started."""
    is_limit = descriptors.is_out(error) or error.errno in (errno.EAGAIN, errno.ENOMEM)
    kind = ResourceError if is_limit else ConfigError
    return kind(
        f"not all tasks could be started: {error}. Start fewer, or raise the limit: see "
        "`ulimit -a`"
    )


@dataclass(eq=False)
class Group:
    """Tasks that start together, and restart together after a failure."""

    _engine: Engine
    _command: Sequence[str]
    _cluster: dict[str, list[str]]  # addresses by job, of this and all other groups
    _selector: selectors.BaseSelector  # of the lifelines, each with a function to call
    _max_restarts: int
    _monitor: Monitor

    def __post_init__(self) -> None:
        self.code: int | None = None  # exit code, once there will be no further attempt
        self.cause = ""  # error that the root cause of the last failure reported
        self.reason = ""  # root cause of the last failure, and how it ended
        self._restarts = Restarts(self._max_restarts)
        self._after_failure = ((GRACE_S, signal.SIGTERM), (GRACE_S + KILL_S, signal.SIGKILL))
        self._after_signal = ((PREEMPTION_S, signal.SIGKILL),)
        self._attempt = contextlib.ExitStack()  # resources of the attempt
        self._processes: list[TaskProcess] = []
        self._exits: list[TaskExit] = []
        self._started_s = 0.0
        self._next_start_s: float | None = 0.0
        self._deadlines: list[tuple[float, int]] = []  # each with the signal that is due then
        self._is_last_attempt = False
        self._signum: int | None = None  # the signal that ended an attempt without a failure

    def next_time_s(self) -> float | None:
        """Returns the time, by `time.monotonic`, at which `advance` must be called again."""
        return self._deadlines[0][0] if self._deadlines else self._next_start_s

    def advance(self) -> None:
        """Starts the attempt that is due, and signals the tasks whose grace period is over."""
        if self._next_start_s is not None and self._next_start_s <= time.monotonic():
            self._next_start_s = None
            self._started_s = time.monotonic()
            try:
                if not self._start():
                    self._next_start_s = time.monotonic() + _POLL_S
            except (OSError, ResourceError) as error:
                self._fail_to_start(start_error(error) if isinstance(error, OSError) else error)
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            signum = self._deadlines.pop(0)[1]
            late = ", ".join(process.name for process in self._running())
            _LOG.warning("sending %s to %s", signal.Signals(signum).name, late)
            self._signal_late(signum)

    def forward(self, signum: int) -> None:
        """Ends the group with a signal that the launcher received."""
        if self.code is not None:
            return
        if self._signum is None and not any(each.code for each in self._exits):
            self._signum = signum
        self._end(())
        if signum != signal.SIGINT and self._running():
            self._set_deadlines(self._after_signal)
        for process in self._running():
            process.signal(signum)

    def kill(self) -> None:
        """Kills the tasks of the attempt."""
        self._signal_late(signal.SIGKILL)

    def end(self) -> None:
        """Allows no further attempt; running tasks have the grace period to end."""
        self._end(self._after_failure)

    def close(self) -> None:
        """Kills what still runs, and frees the resources of the attempt."""
        self._attempt.close()

    def _start(self) -> bool:
        """Starts the tasks of an attempt; returns False if their places are not ready yet."""
        raise NotImplementedError

    def _fail_to_start(self, failure: HostOptError) -> None:
        """Ends an attempt whose tasks could not all be started; the next one may succeed."""
        for process in self._processes:
            self._selector.unregister(process.lifeline)
        self._exits = [TaskExit("the launcher", None, failure.exit_code, cause=str(failure))]
        self._finish_attempt()

    def _on_first_failure(self, first: TaskExit) -> None:
        """Called when the first task of the attempt has failed."""

    def _log_decision(self, decision: RestartDecision, delay_s: float | None) -> None:
        """Logs a failed attempt, and the delay before the next one; None if there is none."""
        raise NotImplementedError

    def _start_task(
        self, task: TaskId, place: Place, settings: Settings, slot: int | None = None
    ) -> None:
        directory = self._attempt.enter_context(tempfile.TemporaryDirectory(prefix="hostopt-run-"))
        report = os.path.join(directory, "error.txt")
        attempt = self._restarts.used + 1
        settings = {
            **settings,
            "TF_CONFIG": tf_config_of(self._cluster, task),
            error_report.VARIABLE: report,
            progress.VARIABLE: self._monitor.progress_file(task, attempt),
        }
        log_file = self._monitor.log_file(task, attempt)
        started = self._engine.start(place, self._command, task, settings)
        process = task_process.attend(task, *started, log_file, self._monitor.new_filter())
        process.report, process.slot = report, slot
        self._attempt.callback(process.close)
        self._processes.append(process)
        self._selector.register(
            process.lifeline, selectors.EVENT_READ, lambda: self._on_message(process)
        )

    def _on_message(self, process: TaskProcess) -> None:
        if not process.has_ended():
            return
        self._selector.unregister(process.lifeline)
        task_exit = self._exit_of(process)
        if task_exit.code and not any(earlier.code for earlier in self._exits):
            self._on_first_failure(task_exit)
        self._exits.append(task_exit)
        if not self._running():
            self._finish_attempt()

    def _exit_of(self, process: TaskProcess) -> TaskExit:
        """Returns the exit of a process, with the error that it reported."""
        name, slot = process.name, process.slot
        if slot not in (None, self._processes.index(process)):  # which is the rank
            name = f"{name} (slot {slot})"
        report = error_report.read_report(process.report)
        if process.forced and report.code:  # it had failed by itself, and was slow to exit
            return TaskExit(name, slot, report.code, False, report.cause)
        return TaskExit(name, slot, process.code or 0, process.forced, report.cause)

    def _finish_attempt(self) -> None:
        decision = restarts.classify_exits(self._exits)
        lasted_s = time.monotonic() - self._started_s
        self._attempt.close()
        self._processes, self._exits, self._deadlines = [], [], []
        if self._signum is not None and not restarts.is_permanent(decision.code):
            self.code = 128 + self._signum
            return
        if decision.code:
            may_retry = decision.retry and not self._is_last_attempt
            delay_s = self._restarts.next_delay_s(lasted_s) if may_retry else None
            self._log_decision(decision, delay_s)
            if delay_s is not None:
                self._next_start_s = time.monotonic() + delay_s
                return
        self.code, self.cause, self.reason = decision.code, decision.cause, decision.reason

    def _running(self) -> list[TaskProcess]:
        return [process for process in self._processes if process.code is None]

    def _signal_late(self, signum: int) -> None:
        for process in self._running():
            process.forced = True
            process.signal(signum)
        if signum == signal.SIGKILL and self._running():
            self._deadlines = [(time.monotonic() + KILL_AGAIN_S, signum)]

    def _end(self, grace_period: GracePeriod) -> None:
        if self._is_last_attempt or self.code is not None:
            return
        self._is_last_attempt = True
        if self._running():
            self._set_deadlines(grace_period)
        else:
            self._next_start_s = None
            self.code = 0 if self._signum is None else 128 + self._signum

    def _set_deadlines(self, grace_period: GracePeriod) -> None:
        if not self._deadlines:
            now_s = time.monotonic()
            self._deadlines = [(now_s + after_s, signum) for after_s, signum in grace_period]


@dataclass(eq=False)
class Ring(Group):
    """The group of all ranks."""

    _slots: Slots
    _poll: Poll | None = None  # of the attempt

    def _start(self) -> bool:
        if self._poll is None:
            reserved = self._engine.reserve(self._slots.in_use, self._slots.min_size)
            self._poll = self._attempt.enter_context(reserved)
            self._attempt.callback(setattr, self, "_poll", None)
        places = self._poll()
        if places is None:
            return False
        self._slots.use({place.slot: place.node for place in places})
        tasks = [(CHIEF, 0), *((WORKER, index) for index in range(len(places) - 1))]
        addresses = [place.address for place in places]
        self._cluster.update({CHIEF: addresses[:1], WORKER: addresses[1:]})
        for task, place in zip(tasks, places):
            self._start_task(task, place, {"HOSTOPT_SLOT": str(place.slot)}, place.slot)
        return True

    def _on_first_failure(self, first: TaskExit) -> None:
        if self._is_last_attempt:
            return
        # A preempted rank has made the others save a checkpoint.
        is_preempted = first.code - 128 in FORWARDED
        grace_period = self._after_signal if is_preempted else self._after_failure
        self._set_deadlines(grace_period)
        text = "%s failed first: %s; the other tasks have %g s to exit"
        _LOG.error(text, first.name, restarts.describe(first.code), grace_period[0][0])

    def _log_decision(self, decision: RestartDecision, delay_s: float | None) -> None:
        attempts = self._max_restarts + 1
        attempt = self._restarts.used + (delay_s is None)
        text = f"attempt {attempt} of {attempts} failed; root cause: {decision.reason}"
        if delay_s is None:
            why = "a restart would fail the same way"
            if decision.retry:
                why = "no restart is left" if attempts > 1 else "--max-restarts allows restarts"
            _LOG.error("%s; %s", text, why)
            return
        if decision.cause:
            _LOG.error("%s", decision.cause)
        self._slots.choose(decision.failed_slots)
        _LOG.warning("%s; restarting in %g s%s", text, delay_s, self._slots.describe())


@dataclass(eq=False)
class _Companion(Group):
    """The group of one task beside the ranks, whose place outlives an attempt."""

    _task: TaskId
    _poll: Poll
    _settings: Settings

    def _start(self) -> bool:
        are_ranks_placed = CHIEF in self._cluster  # their addresses are in TF_CONFIG
        places = self._poll() if are_ranks_placed else None
        if places is None:
            return False
        job, index = self._task
        self._cluster[job] = [place.address for place in places]  # one may have moved
        self._start_task(self._task, places[index], self._settings)
        return True


class Evaluator(_Companion):
    """The group of one evaluator."""

    def _log_decision(self, decision: RestartDecision, delay_s: float | None) -> None:
        then = "training continues without it"
        if delay_s is not None:
            then = f"restarting it in {delay_s:g} s"
        name, code = "{}:{}".format(*self._task), restarts.describe(decision.code)
        _LOG.error("%s failed: %s; %s", name, code, then)
        if decision.cause:
            _LOG.error("%s", decision.cause)


class DataWorker(_Companion):
    """The group of one data worker, which serves all attempts of the ring."""

    _is_over = False  # the ring has ended

    def forward(self, signum: int) -> None:
        """Allows no restart after a signal; the ranks may need data for their last step."""
        if self.code is None:
            self._signum = self._signum or signum
            self._end(())

    @property
    def is_lost(self) -> bool:
        """True if it has failed for good, and not by a signal to the launcher."""
        return bool(self.code) and self._signum is None

    def end(self) -> None:
        """Ends the task, as the ring has failed."""
        self._is_over = True
        self._end(())
        self.kill()  # it ignores SIGTERM, and has nothing to save

    def expect_end(self) -> None:
        """Gives the task the grace period to end by itself, as the ring has succeeded."""
        self._is_over = True
        self._end(())
        if self._running():
            self._set_deadlines(self._after_failure)

    def _finish_attempt(self) -> None:
        has_served = self._is_over or any(each.code for each in self._exits)
        super()._finish_attempt()
        if not has_served and self._signum is None:
            _LOG.warning(
                "%s:%d exited with code 0 before the ranks: it must call Estimator.train or "
                "estimator_ext.train_and_evaluate, which serve data until the ranks have ended",
                *self._task,
            )

    def _log_decision(self, decision: RestartDecision, delay_s: float | None) -> None:
        if self._is_over:
            return
        then = "it is not restarted, and the ranks are ended, as they need its data"
        if delay_s is not None:
            then = (
                f"restarting it in {delay_s:g} s; elements that it had taken, and those in its "
                "shuffle buffers, are lost"
            )
        _LOG.error("%s; %s", decision.reason, then)
        if decision.cause:
            _LOG.error("%s", decision.cause)
