"""A file that one process holds at a time, and none that has ended, however it ended.

The lock is one of an open file description (F_OFD_SETLK): the kernel takes it back with the last
descriptor of it, so a crash leaves none behind, and NFS hands it to its server. One of the process
(F_SETLK, `fcntl.lockf`) would be lost as soon as anything in the process opens and closes the
file, such as a copy of its directory. Descriptors reach children that are forked, so those close
theirs at once; a program that is started closes it by itself. The file stays when the lock ends:
to delete it would let two processes lock two files of one name.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import stat
import struct
import threading
from dataclasses import asdict, dataclass

from hostopt import hosts

__all__: list[str] = []

# What file systems answer that have no locks, or none of this kind.
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_HELD_BY_OTHERS = (errno.EAGAIN, errno.EACCES)
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid
MOST_BYTES = 4096


@dataclass(frozen=True)
class Holder:
    """The process that has locked a file.

    Args:
      host: its host.
      boot_id: of the kernel there: hosts may have one name, one after another.
      pid: its process id there.
      start: when it did so, in UTC.
    """

    host: str
    boot_id: str
    pid: int
    start: str

    @classmethod
    def of_now(cls) -> Holder:
        """This process."""
        now = datetime.datetime.now(datetime.timezone.utc)
        start = f"{now:%Y-%m-%d %H:%M:%S} UTC"
        return cls(socket.gethostname(), hosts.boot_id(), os.getpid(), start)

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is on another host than this process, or was before this one has booted."""
        here = Holder.of_now()
        return (self.host, self.boot_id) != (here.host, here.boot_id)


@dataclass
class _Held:
    fd: int
    count: int


_held: dict[str, _Held] = {}  # by path
_mutex = threading.RLock()


def acquire(path: str) -> bool:
    """Lock a file and write into it who this is; a process may do so several times.

    Args:
      path: the file, which is made where there is none; without symbolic links.

    Returns:
      True where this process holds it now, False where another one does.

    Raises:
      OSError: the file cannot be written, or, with an errno in NO_LOCKS, not be locked.
    """
    with _mutex:
        if path in _held:
            _held[path].count += 1
            return True
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock_of_all())
            _write(fd, Holder.of_now(), os.path.dirname(path))
        except OSError as error:
            os.close(fd)
            if error.errno in _HELD_BY_OTHERS:
                return False
            raise
        _held[path] = _Held(fd, 1)
    return True


def keep(path: str) -> bool:
    """Lock a file anew that has been deleted, or replaced, since this process acquired it.

    Args:
      path: as it was acquired; nothing happens where it was not.

    Returns:
      False where another process holds it now, and this one no more.

    Raises:
      OSError: as `acquire`; this process holds it no more.
    """
    with _mutex:
        held = _held.get(path)
        if held is None or _is_at(path, held.fd):
            return True
        os.close(_held.pop(path).fd)
        if not acquire(path):
            return False
        _held[path].count = held.count
    return True


def release(path: str) -> None:
    """Undo one `acquire`; nothing in a forked child, which holds none.

    Args:
      path: as it was acquired.
    """
    with _mutex:
        held = _held.get(path)
        if held is None:
            return
        held.count -= 1
        if not held.count:
            del _held[path]
            os.close(held.fd)


def is_held(path: str) -> bool:
    """Whether a process holds a file, as far as that can be known; locks nothing.

    Args:
      path: the file.

    Returns:
      False too where there is no such file, or its file system has no locks.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock_of_all())
    except OSError:
        return False
    finally:
        os.close(fd)
    return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)


def last_holder(path: str) -> Holder | None:
    """Who has locked a file last.

    Args:
      path: the file.

    Returns:
      What it wrote; None where nothing is there that could be read.
    """
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(MOST_BYTES))
        host, boot_id = str(found["host"]), str(found["boot_id"])
        return Holder(host, boot_id, int(found["pid"]), str(found["start"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _lock_of_all() -> bytes:
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def _write(fd: int, holder: Holder, directory: str) -> None:
    text = json.dumps(asdict(holder)).encode()
    os.pwrite(fd, text, 0)
    os.ftruncate(fd, len(text))
    os.fsync(fd)  # for readers on other hosts
    with contextlib.suppress(OSError):  # whoever may write there may hold it after another user
        os.fchmod(fd, stat.S_IMODE(os.stat(directory).st_mode) & 0o666)


def _forget_in_child() -> None:
    for held in _held.values():
        os.close(held.fd)
    _held.clear()
    _mutex.release()


os.register_at_fork(
    before=_mutex.acquire, after_in_parent=_mutex.release, after_in_child=_forget_in_child
)
