"""Groups of tasks that start together, end together and restart together.

All ranks are one group, and each evaluator is another. A group makes attempts::

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
from typing import Any

from hostopt import descriptors, error_report
from hostopt.errors import ConfigError, HostOptError, ResourceError
from hostopt.launch import restarts, task_process
from hostopt.launch.environment import (
    address_of,
    ports_reserved,
    shares_of_cores,
    task_environment,
)
from hostopt.launch.monitor import Monitor
from hostopt.launch.restarts import RestartDecision, Restarts, Slots, TaskExit
from hostopt.launch.task_process import TaskProcess
from hostopt.options import RING_ENDED
from hostopt.telemetry import progress
from hostopt.tf_config import CHIEF, EVALUATOR, WORKER

__all__: list[str] = []

KILL_S = 5.0  # from SIGTERM to SIGKILL
KILL_AGAIN_S = 2.0  # between SIGKILLs, in case a stopped supervisor does not deliver them
# From a signal to SIGKILL. Meanwhile ranks save a checkpoint, for up to 25 s; Kubernetes kills
# after 30 s. SIGINT has no deadline: the user can send it again.
PREEMPTION_S = 28.0
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals for tasks that still run, each with a number of seconds from now.
_GracePeriod = Sequence[tuple[float, int]]
_LOG = logging.getLogger(__name__)


def start_error(error: OSError) -> HostOptError:
    """Returns the error to report if not all tasks could be started.

    Args:
      error: raised by the operating system.

    Returns:
      A ResourceError, which is worth a retry, if a limit was reached; otherwise a ConfigError.
    """
    is_limit = descriptors.is_out(error) or error.errno in (errno.EAGAIN, errno.ENOMEM)
    kind = ResourceError if is_limit else ConfigError
    return kind(
        f"not all tasks could be started: {error}. Start fewer, or raise the limit: see "
        "`ulimit -a`"
    )


class Group:
    """Tasks that start together, and restart together after a failure.

    Args:
      command: program and arguments of every task.
      cluster: addresses by job, of this and all other groups.
      selector: registers the lifelines of running tasks, each with a function to call.
      max_restarts: number of restarts.
      grace_s: seconds from the first failure to SIGTERM for the other tasks.
      monitor: shows the progress of the tasks.
    """

    def __init__(
        self,
        command: list[str],
        cluster: dict[str, list[str]],
        selector: selectors.BaseSelector,
        max_restarts: int,
        grace_s: float,
        monitor: Monitor,
    ) -> None:
        self.code: int | None = None  # exit code, once there will be no further attempt
        self.cause = ""  # error that the root cause of the last failure reported
        self.reason = ""  # root cause of the last failure, and how it ended
        self._command = command
        self._cluster = cluster
        self._selector = selector
        self._monitor = monitor
        self._restarts = Restarts(max_restarts)
        self._after_failure = ((grace_s, signal.SIGTERM), (grace_s + KILL_S, signal.SIGKILL))
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
                self._start()
            except OSError as error:
                self._fail_to_start(error)
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
            self._set_deadlines(_preemption())
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

    def _start(self) -> None:
        raise NotImplementedError

    def _fail_to_start(self, error: OSError) -> None:
        """Ends an attempt whose tasks could not all be started; the next one may succeed."""
        for process in self._processes:
            self._selector.unregister(process.lifeline)
        failure = start_error(error)
        self._exits = [TaskExit("the launcher", None, failure.exit_code, cause=str(failure))]
        self._finish_attempt()

    def _on_first_failure(self, first: TaskExit) -> None:
        """Called when the first task of the attempt has failed."""

    def _log_decision(self, decision: RestartDecision, delay_s: float | None) -> None:
        """Logs a failed attempt, and the delay before the next one; None if there is none."""
        raise NotImplementedError

    def _start_task(
        self, task: tuple[str, int], environment: dict[str, str], cores: Sequence[int] = ()
    ) -> None:
        directory = self._attempt.enter_context(tempfile.TemporaryDirectory(prefix="hostopt-run-"))
        report = os.path.join(directory, "error.txt")
        attempt = self._restarts.used + 1
        environment = {
            **environment,
            error_report.VARIABLE: report,
            progress.VARIABLE: self._monitor.progress_file(task, attempt),
        }
        log_file = self._monitor.log_file(task, attempt)
        process = task_process.start(
            self._command, task, environment, cores, log_file, self._monitor.new_filter()
        )
        process.report = report
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
        return _task_exit(process, process.name, None)

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

    def _end(self, grace_period: _GracePeriod) -> None:
        if self._is_last_attempt or self.code is not None:
            return
        self._is_last_attempt = True
        if self._running():
            self._set_deadlines(grace_period)
        else:
            self._next_start_s = None
            self.code = 0 if self._signum is None else 128 + self._signum

    def _set_deadlines(self, grace_period: _GracePeriod) -> None:
        if not self._deadlines:
            now_s = time.monotonic()
            self._deadlines = [(now_s + after_s, signum) for after_s, signum in grace_period]


class Ring(Group):
    """The group of all ranks.

    Args:
      *arguments: arguments of `Group`.
      slots: the slots of this machine.
      binds: True to bind each rank to its share of the cores.
    """

    def __init__(self, *arguments: Any, slots: Slots, binds: bool) -> None:
        super().__init__(*arguments)
        self._slots = slots
        self._binds = binds

    def _start(self) -> None:
        slots = self._slots.in_use
        ports = self._attempt.enter_context(ports_reserved(len(slots)))
        tasks = [(CHIEF, 0), *((WORKER, index) for index in range(len(slots) - 1))]
        for job in (CHIEF, WORKER):
            self._cluster.pop(job, None)
        for (job, _), port in zip(tasks, ports):
            self._cluster.setdefault(job, []).append(address_of(port))
        shares = shares_of_cores(len(slots)) if self._binds else [[] for _ in slots]
        for task, slot, cores in zip(tasks, slots, shares):
            environment = task_environment(os.environ, self._cluster, task, len(slots))
            self._start_task(task, {**environment, "HOSTOPT_SLOT": str(slot)}, cores)

    def _exit_of(self, process: TaskProcess) -> TaskExit:
        rank = self._processes.index(process)
        slot = self._slots.in_use[rank]
        name = process.name if rank == slot else f"{process.name} (slot {slot})"
        return _task_exit(process, name, slot)

    def _on_first_failure(self, first: TaskExit) -> None:
        if self._is_last_attempt:
            return
        # A preempted rank has made the others save a checkpoint.
        is_preempted = first.code - 128 in FORWARDED
        grace_period = _preemption() if is_preempted else self._after_failure
        self._set_deadlines(grace_period)
        text = "%s failed first: %s; the other tasks have %g s to exit"
        _LOG.error(text, first.name, restarts.describe(first.code), grace_period[0][0])

    def _log_decision(self, decision: RestartDecision, delay_s: float | None) -> None:
        attempts = self._restarts.max_restarts + 1
        attempt = self._restarts.used + (delay_s is None)
        text = f"attempt {attempt} of {attempts} failed; root cause: {decision.reason}"
        if delay_s is None:
            why = "giving up" if decision.retry else "a restart would fail the same way"
            _LOG.error("%s; %s", text, why)
            return
        if decision.cause:
            _LOG.error("%s", decision.cause)
        self._slots.choose(decision.failed_slots)
        _LOG.warning("%s; restarting in %g s%s", text, delay_s, self._slots.describe())


class Evaluator(Group):
    """The group of one evaluator.

    Args:
      *arguments: arguments of `Group`.
      index: index of the evaluator.
      ring_ended: path of the file that exists once all ranks have succeeded.
    """

    def __init__(self, *arguments: Any, index: int, ring_ended: str) -> None:
        super().__init__(*arguments)
        self._task = (EVALUATOR, index)
        self._ring_ended = ring_ended

    def _start(self) -> None:
        environment = task_environment(os.environ, self._cluster, self._task, 1)
        self._start_task(self._task, {**environment, RING_ENDED: self._ring_ended})

    def _log_decision(self, decision: RestartDecision, delay_s: float | None) -> None:
        then = "training continues without it"
        if delay_s is not None:
            then = f"restarting it in {delay_s:g} s"
        name, code = "{}:{}".format(*self._task), restarts.describe(decision.code)
        _LOG.error("%s failed: %s; %s", name, code, then)
        if decision.cause:
            _LOG.error("%s", decision.cause)


def _task_exit(process: TaskProcess, name: str, slot: int | None) -> TaskExit:
    report = error_report.read_report(process.report)
    if process.forced and report.code:  # it had failed by itself, and was slow to exit
        return TaskExit(name, slot, report.code, False, report.cause)
    return TaskExit(name, slot, process.code or 0, process.forced, report.cause)


def _preemption() -> _GracePeriod:
    return ((PREEMPTION_S, signal.SIGKILL),)
