"""Sleeps until another process changes a word in shared memory, by futex(2) of Linux."""

from __future__ import annotations

import ctypes

_SYSCALL = 202  # on x86-64
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1  # number of waiters to wake
_libc = ctypes.CDLL(None)  # its calls release the interpreter lock


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, value: int, timeout_s: float) -> None:
    """Sleeps until `wake`, but not if the word, of which 32 bits count, has another value."""
    seconds, fraction = divmod(timeout_s, 1)
    limit = _Timespec(int(seconds), int(1e9 * fraction))
    _call(address, _WAIT, value & 0xFFFFFFFF, ctypes.byref(limit))


def wake(address: int) -> None:
    """Wakes all threads that wait for the word, in any process."""
    _call(address, _WAKE, _ALL, None)


def _call(address: int, operation: int, value: int, timeout: object) -> None:
    # errors need no handling: each caller of `wait` looks at the word again
    _libc.syscall(
        ctypes.c_long(_SYSCALL),
        ctypes.c_void_p(address),
        operation,
        ctypes.c_uint32(value),
        timeout,
    )
