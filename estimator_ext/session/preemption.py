"""Preemption: after a signal all ranks end the step, save a checkpoint and exit.

SIGTERM and SIGINT are handled while `Estimator.train` runs in the main thread.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext.session import signals
from estimator_ext.session.close import exit_without_wait

_log = tf.get_logger()


class Preemption:
    """Signals that this rank or another one got during a training.

    Args:
      leave: function that leaves the ring in good order.
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
            with signals.signals_to(self):
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

    def begin_steps(self) -> None:
        """Makes signals wait for the end of a step from now on."""
        self._is_stepping = True

    def share(self, communicator: hostopt.Communicator) -> None:
        """Exchanges the signals of all ranks at the end of training.

        Collective: all ranks must call it.
        """
        signums = communicator.all_gather(np.array(self.signum), "who was preempted")
        self._other_ranks = [r for r in np.flatnonzero(signums) if r != communicator.rank]
        if self._other_ranks and not self.signum:
            names = ", ".join(f"rank {rank}" for rank in self._other_ranks)
            _log.warning("training ends on all ranks: %s got a signal to end", names)

    def handle(self, signum: int, frame: Any) -> None:
        """Handles a signal in the main thread.

        Raises:
          SystemExit: SIGTERM came before the first step; code 143.
          KeyboardInterrupt: SIGINT came before the first step, or came twice.
        """
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
        """Returns a description, for the log, of the effect of the first signal."""
        if not self._is_stepping:
            return "this process ends before its first step, and saves nothing"
        saves = (
            "with a checkpoint" if self.saves else "nothing is saved, as no saver is configured"
        )
        more = f"this process ends in {signals.GRACE_S:g} s at the latest"
        if signum == signal.SIGINT:
            more = "another SIGINT ends it at once"
        return f"training stops on all ranks after this session.run or the next, {saves}; {more}"


class PreemptionHook(tf.compat.v1.train.SessionRunHook):
    """Requests a stop after the step in which this rank got a signal.

    Args:
      preemption: signals of the training.
    """

    def __init__(self, preemption: Preemption) -> None:
        self.preemption = preemption

    def before_run(self, run_context: Any) -> None:
        """Makes signals wait for the end of the step."""
        del run_context
        self.preemption.begin_steps()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Requests a stop, which `EndStopSaveHook` turns into a stop of all ranks."""
        del run_values
        if self.preemption.signum:
            run_context.request_stop()


def _exit_for(signum: int) -> BaseException:
    return KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signal.SIGTERM)
