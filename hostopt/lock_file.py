"""Lock file that one process holds at a time. The lock ends with the process.

The lock belongs to an open file description (F_OFD_SETLK). The kernel releases it when the last
descriptor is closed, so a crash leaves no lock behind, and NFS forwards it to the server. A lock
of the process (F_SETLK, `fcntl.lockf`) would be released as soon as any code in the process opens
and closes the file, for example to copy its directory. Forked children inherit the descriptor and
close it at once; programs that are started do not inherit it. The file is not deleted when the
lock is released: two processes could then lock two files of the same name.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from hostopt.cluster.tf_config import is_address
from hostopt.collectives import hosts

# Errors of file systems without locks, or without locks of this kind.
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_HELD_BY_OTHERS = (errno.EAGAIN, errno.EACCES)
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid
MAX_BYTES = 4096
TRAINING = "hostopt-training.lock"  # the file that a training locks in its model_dir
_MAX_ADDRESSES = 3  # of ranks; each can answer for the whole ring


@dataclass(frozen=True)
class Holder:
    """The process that has locked a file."""

    host: str
    boot_id: str  # of the kernel of the host, as different hosts may have the same name
    pid: int
    start: str  # time when it locked the file, in UTC
    ring: tuple[str, ...] = ()  # addresses of the first ranks of its ring; empty if it has none

    @classmethod
    def this_process(cls) -> Holder:
        """Returns this process, with the current time."""
        now = datetime.datetime.now(datetime.timezone.utc)
        start = f"{now:%Y-%m-%d %H:%M:%S} UTC"
        return cls(socket.gethostname(), hosts.boot_id(), os.getpid(), start)

    @property
    def is_elsewhere(self) -> bool:
        """True if it runs on another host, or ran before this host was booted."""
        here = Holder.this_process()
        return (self.host, self.boot_id) != (here.host, here.boot_id)


@dataclass
class _Held:
    fd: int
    count: int
    holder: Holder


_held: dict[str, _Held] = {}  # by path
_mutex = threading.RLock()


def acquire(path: str) -> bool:
    """Locks a file and writes this process to it; a process may do so several times.

    The path is without symbolic links. The file is created if it does not exist. Returns False if
    another process holds the lock. Raises OSError if the file cannot be written; if its errno is
    in NO_LOCKS, the file cannot be locked.
    """
    with _mutex:
        if path in _held:
            _held[path].count += 1
            return True
        fd, holder = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), Holder.this_process()
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _whole_file_lock())
            _write(fd, holder, os.path.dirname(path))
        except OSError as error:
            os.close(fd)
            if error.errno in _HELD_BY_OTHERS:
                return False
            raise
        _held[path] = _Held(fd, 1, holder)
    return True


def note_ring(path: str, addresses: Sequence[str]) -> None:
    """Adds the addresses of a ring to the file, if this process has locked it."""
    with _mutex:
        held = _held.get(path)
        if held is None:
            return
        held.holder = replace(held.holder, ring=tuple(addresses[:_MAX_ADDRESSES]))
        with contextlib.suppress(OSError):  # the lock does not depend on it
            _write(held.fd, held.holder, os.path.dirname(path))


def keep(path: str) -> bool:
    """Locks a file again if it was deleted or replaced since this process locked it.

    Returns False if another process holds the lock now; True also if this process did not lock
    the file. After an OSError, as of `acquire`, this process no longer holds the lock.
    """
    with _mutex:
        held = _held.get(path)
        if held is None or _is_at(path, held.fd):
            return True
        os.close(_held.pop(path).fd)
        if not acquire(path):
            return False
        _held[path].count = held.count
        note_ring(path, held.holder.ring)
    return True


def release(path: str) -> None:
    """Releases one `acquire`. Does nothing in a forked child, which holds no lock."""
    with _mutex:
        held = _held.get(path)
        if held is None:
            return
        held.count -= 1
        if not held.count:
            del _held[path]
            os.close(held.fd)


def is_held(path: str) -> bool:
    """Returns True if a process holds the lock; False also without the file, or without locks."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        flock = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _whole_file_lock())
    except OSError:
        return False
    finally:
        os.close(fd)
    return bool(struct.unpack(_FLOCK, flock)[0] != fcntl.F_UNLCK)


def last_holder(path: str) -> Holder | None:
    """Returns the process that locked a file last; None if the file has no such content."""
    try:
        with open(path, "rb") as file:
            entry = json.loads(file.read(MAX_BYTES))
        host, boot_id = str(entry["host"]), str(entry["boot_id"])
        addresses = entry.get("ring", ())
        ring = tuple(each for each in addresses if is_address(each) and each.isprintable())
        return Holder(host, boot_id, int(entry["pid"]), str(entry["start"]), ring)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _whole_file_lock() -> bytes:
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def _write(fd: int, holder: Holder, directory: str) -> None:
    text = json.dumps(asdict(holder)).encode()
    os.pwrite(fd, text, 0)
    os.ftruncate(fd, len(text))
    os.fsync(fd)  # for readers on other hosts
    # all users who may write to the directory may lock the file
    with contextlib.suppress(OSError):
        os.fchmod(fd, stat.S_IMODE(os.stat(directory).st_mode) & 0o666)


def _forget_in_child() -> None:
    for held in _held.values():
        os.close(held.fd)
    _held.clear()
    _mutex.release()


os.register_at_fork(
    before=_mutex.acquire, after_in_parent=_mutex.release, after_in_child=_forget_in_child
)
