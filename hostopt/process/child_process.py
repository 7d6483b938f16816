"""Child processes that a program starts itself, with `os.fork` or `multiprocessing`.

The threads of a process do not survive a fork. A library that has started threads waits for them
forever in a forked child, so the child must not use it.

A child of `multiprocessing` that was forked skips `atexit`, and no such child calls
`sys.excepthook`. What must run at its end is a finalizer of `multiprocessing`.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize

from hostopt.errors import ConfigError

_LEAVE, _ABORT = 1, 2  # priorities of finalizers: the higher runs first
_finalizers: dict[Callable[[], object], Finalize] = {}


class ForkGuard:
    """Refuses a library in processes forked after its first use.

    `is_in_use` is called before each fork; it returns True if the library has started threads.
    """

    def __init__(self, name: str, is_in_use: Callable[[], bool]) -> None:
        self._name = name
        self._is_in_use = is_in_use
        self._used_before_fork = False
        self._forked_in_use = False
        os.register_at_fork(before=self._before_fork, after_in_child=self._after_fork_in_child)

    def _before_fork(self) -> None:
        self._used_before_fork = self._is_in_use()

    def _after_fork_in_child(self) -> None:
        self._forked_in_use |= self._used_before_fork

    def mark(self) -> None:
        """Makes `check` raise an error in this process, if the guard has not seen its fork."""
        self._forked_in_use = True

    def check(self) -> None:
        """Raises an error if the library cannot work in this process."""
        if self._forked_in_use:
            raise ConfigError(
                f"this process was forked from one that had already used {self._name}, and "
                "its threads do not survive a fork. Start workers with "
                'multiprocessing.get_context("spawn"), fork them before the first use, or start '
                "the program with `hostopt run`"
            )


def native_threads() -> list[str]:
    """Returns the names of the threads of this process; [] if the system does not list them."""
    names = []
    with contextlib.suppress(OSError):  # not Linux, or a thread has just ended
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/comm") as file:
                names.append(file.read().strip())
    return names


def call_at_exit(function: Callable[[], object]) -> None:
    """Calls a function when this process ends, also if `multiprocessing` started it."""
    atexit.register(function)
    if multiprocessing.parent_process() is not None:
        _finalizers[function] = Finalize(None, function, exitpriority=_LEAVE)


def cancel_at_exit(function: Callable[[], object]) -> None:
    """Reverts `call_at_exit`."""
    atexit.unregister(function)
    if function in _finalizers:
        _finalizers.pop(function).cancel()


def call_on_error(function: Callable[[BaseException], object]) -> None:
    """Calls a function if an exception ends this child of `multiprocessing`.

    It runs before the functions of `call_at_exit`. In other processes this does nothing.
    """
    if multiprocessing.parent_process() is None:
        return
    handled_before = sys.exc_info()[1]  # of the parent, if it forks while it handles an exception

    def call() -> None:
        error = sys.exc_info()[1]
        if error is None or error is handled_before or isinstance(error, SystemExit):
            return
        function(error)

    Finalize(None, call, exitpriority=_ABORT)
