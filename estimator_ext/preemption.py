"""A signal to end: the step ends on all ranks, a checkpoint is saved, and the process exits.

::

    signal --- handler, in the main thread: notes it; before the first step it ends the process
         `---- wakeup fd --- thread: says so; ends the process at a second signal, or when the
                             grace time is over, even where the main thread is stuck in a step

Handled are SIGTERM and SIGINT while `Estimator.train` runs in the main thread. A signal that is
ignored, or for which the program has a handler of its own, is left to it.
"""

from __future__ import annotations

import contextlib
import os
import select
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

GRACE_S = 25.0  # from the first signal to the end; Kubernetes kills after 30
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
        self._leave = leave
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
            with _handlers(self._handle) as signums, _watched(signums, self._describe):
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
        self.signum = self.signum or signum
        if not self._is_stepping:
            raise _exit_for(self.signum)

    def _describe(self) -> str:
        """What happens after the first signal."""
        if not self._is_stepping:
            return "this process ends before its first step, and saves nothing"
        return (
            "training stops after this step on all ranks, with a checkpoint; "
            f"another signal, or {GRACE_S:g} s, end this process at once"
        )


class PreemptionHook(tf.compat.v1.train.SessionRunHook):
    """Stops the training after the step in which this rank was told to end.

    Args:
      preemption: that of the training.
    """

    def __init__(self, preemption: Preemption) -> None:
        self._preemption = preemption

    def before_run(self, run_context: Any) -> None:
        """Note that there is something to save.

        Args:
          run_context: not used.
        """
        del run_context
        self._preemption.begin_steps()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Ask for a stop, which becomes one of all ranks.

        Args:
          run_context: of this step.
          run_values: not used.
        """
        del run_values
        if self._preemption.signum:
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
    try:
        yield signums
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def _watched(signums: set[int], describe: Callable[[], str]) -> Iterator[None]:
    """Have a thread see signals as they come, whatever the main thread is doing."""
    if not signums:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    arguments = (reader, signums, describe)
    thread = threading.Thread(target=_watch, args=arguments, daemon=True, name="hostopt-signals")
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_fd)
        os.close(writer)
        thread.join()
        os.close(reader)


def _watch(reader: int, signums: set[int], describe: Callable[[], str]) -> None:
    """Say what the first signal does, and end the process at the second or the deadline."""
    first, deadline_s = 0, None
    while True:
        pause_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        if not select.select([reader], [], [], pause_s)[0]:
            _end_at_once(first, f"not done {GRACE_S:g} s after {signal.Signals(first).name}")
        received = os.read(reader, 64)
        if not received:
            return
        for signum in filter(signums.__contains__, received):
            name = signal.Signals(signum).name
            if first:
                _end_at_once(first, f"got {name} as well")
            first, deadline_s = signum, time.monotonic() + GRACE_S
            _log.warning("got %s: %s", name, describe())


def _end_at_once(signum: int, why: str) -> None:
    _log.warning("%s: this process ends at once, and saves no checkpoint", why)
    os._exit(128 + signum)
