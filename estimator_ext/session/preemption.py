"""Preemption: after a signal all ranks end the step, save a checkpoint and exit.

SIGTERM and SIGINT are handled while `Estimator.train` runs in the main thread::

    signal --- handler, in the main thread: stores the signal; before the first step, and after
         |                                  a second SIGINT, it raises an exception
         `---- wakeup fd --- thread: logs the signal; ends the process if the main thread is
                             stuck: after SIGTERM, after a second SIGINT, or while the training
                             is cleaned up after the latter

A signal that is ignored, or for which the program has a handler, is not handled here. Forked
children get the previous handlers back. Repeated SIGTERMs count once: a service manager and the
launcher often both send it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext.session.guard import exit_without_wait

_log = tf.get_logger()

# from SIGTERM to the end, and for the cleanup after a second SIGINT; Kubernetes kills after 30 s
GRACE_S = 25.0
INTERRUPTED_AGAIN_S = 5.0  # from the second SIGINT to the end of a process that is stuck
_DEFAULT_HANDLERS = {
    signal.SIGTERM: (signal.SIG_DFL,),
    signal.SIGINT: (signal.SIG_DFL, signal.default_int_handler),
}


class PreemptionHook(tf.compat.v1.train.SessionRunHook):
    """Requests a stop after the step in which this rank got a signal.

    It knows the signals of this rank and of others. `leave` leaves the ring in good order.
    """

    def __init__(self, leave: Callable[[], None]) -> None:
        self.signum = 0  # the first signal of this rank
        self.saves = True  # False if no saver is configured
        self.interrupts = 0  # number of SIGINTs that the watching thread has seen
        self.is_cut_short = False  # the handler has ended the training in the middle of a step
        self._leave = leave
        # less than `interrupts` if several SIGINTs came while the main thread was busy
        self._interrupts_handled = 0
        self._is_stepping = False
        self._other_ranks: list[int] = []  # other ranks that got a signal

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Scope of a training, in which SIGTERM and SIGINT are handled.

        Raises:
          SystemExit: SIGTERM has preempted the training, or another rank was preempted; code 143.
          KeyboardInterrupt: SIGINT has preempted the training.
        """
        try:
            with _handlers(self) as signums, _watched(signums, self):
                yield
                if self.signum or self._other_ranks:
                    self._leave()  # before an error of this process can reach the other ranks
        except hostopt.RetryableError as error:
            if not self.signum:
                raise
            _log.warning("no checkpoint is saved after the signal: %s", error)
        if self.signum or self._other_ranks:
            exit_without_wait()
            raise _exit_for(self.signum)

    def before_run(self, run_context: Any) -> None:
        """Makes signals wait for the end of the step."""
        self._is_stepping = True

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Requests a stop, which `EndStopSaveHook` turns into a stop of all ranks."""
        if self.signum:
            run_context.request_stop()

    def share(self, communicator: hostopt.Communicator) -> None:
        """Exchanges the signals of all ranks at the end of training. Collective."""
        signums = communicator.all_gather(np.array(self.signum), "who was preempted")
        self._other_ranks = [int(r) for r in np.flatnonzero(signums) if r != communicator.rank]
        if self._other_ranks and not self.signum:
            names = ", ".join(f"rank {rank}" for rank in self._other_ranks)
            _log.warning("training ends on all ranks: %s got a signal to end", names)

    def handle(self, signum: int, frame: Any) -> None:
        """Handles a signal in the main thread.

        Raises:
          SystemExit: SIGTERM came before the first step; code 143.
          KeyboardInterrupt: SIGINT came before the first step, or came twice.
        """
        is_first = not self.signum
        self.signum = self.signum or signum
        self._interrupts_handled += signum == signal.SIGINT
        if is_first and not self._is_stepping:
            raise _exit_for(signum)
        if max(self.interrupts, self._interrupts_handled) > 1 and not self.is_cut_short:
            self.is_cut_short = True
            raise KeyboardInterrupt

    def describe(self, signum: int) -> str:
        """Returns a description, for the log, of the effect of the first signal."""
        if not self._is_stepping:
            return "this process ends before its first step, and saves nothing"
        saves = (
            "with a checkpoint" if self.saves else "nothing is saved, as no saver is configured"
        )
        more = f"this process ends in {GRACE_S:g} s at the latest"
        if signum == signal.SIGINT:
            more = "another SIGINT ends it at once"
        return f"training stops on all ranks after this session.run or the next, {saves}; {more}"


def _exit_for(signum: int) -> BaseException:
    return KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signal.SIGTERM)


# -- the signals of this process ---------------------------------------------------------------


@contextlib.contextmanager
def _handlers(preemption: PreemptionHook) -> Iterator[set[int]]:
    """Installs the handler of a preemption; yields the signals that it handles."""
    signums: set[int] = set()
    if threading.current_thread() is threading.main_thread():
        signums = {s for s, usual in _DEFAULT_HANDLERS.items() if signal.getsignal(s) in usual}
    before = {signum: signal.signal(signum, preemption.handle) for signum in signums}
    _replaced.update(before)
    try:
        yield signums
    finally:
        for signum in signums:
            _replaced.pop(signum, None)
            signal.signal(signum, before[signum])


_replaced: dict[int, Any] = {}  # handlers that are replaced during a training


def _restore_in_child() -> None:
    """Restores the handlers in a forked child, which does not wake this process's thread."""
    if not _replaced:
        return
    signal.set_wakeup_fd(-1)
    for signum, handler in _replaced.items():
        signal.signal(signum, handler)
    _replaced.clear()


os.register_at_fork(after_in_child=_restore_in_child)


@contextlib.contextmanager
def _watched(signums: set[int], preemption: PreemptionHook) -> Iterator[None]:
    """Starts the thread that sees signals immediately, even if the main thread is busy."""
    if not signums:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    arguments = (reader, signums, preemption)
    thread = threading.Thread(target=_watch, args=arguments, daemon=True, name="hostopt-signals")
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_fd)
        os.close(writer)
        thread.join()
        os.close(reader)


def _watch(reader: int, signums: set[int], preemption: PreemptionHook) -> None:
    """Logs signals, and ends the process if the main thread does not."""
    selector = selectors.PollSelector()  # `select` cannot take descriptors above 1023
    selector.register(reader, selectors.EVENT_READ)
    first = 0
    deadlines_s: dict[int, float] = {}
    while True:
        pause_s = None
        if deadlines_s:
            pause_s = max(0.0, min(deadlines_s.values()) - time.monotonic())
        if not selector.select(pause_s):
            if deadlines_s.pop(signal.SIGINT, None) and preemption.is_cut_short:
                # the exception is raised: its cleanup has the time that SIGTERM has
                deadlines_s.setdefault(signal.SIGTERM, time.monotonic() + GRACE_S)
                continue
            _end_at_once(first, "the time to end is over")
        received = os.read(reader, 64)
        if not received:
            return
        for signum in filter(signums.__contains__, received):
            if not first:
                first = signum
                name = signal.Signals(signum).name
                _log.warning("got %s: %s", name, preemption.describe(signum))
            if signum == signal.SIGTERM:
                deadlines_s.setdefault(signum, time.monotonic() + GRACE_S)
                continue
            preemption.interrupts += 1
            if preemption.interrupts == 2:
                deadlines_s[signum] = time.monotonic() + INTERRUPTED_AGAIN_S
                _log.warning("got SIGINT again: this training ends at once")
            elif preemption.interrupts > 2:
                _end_at_once(first, "got SIGINT a third time")


def _end_at_once(signum: int, reason: str) -> None:
    _log.warning("%s: this process ends at once, and saves no checkpoint", reason)
    os._exit(128 + signum)
