"""Runs one command in a session of its own, and leaves nothing of it behind.

`hostopt.launch` executes this file by its path, as ``python -I -S _supervisor.py command args``,
so neither hostopt nor anything it imports is loaded here. Standard input is a socket to the
launcher: upwards go the command's process group and its exit code, downwards one byte for each
signal to deliver. End of file there means that the launcher is gone, and the command is killed.
When this process is killed itself, the kernel kills the command's process group.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys

__all__: list[str] = []

_LAUNCHER_FD = 0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CANNOT_START = 2
_POLL_S = 0.05  # between looks at a group that has lost its leader


def main(command: list[str]) -> int:
    """Run `command` to its end.

    Args:
      command: program and arguments; the program is looked up on PATH.

    Returns:
      Its exit code; 128 + n where signal n ended it; 2 where it cannot be started.
    """
    wake_fd = _catch_signals()
    reader, _ = os.pipe()  # the other end is open for as long as this process lives
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[reader],
            preexec_fn=lambda: _die_when_closed(reader),  # noqa: PLW1509  there are no threads
        )
    except OSError as error:
        print(f"hostopt: cannot start {command[0]!r}: {error}", file=sys.stderr, flush=True)
        return _CANNOT_START
    _tell(b"group %d" % child.pid)
    _serve(child.pid, wake_fd)
    # The leader is not reaped yet, so its group's number cannot belong to anyone else.
    _signal_group(child.pid, signal.SIGKILL)
    code = child.wait()
    code = code if code >= 0 else 128 - code
    _tell(b"code %d" % code)
    return code


def _die_when_closed(reader: int) -> None:
    """Have the kernel send SIGKILL to this process group when a pipe has lost its writer.

    The writer is the supervisor alone, which need not live to do anything: the pipe is asked to
    signal a change with SIGKILL (F_SETSIG of fcntl(2)), and it changes when the writer is gone.

    Args:
      reader: end of the pipe to read; as long as a process of the group has it, this holds.
    """
    with contextlib.suppress(OSError):  # not every kernel that calls itself Linux has it
        fcntl.fcntl(reader, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | fcntl.FASYNC)


def _tell(message: bytes) -> None:
    with contextlib.suppress(OSError):  # the launcher may be gone already
        os.write(_LAUNCHER_FD, message)


def _catch_signals() -> int:
    """Turn signals into bytes of a pipe, and return the end to read; ignored ones stay ignored."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for signum in _FORWARDED:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    return reader


def _serve(group: int, wake_fd: int) -> None:
    """Deliver signals to `group` until its leader ends, and do not reap the leader.

    A shell dies of SIGTERM at once, while the program it started still writes a checkpoint. So
    after a signal the whole group is waited for; it is for the launcher to lose patience.
    """
    watched = [_LAUNCHER_FD, wake_fd]
    may_answer = False
    while True:
        ended = os.waitid(os.P_PID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if ended and not (may_answer and _has_members(group)):
            return
        for fd in select.select(watched, [], [], _POLL_S if ended else None)[0]:
            received = _read(fd)
            if not received:
                watched.remove(fd)
                received = bytes([signal.SIGKILL])
            for signum in received:
                if signum != signal.SIGCHLD:
                    _signal_group(group, signum)
                    may_answer = signum != signal.SIGKILL


def _has_members(group: int) -> bool:
    """Tell if a process of `group` is there that is not a zombie."""
    processes: list[str] = []
    with contextlib.suppress(OSError):  # where that cannot be told, none is waited for
        processes = os.listdir("/proc")
    for pid in filter(str.isdigit, processes):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
            state, _, member_of = stat.read().rpartition(b")")[2].split()[:3]
            if int(member_of) == group and state not in (b"Z", b"X"):
                return True
    return False


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 64)
    except OSError:  # a launcher that was killed may reset the socket
        return b""


def _signal_group(group: int, signum: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(group, signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
