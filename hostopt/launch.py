"""Starts the processes of one cluster on this machine, ends them together, and starts them again.

::

    hostopt run --- lifeline --- supervisor --- command      (one row for each task)
         `--------- lifeline --- supervisor --- command

A lifeline is a socket pair. Through it the launcher has signals delivered to the command's process
group, and both ends notice the death of the other: the launcher when a task is over, the
supervisor when the launcher was killed. When a supervisor is killed the kernel kills its command.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

from hostopt import descriptors, output
from hostopt.cluster import EVALUATOR
from hostopt.restarts import Slots
from hostopt.task_group import FORWARDED, Evaluator, Group, Ring, address_of, ports_reserved

__all__: list[str] = []

GRACE_S = 10.0  # from the first failure to SIGTERM
_LOG = logging.getLogger(__name__)


def launch(
    command: Sequence[str],
    *,
    size: int,
    evaluators: int = 0,
    max_restarts: int = 0,
    min_size: int | None = None,
    grace_s: float = GRACE_S,
) -> int:
    """Run one command as every task of a cluster on this machine, and wait for all of them.

    Args:
      command: program and arguments; a first word that ends in ``.py`` is run with this Python.
      size: number of ranks: one chief and ``size - 1`` workers.
      evaluators: number of evaluators beside the ring.
      max_restarts: how often the ring is started again, in all; and each evaluator, by itself.
      min_size: fewest ranks of the ring, where some fail again and again; None is `size`.
      grace_s: seconds from a rank's failure until SIGTERM for the others; SIGKILL follows 5 s
        later.

    Returns:
      0 where all tasks succeed, else the exit code of the root cause of the ring's last failure
      (of the evaluator that failed first, where all ranks succeed). 128 + n stands for a task that
      signal n ended, and for a run that signal n stopped.

    Raises:
      FileNotFoundError: there is no such command.
      ValueError: a number is too small, or this is not the main thread.
    """
    min_size = size if min_size is None else min_size
    if evaluators < 0 or max_restarts < 0 or not 1 <= min_size <= size:
        raise ValueError(
            f"a number is out of range: (size: {size}, min_size: {min_size}, evaluators: "
            f"{evaluators}, max_restarts: {max_restarts})"
        )
    command = _find_command(command)
    if "TF_CONFIG" in os.environ:
        _LOG.warning("TF_CONFIG is set; each task gets one of its own instead")
    descriptors.raise_limit()
    with contextlib.ExitStack() as stack:
        stack.callback(output.flush)
        wake_fd = stack.enter_context(_signals_caught())
        selector = stack.enter_context(selectors.DefaultSelector())
        ports = stack.enter_context(ports_reserved(evaluators))  # evaluators outlive an attempt
        cluster = {EVALUATOR: list(map(address_of, ports))} if evaluators else {}
        shared = (command, cluster, selector, max_restarts, grace_s)
        ring = Ring(*shared, slots=Slots(size, min_size))
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="hostopt-run-"))
        ring_ended = os.path.join(directory, "ring-ended")
        others = [
            Evaluator(*shared, index=index, ring_ended=ring_ended) for index in range(evaluators)
        ]
        for group in (ring, *others):
            stack.callback(group.close)
        return _Run(ring, others, selector, ring_ended).wait(wake_fd)


class _Run:
    """The groups of a cluster from start to end, and the signals that the launcher gets.

    Args:
      ring: the ranks.
      evaluators: one group for each.
      selector: where their lifelines are registered.
      ring_ended: file that tells evaluators that all ranks have succeeded.
    """

    def __init__(
        self,
        ring: Ring,
        evaluators: Sequence[Evaluator],
        selector: selectors.BaseSelector,
        ring_ended: str,
    ) -> None:
        self._ring = ring
        self._evaluators = evaluators
        self._groups = (ring, *evaluators)
        self._selector = selector
        self._ring_ended = ring_ended
        self._has_told = False  # evaluators that all ranks have succeeded
        self._interrupted = False

    def wait(self, wake_fd: int) -> int:
        """Go on until every group has come to its end, and return the exit code of the run."""
        self._selector.register(
            wake_fd, selectors.EVENT_READ, lambda: self._forward(os.read(wake_fd, 64))
        )
        failed: list[Group] = []  # in the order in which they have given up
        while any(group.code is None for group in self._groups):
            for group in self._groups:
                group.keep_time()
            for key, _ in self._selector.select(self._pause_s()):
                key.data()
            if self._ring.code:
                for evaluator in self._evaluators:
                    evaluator.stop()
            elif self._ring.code == 0 and not self._has_told:
                self._tell_evaluators()
            failed += [group for group in self._groups if group.code and group not in failed]
        root = self._ring if self._ring.code else next(iter(failed), None)
        if root is None:
            return 0
        if root.cause:  # after all that the others have said
            _LOG.error("%s", root.cause)
        return root.code or 0

    def _tell_evaluators(self) -> None:
        self._has_told = True
        try:
            open(self._ring_ended, "w").close()
        except OSError as error:
            _LOG.warning("cannot tell evaluators that all ranks have succeeded: %s", error)

    def _pause_s(self) -> float | None:
        if all(group.code is not None for group in self._groups):  # none could be started
            return 0.0
        times_s = [group.next_time_s() for group in self._groups]
        soonest_s = min((time_s for time_s in times_s if time_s is not None), default=None)
        return None if soonest_s is None else max(0.0, soonest_s - time.monotonic())

    def _forward(self, signums: bytes) -> None:
        for signum in signums:
            if signum not in FORWARDED:  # somebody else's handler
                continue
            if signum == signal.SIGINT and self._interrupted:
                _LOG.warning("interrupted again: killing all tasks")
                for group in self._groups:
                    group.kill()
                continue
            _LOG.warning("got %s, passing it on to all tasks", signal.Signals(signum).name)
            self._interrupted = self._interrupted or signum == signal.SIGINT
            for group in self._groups:
                group.pass_on(signum)


def _find_command(command: Sequence[str]) -> list[str]:
    if not command:
        raise FileNotFoundError("no command to run")
    program = command[0]
    if program.endswith(".py"):
        if not os.path.isfile(program):
            raise FileNotFoundError(f"no such script: {program!r}")
        return [sys.executable, *command]
    if shutil.which(program) is None:
        raise FileNotFoundError(f"no such command: {program!r}")
    return list(command)


@contextlib.contextmanager
def _signals_caught() -> Iterator[int]:
    """Turn signals into bytes of a pipe, and give the end to read; ignored ones stay ignored.

    A parent that ignores SIGCHLD, or blocks signals, passes that on to its children; here it would
    hide how tasks end.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("launch() handles signals, so call it from the main thread")
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
