"""Handling of SIGTERM and SIGINT: a handler in the main thread, and a watching thread.

::

    signal --- handler, in the main thread: stores the signal; before the first step, and after
         |                                  a second SIGINT, it raises an exception
         `---- wakeup fd --- thread: logs the signal; ends the process if the main thread is
                             stuck: after SIGTERM, after a second SIGINT, or while the training
                             is cleaned up after the latter

Signals are handled only in the main thread. A signal that is ignored, or for which the program has
a handler, is not handled here. Forked children get the previous handlers back. Repeated SIGTERMs
count once: a service manager and the launcher often both send it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

import tensorflow as tf

_log = tf.get_logger()

# from SIGTERM to the end, and for the cleanup after a second SIGINT; Kubernetes kills after 30 s
GRACE_S = 25.0
INTERRUPTED_AGAIN_S = 5.0  # from the second SIGINT to the end of a process that is stuck
_DEFAULT_HANDLERS = {
    signal.SIGTERM: (signal.SIG_DFL,),
    signal.SIGINT: (signal.SIG_DFL, signal.default_int_handler),
}


class Receiver(Protocol):
    """Receiver of signals.

    Attributes:
      interrupts: number of SIGINTs that the watching thread has seen.
      is_cut_short: True if the handler has ended the training in the middle of a step.
    """

    interrupts: int
    is_cut_short: bool

    def handle(self, signum: int, frame: Any) -> None:
        """Handles a signal in the main thread."""

    def describe(self, signum: int) -> str:
        """Returns a description, for the log, of the effect of the first signal."""


@contextlib.contextmanager
def signals_to(receiver: Receiver) -> Iterator[None]:
    """Scope in which a receiver gets the signals that have their default handlers."""
    with _handlers(receiver) as signums, _watched(signums, receiver):
        yield


@contextlib.contextmanager
def _handlers(receiver: Receiver) -> Iterator[set[int]]:
    """Installs the handler of a receiver; yields the signals that it handles."""
    signums: set[int] = set()
    if threading.current_thread() is threading.main_thread():
        signums = {s for s, usual in _DEFAULT_HANDLERS.items() if signal.getsignal(s) in usual}
    before = {signum: signal.signal(signum, receiver.handle) for signum in signums}
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
def _watched(signums: set[int], receiver: Receiver) -> Iterator[None]:
    """Starts the thread that sees signals immediately, even if the main thread is busy."""
    if not signums:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    arguments = (reader, signums, receiver)
    thread = threading.Thread(target=_watch, args=arguments, daemon=True, name="hostopt-signals")
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_fd)
        os.close(writer)
        thread.join()
        os.close(reader)


def _watch(reader: int, signums: set[int], receiver: Receiver) -> None:
    """Logs signals, and ends the process if the main thread does not."""
    with selectors.DefaultSelector() as selector:  # `select` cannot take descriptors above 1023
        selector.register(reader, selectors.EVENT_READ)
        _act_on_signals(reader, selector, signums, receiver)


def _act_on_signals(
    reader: int, selector: selectors.BaseSelector, signums: set[int], receiver: Receiver
) -> None:
    first = 0
    deadlines_s: dict[int, float] = {}
    while True:
        pause_s = None
        if deadlines_s:
            pause_s = max(0.0, min(deadlines_s.values()) - time.monotonic())
        if not selector.select(pause_s):
            if deadlines_s.pop(signal.SIGINT, None) and receiver.is_cut_short:
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
                _log.warning("got %s: %s", name, receiver.describe(signum))
            if signum == signal.SIGTERM:
                deadlines_s.setdefault(signum, time.monotonic() + GRACE_S)
                continue
            receiver.interrupts += 1
            if receiver.interrupts == 2:
                deadlines_s[signum] = time.monotonic() + INTERRUPTED_AGAIN_S
                _log.warning("got SIGINT again: this training ends at once")
            elif receiver.interrupts > 2:
                _end_at_once(first, "got SIGINT a third time")


def _end_at_once(signum: int, reason: str) -> None:
    _log.warning("%s: this process ends at once, and saves no checkpoint", reason)
    os._exit(128 + signum)
