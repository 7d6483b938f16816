"""Starts the processes of one cluster, ends them together, and restarts them.

An engine starts a supervisor for each task, on this machine or on another one. The launcher and
the supervisor are connected by a lifeline, a socket pair: `hostopt.launch._supervisor` says what
travels on it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hostopt.cluster.tf_config import DATA, EVALUATOR
from hostopt.launch import metrics, output
from hostopt.launch.engine import Engine, LocalEngine, Poll
from hostopt.launch.environment import find_command
from hostopt.launch.monitor import Monitor
from hostopt.launch.restarts import Slots
from hostopt.launch.task_group import FORWARDED, DataWorker, Evaluator, Group, Ring
from hostopt.options import DATA_DIR, RING_ENDED
from hostopt.process import descriptors

_POLL_S = 0.1  # between two looks at places that are not ready
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """The tasks of one run, its restarts and its reports."""

    size: int  # number of ranks: one chief and ``size - 1`` workers
    evaluators: int = 0
    data_workers: int = 0  # besides the ranks, on this machine
    max_restarts: int = 0  # of the ring in total, and of each evaluator and each data worker
    min_size: int | None = None  # ranks to restart with if slots fail repeatedly; None for `size`
    log_dir: str | None = None  # see `Monitor`
    verbose: bool = True  # False shows the progress of training, not informational messages
    metrics_port: int | None = None  # of loopback; 0 for any free port, None for none


def launch(command: Sequence[str], options: RunOptions, engine: Engine | None = None) -> int:
    """Runs one command as every task of a cluster, by default on this machine, to the end of all.

    Returns:
      0 if all tasks succeed. Otherwise the exit code of the data worker that the ranks have lost,
      or of the root cause of the ring's last failure, or of the evaluator that failed first if all
      ranks succeed. 128 + n stands for a task that signal n ended, and for a run that signal n
      stopped.

    Raises:
      FileNotFoundError: the command does not exist.
    """
    find_command(command)
    min_size = options.size if options.min_size is None else options.min_size
    engine = LocalEngine() if engine is None else engine
    if "TF_CONFIG" in os.environ:
        _LOG.warning("TF_CONFIG is set but not used: each task gets its own")
    descriptors.raise_limit()
    with contextlib.ExitStack() as stack:
        stack.callback(output.flush)
        try:
            stack.enter_context(engine.open(options.size, options.evaluators, min_size))
            cluster, polls = _reserve(engine, options, stack)
        except KeyboardInterrupt:
            _LOG.warning("interrupted before any task has started")
            return 128 + signal.SIGINT
        wake_fd = stack.enter_context(_signals_caught())
        selector = stack.enter_context(selectors.DefaultSelector())
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="hostopt-run-"))
        monitor = Monitor(directory, options.log_dir, options.verbose)
        if options.metrics_port is not None:
            stack.enter_context(metrics.served(monitor, options.metrics_port))
        shared = (engine, command, cluster, selector, options.max_restarts, monitor)
        ring = Ring(*shared, Slots(options.size, min_size))
        ring_ended = os.path.join(directory, "ring-ended")
        settings = {RING_ENDED: ring_ended}
        evaluator_groups = [
            Evaluator(*shared, (EVALUATOR, i), polls[EVALUATOR], settings)
            for i in range(options.evaluators)
        ]
        data_dirs = [os.path.join(directory, f"data-{i}") for i in range(options.data_workers)]
        data_groups = [
            DataWorker(*shared, (DATA, i), polls[DATA], {**settings, DATA_DIR: data_dir})
            for i, data_dir in enumerate(data_dirs)
        ]
        for group in (ring, *evaluator_groups, *data_groups):
            stack.callback(group.close)
        run = _Run(ring, evaluator_groups, data_groups, selector, ring_ended, monitor)
        return run.wait(wake_fd)


def _reserve(
    engine: Engine, options: RunOptions, stack: contextlib.ExitStack
) -> tuple[dict[str, list[str]], dict[str, Poll]]:
    """Waits for the places of evaluators and data workers, which outlive an attempt.

    Returns their addresses, and the polls of their places, by job.
    """
    cluster: dict[str, list[str]] = {}
    polls: dict[str, Poll] = {}
    begin = options.size
    for job, count in ((EVALUATOR, options.evaluators), (DATA, options.data_workers)):
        slots = range(begin, begin + count)
        polls[job] = stack.enter_context(engine.reserve(slots, count))
        begin += count
        if count:
            while (places := polls[job]()) is None:
                time.sleep(_POLL_S)
            cluster[job] = [place.address for place in places]
    return cluster, polls


@dataclass
class _Run:
    """The groups of a cluster from start to end, and the signals that the launcher receives."""

    _ring: Ring
    _evaluators: Sequence[Evaluator]
    _data_workers: Sequence[DataWorker]
    _selector: selectors.BaseSelector
    _ring_ended: str
    _monitor: Monitor

    def __post_init__(self) -> None:
        self._others = (*self._evaluators, *self._data_workers)
        self._groups: tuple[Group, ...] = (self._ring, *self._others)
        self._lost: DataWorker | None = None  # the first that has failed for good before the ring
        self._failed: Evaluator | None = None  # the first that has failed for good
        self._is_announced = False  # to the others: all ranks have succeeded
        self._is_interrupted = False

    def wait(self, wake_fd: int) -> int:
        """Runs until all groups have ended, and returns the exit code of the run."""
        self._selector.register(
            wake_fd, selectors.EVENT_READ, lambda: self._forward(os.read(wake_fd, 64))
        )
        self._advance()
        while any(group.code is None for group in self._groups):
            for key, _ in self._selector.select(self._timeout_s()):
                key.data()
            self._advance()
            self._monitor.advance()
        root = self._lost or (self._ring if self._ring.code else self._failed)
        if root is None:
            self._monitor.finish(0)
            return 0
        self._monitor.finish(root.code or 0, root.reason)
        if root.cause:  # the last line that the run prints
            _LOG.error("%s", root.cause)
        elif self._lost is not None:
            _LOG.error("%s; the ranks need its data", root.reason)
        return root.code or 0

    def _advance(self) -> None:
        self._ring.advance()
        if self._ring.code:
            for other in self._others:
                other.end()
        elif self._ring.code == 0 and not self._is_announced:
            self._announce_success()
        for other in self._others:
            other.advance()
        lost = next((each for each in self._data_workers if each.is_lost), None)
        if self._lost is None and lost is not None and self._ring.code is None:
            self._lost = lost
            self._ring.forward(signal.SIGTERM)  # the ranks end with a checkpoint
        if self._failed is None:
            self._failed = next((each for each in self._evaluators if each.code), None)

    def _announce_success(self) -> None:
        self._is_announced = True
        try:
            open(self._ring_ended, "w").close()
        except OSError as error:
            _LOG.warning("cannot tell the others that all ranks have succeeded: %s", error)
        for data_worker in self._data_workers:
            data_worker.expect_end()

    def _timeout_s(self) -> float | None:
        times_s = [self._monitor.next_time_s(), *(group.next_time_s() for group in self._groups)]
        soonest_s = min((time_s for time_s in times_s if time_s is not None), default=None)
        return None if soonest_s is None else max(0.0, soonest_s - time.monotonic())

    def _forward(self, signums: bytes) -> None:
        for signum in signums:
            if signum not in FORWARDED:  # of a handler that is not the launcher's
                continue
            if signum == signal.SIGINT and self._is_interrupted:
                _LOG.warning("interrupted again: killing all tasks")
                for group in self._groups:
                    group.kill()
                continue
            _LOG.warning("received %s, forwarding it to all tasks", signal.Signals(signum).name)
            self._is_interrupted = self._is_interrupted or signum == signal.SIGINT
            for group in self._groups:
                group.forward(signum)


@contextlib.contextmanager
def _signals_caught() -> Iterator[int]:
    """Turns signals into bytes of a pipe, and yields its reading end. Ignored ones stay ignored.

    Children inherit ignored and blocked signals. A parent that ignores SIGCHLD or blocks signals
    would hide the exits of tasks, so both are reset here.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handlers = {
        signum: signal.signal(signum, lambda *_: None)
        for signum in FORWARDED
        if signal.getsignal(signum) is not signal.SIG_IGN
    }
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, (*FORWARDED, signal.SIGCHLD))
    try:
        yield reader
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(wakeup_fd)
        os.close(reader)
        os.close(writer)
