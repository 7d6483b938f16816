"""Limit of file descriptors, and errors that occur if none is left.

Many systems start a process with a soft limit of 1024, for programs that use `select`, and a much
larger hard limit.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Sequence

from hostopt.errors import HostOptError, ResourceError

# Enough for any ring. If the hard limit is a billion, a program that closes all descriptors which
# it may have inherited takes minutes.
MAX_DESCRIPTORS = 1 << 16
_OPEN = "/proc/self/fd"
# Text of EMFILE and ENFILE in the C library, which TensorFlow quotes.
_MESSAGE = os.strerror(errno.EMFILE)


def raise_limit() -> None:
    """Raises the soft limit of this process to the hard limit, but to at most 65,536."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if limit() < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    """Returns the soft limit of this process, or 65,536 if it is unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> Sequence[int]:
    """Returns the open descriptors, or all possible ones if they cannot be listed."""
    try:
        return [int(name) for name in os.listdir(_OPEN)]
    except OSError:  # no descriptor is left, or there is no /proc
        return range(limit())


def is_out(error: BaseException) -> bool:
    """Returns True if an error means that no descriptor was left.

    It is one of the operating system, or of TensorFlow, which quotes that one, but not of hostopt.
    """
    if isinstance(error, HostOptError):
        return False
    number = error.errno if isinstance(error, OSError) else None
    return number in (errno.EMFILE, errno.ENFILE) or _MESSAGE in str(error)


def check(error: BaseException) -> None:
    """Raises ResourceError if `is_out`; callers then assume another cause."""
    if is_out(error):
        raise ResourceError(advice(error)) from error


def advice(error: BaseException) -> str:
    """Returns text that explains an error for which `is_out` is True."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = " ".join(str(error).split())
    return (
        f"no file descriptor is left ({text}): the soft limit of this process is {soft}, the hard "
        f"limit {hard}. Raise the limit, for example by `ulimit -n`, or close open files"
    )


def check_room() -> None:
    """Raises ResourceError if this process cannot open another file."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        check(error)


def open_closed_descriptors() -> None:
    """Opens /dev/null as each of the descriptors 0 to 2 that is closed.

    Otherwise the next socket or pipe would get that number, and printed output would go into it.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is fd
        if getattr(sys, name) is None:  # another file may have the number by now
            file = open(os.devnull, "w" if fd else "r")  # noqa: SIM115  never closed
            setattr(sys, name, file)
