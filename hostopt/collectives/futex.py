"""Sleeps until another process changes a word in shared memory, by futex(2) of Linux."""

from __future__ import annotations

import ctypes

_FUTEX = ctypes.c_long(202)  # number of the system call on x86-64
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1  # number of waiters to wake
# only a wait takes so long that the interpreter lock should be released
_system_call, _short_system_call = ctypes.CDLL(None).syscall, ctypes.PyDLL(None).syscall


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, value: int, timeout_s: float) -> None:
    """Sleeps until `wake`, but not if the word, of which 32 bits count, has another value."""
    seconds, fraction = divmod(timeout_s, 1)
    limit = ctypes.byref(_Timespec(int(seconds), int(1e9 * fraction)))
    # errors need no handling, as the caller looks at the word again
    _system_call(_FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(value), limit)


def wake(address: int) -> int:
    """Wakes all threads that wait for the word, in any process; returns their number."""
    return int(_short_system_call(_FUTEX, ctypes.c_void_p(address), _WAKE, _ALL))
