"""Tasks that are started together, end together, and are started again together.

The ring is one group, and each evaluator another. A group goes through attempts::

    start --> all have ended --> judged --> done, or given up
      ^                            |
      `-------- back-off <---------`  worth another attempt
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hostopt import descriptors, error_report, restarts, task_process
from hostopt.cluster import CHIEF, EVALUATOR, WORKER
from hostopt.errors import ConfigError, ResourceError
from hostopt.options import RING_ENDED
from hostopt.restarts import Ending, Restarts, Slots, Verdict
from hostopt.task_process import TaskProcess

__all__: list[str] = []

KILL_S = 5.0  # from SIGTERM to SIGKILL
KILL_AGAIN_S = 2.0  # from a SIGKILL to the next, if the supervisor has not delivered it
# From a signal to SIGKILL. Ranks save a checkpoint meanwhile, for up to 25 s; Kubernetes kills
# after 30. After SIGINT there is no such haste: whoever sends it can send it again.
PREEMPTION_S = 28.0
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds after which those that are still there get a signal.
_Patience = Sequence[tuple[float, int]]
_LOG = logging.getLogger(__name__)


class Group:
    """Tasks that are started together, and together again after a failure.

    Args:
      command: what each runs.
      cluster: addresses by job, of this and all other groups.
      selector: where the lifelines of running tasks are registered, with a function to call.
      max_restarts: how often the group is started again.
      grace_s: seconds from a failure to SIGTERM.
    """

    def __init__(
        self,
        command: list[str],
        cluster: dict[str, list[str]],
        selector: selectors.BaseSelector,
        max_restarts: int,
        grace_s: float,
    ) -> None:
        self.code: int | None = None  # once the group is not started any more
        self.cause = ""  # of its last failure, in the words of the task that is to blame
        self._command = command
        self._cluster = cluster
        self._selector = selector
        self._restarts = Restarts(max_restarts)
        self._after_failure = ((grace_s, signal.SIGTERM), (grace_s + KILL_S, signal.SIGKILL))
        self._attempt = contextlib.ExitStack()  # what an attempt holds
        self._processes: list[TaskProcess] = []
        self._endings: list[Ending] = []
        self._begun_s = 0.0
        self._next_s: float | None = 0.0  # when the next attempt begins
        self._deadlines: list[tuple[float, int]] = []  # and the signal for those still there
        self._stopped = False  # whether this attempt is the last, however it ends
        self._signum: int | None = None  # which signal ended an attempt that had not failed

    def next_time_s(self) -> float | None:
        """When `keep_time` has something to do, by `time.monotonic`."""
        return self._deadlines[0][0] if self._deadlines else self._next_s

    def keep_time(self) -> None:
        """Start the attempt that is due, and signal the tasks that are late."""
        if self._next_s is not None and self._next_s <= time.monotonic():
            self._next_s = None
            self._begun_s = time.monotonic()
            try:
                self._start()
            except OSError as error:
                self._fail_to_start(error)
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            signum = self._deadlines.pop(0)[1]
            late = ", ".join(process.name for process in self._running())
            _LOG.warning("sending %s to %s", signal.Signals(signum).name, late)
            self._force(signum)

    def pass_on(self, signum: int) -> None:
        """End the group with a signal that the launcher got."""
        if self.code is not None:
            return
        if self._signum is None and not any(ending.code for ending in self._endings):
            self._signum = signum
        self._stop(())
        if signum != signal.SIGINT and self._running():
            self._set_deadlines(_after_signal())
        for process in self._running():
            process.signal(signum)

    def kill(self) -> None:
        """End the attempt at once."""
        self._force(signal.SIGKILL)

    def stop(self) -> None:
        """Start the group no more, and let what runs of it end in time."""
        self._stop(self._after_failure)

    def close(self) -> None:
        """Kill what is left of an attempt, and give back what it held."""
        self._attempt.close()

    def _start(self) -> None:
        raise NotImplementedError

    def _fail_to_start(self, error: OSError) -> None:
        """End an attempt of which not all tasks could be started; the next one may succeed."""
        for process in self._processes:
            self._selector.unregister(process.lifeline)
        lacks = descriptors.is_out(error) or error.errno in (errno.EAGAIN, errno.ENOMEM)
        code = (ResourceError if lacks else ConfigError).exit_code
        said = (
            f"not all tasks could be started: {error}. Start fewer, or raise the limit: see "
            "`ulimit -a`"
        )
        self._endings = [Ending("the launcher", None, code, said=said)]
        self._judge()

    def _note_failure(self, ending: Ending) -> None:
        """The first task of the attempt has failed."""

    def _note_verdict(self, verdict: Verdict, delay_s: float | None) -> None:
        """The group failed; after `delay_s` it starts again, and never where that is None."""
        raise NotImplementedError

    def _start_task(self, task: tuple[str, int], environment: dict[str, str]) -> TaskProcess:
        directory = self._attempt.enter_context(tempfile.TemporaryDirectory(prefix="hostopt-run-"))
        report = os.path.join(directory, "error.txt")
        environment = {**environment, error_report.VARIABLE: report}
        process = task_process.start(self._command, task, environment)
        process.report = report
        self._attempt.callback(process.close)
        self._processes.append(process)
        self._selector.register(
            process.lifeline, selectors.EVENT_READ, lambda: self._hear_of(process)
        )
        return process

    def _hear_of(self, process: TaskProcess) -> None:
        if not process.has_ended():
            return
        self._selector.unregister(process.lifeline)
        ending = self._ending_of(process)
        if ending.code and not any(earlier.code for earlier in self._endings):
            self._note_failure(ending)
        self._endings.append(ending)
        if not self._running():
            self._judge()

    def _ending_of(self, process: TaskProcess) -> Ending:
        return self._ended(process, process.name, None)

    @staticmethod
    def _ended(process: TaskProcess, name: str, slot: int | None) -> Ending:
        report = error_report.read_report(process.report)
        if process.forced and report.code:  # it had failed by itself, and was slow to end
            return Ending(name, slot, report.code, False, report.said)
        return Ending(name, slot, process.code or 0, process.forced, report.said)

    def _judge(self) -> None:
        verdict = restarts.judge(self._endings)
        lasted_s = time.monotonic() - self._begun_s
        self._attempt.close()
        self._processes, self._endings, self._deadlines = [], [], []
        if self._signum is not None and not restarts.is_permanent(verdict.code):
            self.code = 128 + self._signum
            return
        if verdict.code:
            may_retry = verdict.retry and not self._stopped
            delay_s = self._restarts.next_delay_s(lasted_s) if may_retry else None
            self._note_verdict(verdict, delay_s)
            if delay_s is not None:
                self._next_s = time.monotonic() + delay_s
                return
        self.code, self.cause = verdict.code, verdict.said

    def _running(self) -> list[TaskProcess]:
        return [process for process in self._processes if process.code is None]

    def _force(self, signum: int) -> None:
        for process in self._running():
            process.forced = True
            process.signal(signum)
        if signum == signal.SIGKILL and self._running():
            self._deadlines = [(time.monotonic() + KILL_AGAIN_S, signum)]

    def _stop(self, patience: _Patience) -> None:
        if self._stopped or self.code is not None:
            return
        self._stopped = True
        if self._running():
            self._set_deadlines(patience)
        else:
            self._next_s = None
            self.code = 0 if self._signum is None else 128 + self._signum

    def _set_deadlines(self, patience: _Patience) -> None:
        if not self._deadlines:
            now_s = time.monotonic()
            self._deadlines = [(now_s + after_s, signum) for after_s, signum in patience]


class Ring(Group):
    """The ranks; the arguments are those of a group, and the slots of this machine."""

    def __init__(self, *arguments: Any, slots: Slots) -> None:
        super().__init__(*arguments)
        self._slots = slots

    def _start(self) -> None:
        slots = self._slots.in_use
        ports = self._attempt.enter_context(ports_reserved(len(slots)))
        tasks = [(CHIEF, 0), *((WORKER, index) for index in range(len(slots) - 1))]
        for job in (CHIEF, WORKER):
            self._cluster.pop(job, None)
        for (job, _), port in zip(tasks, ports):
            self._cluster.setdefault(job, []).append(address_of(port))
        for task, slot in zip(tasks, slots):
            environment = _environment(os.environ, self._cluster, task, len(slots))
            self._start_task(task, {**environment, "HOSTOPT_SLOT": str(slot)})

    def _ending_of(self, process: TaskProcess) -> Ending:
        rank = self._processes.index(process)
        slot = self._slots.in_use[rank]
        name = process.name if rank == slot else f"{process.name} (slot {slot})"
        return self._ended(process, name, slot)

    def _note_failure(self, ending: Ending) -> None:
        if self._stopped:
            return
        # One that was preempted has had the others save a checkpoint.
        preempted = ending.code - 128 in FORWARDED
        patience = _after_signal() if preempted else self._after_failure
        self._set_deadlines(patience)
        text = "%s failed first: %s; the others have %g s to end"
        _LOG.error(text, ending.name, restarts.describe(ending.code), patience[0][0])

    def _note_verdict(self, verdict: Verdict, delay_s: float | None) -> None:
        most = self._restarts.most + 1
        attempt = self._restarts.used + (delay_s is None)
        text = f"attempt {attempt} of {most} failed; root cause: {verdict.reason}"
        if delay_s is None:
            giving_up = "giving up" if verdict.retry else "another attempt would not change that"
            _LOG.error("%s; %s", text, giving_up)
            return
        if verdict.said:
            _LOG.error("%s", verdict.said)
        self._slots.choose(verdict.culprits)
        _LOG.warning("%s; the next begins in %g s%s", text, delay_s, self._slots.describe())


class Evaluator(Group):
    """One evaluator; the arguments are those of a group, its index, and a file.

    Args:
      *arguments: of a group.
      index: of the evaluator.
      ring_ended: file that is there once all ranks have succeeded.
    """

    def __init__(self, *arguments: Any, index: int, ring_ended: str) -> None:
        super().__init__(*arguments)
        self._task = (EVALUATOR, index)
        self._ring_ended = ring_ended

    def _start(self) -> None:
        environment = _environment(os.environ, self._cluster, self._task, 1)
        self._start_task(self._task, {**environment, RING_ENDED: self._ring_ended})

    def _note_verdict(self, verdict: Verdict, delay_s: float | None) -> None:
        then = "training goes on without it"
        if delay_s is not None:
            then = f"it begins again in {delay_s:g} s"
        name, how = "{}:{}".format(*self._task), restarts.describe(verdict.code)
        _LOG.error("%s failed: %s; %s", name, how, then)
        if verdict.said:
            _LOG.error("%s", verdict.said)


def _after_signal() -> _Patience:
    return ((PREEMPTION_S, signal.SIGKILL),)


@contextlib.contextmanager
def ports_reserved(count: int) -> Iterator[list[int]]:
    """Hold free loopback ports.

    A socket that is bound with SO_REUSEADDR and does not listen keeps its port away from everyone
    who asks for any free port, and still lets a server that names the port bind it and listen.
    """
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            holder = stack.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            ports.append(holder.getsockname()[1])
        yield ports


def address_of(port: int) -> str:
    """The loopback address with this port."""
    return f"127.0.0.1:{port}"


def _environment(
    base: Mapping[str, str], cluster: dict[str, list[str]], task: tuple[str, int], size: int
) -> dict[str, str]:
    """Environment of one task: `base`, TF_CONFIG, and defaults for what `base` does not set."""
    job, index = task
    threads = 1 if job == EVALUATOR else max(1, len(os.sched_getaffinity(0)) // size)
    defaults = {
        "PYTHONHASHSEED": "0",  # sets have one order on all ranks
        "PYTHONUNBUFFERED": "1",
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "TF_USE_LEGACY_KERAS": "1",  # Estimator's graphs need Keras 2
    }
    config = {"cluster": cluster, "task": {"type": job, "index": index}}
    environment = {**defaults, **base, "TF_CONFIG": json.dumps(config)}
    if job == EVALUATOR:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment
