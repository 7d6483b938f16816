"""A signal to end: the step ends on all ranks, a checkpoint is saved, and the process exits.

::

    signal --- handler, in the main thread: notes it; before the first step, and at a second
         |                                  Ctrl-C, it ends the training
         `---- wakeup fd --- thread: says so; ends the process where the main thread does not, as
                             it is stuck: in time after SIGTERM, and after a second Ctrl-C

Handled are SIGTERM and SIGINT while `Estimator.train` runs in the main thread. A signal that is
ignored, or for which the program has a handler of its own, is left to it, and so are those of
children that are forked. One SIGTERM often comes several times, from a service manager and from
the launcher, and counts once.
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

__all__: list[str] = []

_log = tf.get_logger()

GRACE_S = 25.0  # from SIGTERM to the end; Kubernetes kills after 30
INTERRUPTED_AGAIN_S = 5.0  # from the second SIGINT to the end of a process that is stuck
_USUAL_HANDLERS = {
    signal.SIGTERM: (signal.SIG_DFL,),
    signal.SIGINT: (signal.SIG_DFL, signal.default_int_handler),
}


class Preemption:
    """What one training knows of signals to end, to this rank or to another.

    Args:
      leave: leaves the ring in good order.
    """

    def __init__(self, leave: Callable[[], None]) -> None:
        self.signum = 0  # the first that this rank got
        self.saves = True  # whether a checkpoint is saved in the end
        self.interrupts = 0  # how many SIGINTs came, as the thread counts them
        self.is_cut_short = False  # the handler has ended the training in the middle of a step
        self._leave = leave
        self._interrupts_handled = 0  # fewer, where several came while the main thread was busy
        self._is_stepping = False
        self._others: list[int] = []  # ranks that were signalled, as all have told

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Scope of a training, in which signals to end are handled.

        Yields:
          Nothing.

        Raises:
          SystemExit: the training was preempted by SIGTERM, or as another rank was; code 143.
          KeyboardInterrupt: it was by SIGINT.
        """
        try:
            with _handlers(self._handle) as signums, _watched(signums, self):
                yield
                if self.signum or self._others:
                    self._leave()  # before an error of this process can reach the others
        except hostopt.RetryableError as error:
            if not self.signum:
                raise
            _log.warning("no checkpoint is saved after the signal: %s", error)
        if self.signum or self._others:
            raise _exit_for(self.signum)

    def begin_steps(self) -> None:
        """Have signals wait for the end of a step from now on."""
        self._is_stepping = True

    def agree(self, communicator: hostopt.Communicator) -> None:
        """Tell the other ranks of a signal at the end of training, and hear of theirs.

        Args:
          communicator: the ring.

        Raises:
          hostopt.HostOptError: a rank failed, left or timed out.
        """
        signums = communicator.all_gather(np.array(self.signum), "who was preempted")
        self._others = [rank for rank in np.flatnonzero(signums) if rank != communicator.rank]
        if self._others and not self.signum:
            names = ", ".join(f"rank {rank}" for rank in self._others)
            _log.warning("training ends on all ranks, as %s was told to end", names)

    def _handle(self, signum: int, frame: Any) -> None:
        del frame
        is_first = not self.signum
        self.signum = self.signum or signum
        self._interrupts_handled += signum == signal.SIGINT
        if is_first and not self._is_stepping:
            raise _exit_for(signum)
        if max(self.interrupts, self._interrupts_handled) > 1 and not self.is_cut_short:
            self.is_cut_short = True
            raise KeyboardInterrupt

    def describe(self, signum: int) -> str:
        """What happens after a signal, the first."""
        if not self._is_stepping:
            return "this process ends before its first step, and saves nothing"
        saves = (
            "with a checkpoint" if self.saves else "nothing is saved, as no saver is configured"
        )
        more = f"this process ends in {GRACE_S:g} s at the latest"
        if signum == signal.SIGINT:
            more = "another SIGINT ends it at once"
        return f"training stops on all ranks after this session.run or the next, {saves}; {more}"


class PreemptionHook(tf.compat.v1.train.SessionRunHook):
    """Stops the training after the step in which this rank was told to end.

    Args:
      preemption: that of the training.
    """

    def __init__(self, preemption: Preemption) -> None:
        self.preemption = preemption

    def before_run(self, run_context: Any) -> None:
        """Note that there is something to save.

        Args:
          run_context: not used.
        """
        del run_context
        self.preemption.begin_steps()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Ask for a stop, which becomes one of all ranks.

        Args:
          run_context: of this step.
          run_values: not used.
        """
        del run_values
        if self.preemption.signum:
            run_context.request_stop()


def _exit_for(signum: int) -> BaseException:
    return KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signal.SIGTERM)


@contextlib.contextmanager
def _handlers(handle: Callable[[int, Any], None]) -> Iterator[set[int]]:
    """Have a function handle the signals that nobody else handles, and tell which these are."""
    signums: set[int] = set()
    if threading.current_thread() is threading.main_thread():
        signums = {s for s, usual in _USUAL_HANDLERS.items() if signal.getsignal(s) in usual}
    before = {signum: signal.signal(signum, handle) for signum in signums}
    _replaced.update(before)
    try:
        yield signums
    finally:
        for signum in signums:
            _replaced.pop(signum, None)
            signal.signal(signum, before[signum])


_replaced: dict[int, Any] = {}  # handlers in whose place those of a training are


def _put_back_in_child() -> None:
    """Let a forked child die of signals, and keep them from this process's thread."""
    if not _replaced:
        return
    signal.set_wakeup_fd(-1)
    for signum, handler in _replaced.items():
        signal.signal(signum, handler)
    _replaced.clear()


os.register_at_fork(after_in_child=_put_back_in_child)


@contextlib.contextmanager
def _watched(signums: set[int], preemption: Preemption) -> Iterator[None]:
    """Have a thread see signals as they come, whatever the main thread is doing."""
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


def _watch(reader: int, signums: set[int], preemption: Preemption) -> None:
    """Say what signals do, and end the process where the main thread does not."""
    with selectors.DefaultSelector() as selector:  # `select` knows no descriptor above 1023
        selector.register(reader, selectors.EVENT_READ)
        _act_on_signals(reader, selector, signums, preemption)


def _act_on_signals(
    reader: int, selector: selectors.BaseSelector, signums: set[int], preemption: Preemption
) -> None:
    first = 0
    deadlines_s: dict[int, float] = {}
    while True:
        pause_s = None
        if deadlines_s:
            pause_s = max(0.0, min(deadlines_s.values()) - time.monotonic())
        if not selector.select(pause_s):
            if signal.SIGINT in deadlines_s and preemption.is_cut_short:
                del deadlines_s[signal.SIGINT]
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


def _end_at_once(signum: int, why: str) -> None:
    _log.warning("%s: this process ends at once, and saves no checkpoint", why)
    os._exit(128 + signum)
