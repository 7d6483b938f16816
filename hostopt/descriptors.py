"""File descriptors: room for them, and errors of having none left, which no disk is to blame for.

Many systems start a process with a soft limit of 1024, for programs of the age of `select`, and
let it have many more.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Sequence

from hostopt.errors import HostOptError, ResourceError

__all__: list[str] = []

# Enough for any ring. Where the hard limit is a billion, programs that close all that they could
# have inherited would need minutes.
MOST_DESCRIPTORS = 1 << 16
_OPEN = "/proc/self/fd"
# EMFILE and ENFILE, in the words of the C library, which TensorFlow repeats.
_WORDS = os.strerror(errno.EMFILE)


def raise_limit() -> None:
    """Raise the soft limit of this process to the hard one, or to 65,536 where that is more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if limit() < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    """The soft limit of this process, 65,536 where it has none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> Sequence[int]:
    """The descriptors of this process, and where that cannot be told all that it may have."""
    try:
        return [int(name) for name in os.listdir(_OPEN)]
    except OSError:  # no descriptor is left, or there is no /proc
        return range(limit())


def is_out(error: BaseException) -> bool:
    """Whether an error says that no descriptor was left.

    Args:
      error: of the operating system, or of TensorFlow, which only quotes it; one of hostopt has
        its cause already.
    """
    if isinstance(error, HostOptError):
        return False
    number = error.errno if isinstance(error, OSError) else None
    return number in (errno.EMFILE, errno.ENFILE) or _WORDS in str(error)


def check(error: BaseException) -> None:
    """Refuse to look for another cause of an error where there was no descriptor left.

    Args:
      error: as for `is_out`.

    Raises:
      ResourceError: no descriptor was left.
    """
    if is_out(error):
        raise ResourceError(advice(error)) from error


def advice(error: BaseException) -> str:
    """What to do about an error that `is_out`.

    Args:
      error: the error.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = " ".join(str(error).split())
    return (
        f"no file descriptor is left ({text}): this process may have {soft}, and {hard} where its "
        "limit is raised. Raise the limit, as by `ulimit -n`, or end what holds them open"
    )


def check_room() -> None:
    """Make sure that this process can open one more file.

    Raises:
      ResourceError: it cannot.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        check(error)
