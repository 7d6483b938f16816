"""Memory shared by the processes of one host: a file in /dev/shm, unlinked after all have it open.

After that it exists until the last of them has ended. A creator that is killed earlier leaves an
unlocked file behind, which the next process that creates a shared file removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Iterator

DIRECTORY = "/dev/shm"
PREFIX = "hostopt-"
STALE_AFTER_S = 60.0  # a younger file may not be locked yet


@contextlib.contextmanager
def create(nbytes: int, directory: str = DIRECTORY) -> Iterator[tuple[str, mmap.mmap]]:
    """Creates a file, which is locked and has a name in this scope; its memory is reserved.

    Yields its path and its memory, which stays valid.
    """
    remove_stale(directory)
    fd, path = tempfile.mkstemp(prefix=PREFIX, dir=directory)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(fd, 0, nbytes)  # without it, a write may end in SIGBUS
        yield path, _map(fd, nbytes)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.close(fd)


def attach(path: str, nbytes: int) -> mmap.mmap:
    """Maps a file of another process; raises OSError, or ValueError if it is too small."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def remove_stale(directory: str = DIRECTORY) -> None:
    """Removes files whose creator was killed before it could unlink them."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):  # of another user, or already removed
                    _remove_if_stale(entry.path)


def _remove_if_stale(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if time.time() - os.fstat(fd).st_mtime >= STALE_AFTER_S:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the creator is alive
            os.unlink(path)
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
