"""Memory that processes of one host share: a file in /dev/shm that loses its name at once.

The file has a name only while the ranks open it. After that it lives as long as they do, however
they end. A creator that is killed before leaves a name behind, but no lock on it: the next one
that creates a file here removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
import time

__all__: list[str] = []

DIRECTORY = "/dev/shm"
PREFIX = "hostopt-"
STALE_AFTER_S = 60.0  # a younger file may not be locked yet


class SharedFile:
    """A new file, locked and named until `unlink`.

    Args:
      nbytes: its size; the memory is reserved at once.
      directory: where it has its name, on a file system that lies in memory.

    Raises:
      OSError: there is no such directory, or it has not `nbytes` left.
    """

    def __init__(self, nbytes: int, directory: str = DIRECTORY) -> None:
        remove_stale(directory)
        self._fd, self.path = tempfile.mkstemp(prefix=PREFIX, dir=directory)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._fd, 0, nbytes)  # or writing would end in SIGBUS
            self.memory = _map(self._fd, nbytes)
        except BaseException:
            self.unlink()
            raise

    def unlink(self) -> None:
        """Take the name away; what has been mapped stays."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def attach(path: str, nbytes: int) -> mmap.mmap:
    """Map a file that another process has made.

    Args:
      path: its name.
      nbytes: its size.

    Returns:
      The memory, shared with all who map it.

    Raises:
      OSError: there is no such file here, or this user must not open it.
      ValueError: it is smaller than `nbytes`.
    """
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def remove_stale(directory: str = DIRECTORY) -> None:
    """Remove files whose creator was killed before it could.

    Args:
      directory: where to look.
    """
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):  # another's file, or gone meanwhile
                    _remove_if_stale(entry.path)


def _remove_if_stale(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if time.time() - os.fstat(fd).st_mtime >= STALE_AFTER_S:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
