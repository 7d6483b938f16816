"""Runs one command in a new session, and leaves no process behind.

`hostopt.launch.task_process` executes this file by its path, as ``python -I -S _supervisor.py
cores command args``, so it loads neither hostopt nor its dependencies. Standard input is a socket
to the launcher. The supervisor sends the command's process group and its exit code; the launcher
sends one byte for each signal to deliver. End of file means that the launcher is gone, and the
supervisor kills the command. If the supervisor itself is killed, the kernel kills the command's
process group.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys

_LAUNCHER_FD = 0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CANNOT_START = 2
_POLL_S = 0.05  # between checks of a group that has lost its leader


def main(cores: str, *command: str) -> int:
    """Runs `command` to its end."""
    wake_fd = _catch_signals()
    if cores:
        with contextlib.suppress(OSError):  # a core has been taken away meanwhile
            os.sched_setaffinity(0, map(int, cores.split(",")))
    reader, _ = os.pipe()  # this process holds the other end as long as it lives
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
    _send(b"group %d" % child.pid)
    _serve(child.pid, wake_fd)
    # The leader is not reaped yet, so no other group can have its number.
    _signal_group(child.pid, signal.SIGKILL)
    code = child.wait()
    code = code if code >= 0 else 128 - code
    _send(b"code %d" % code)
    return code


def _die_when_closed(reader: int) -> None:
    """Makes the kernel send SIGKILL to this process group when a pipe loses its writer.

    Only the supervisor holds the writing end, so the kernel closes it however the supervisor dies.
    That is a change of the pipe, which is signalled with SIGKILL (F_SETSIG of fcntl(2)). The
    request holds while a process of the group has the reading end open.
    """
    with contextlib.suppress(OSError):  # some emulations of Linux do not support it
        fcntl.fcntl(reader, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | fcntl.FASYNC)


def _send(message: bytes) -> None:
    with contextlib.suppress(OSError):  # the launcher may be gone already
        os.write(_LAUNCHER_FD, message)


def _catch_signals() -> int:
    """Turns signals into bytes of a pipe, and returns its reading end.

    Ignored signals stay ignored.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for signum in _FORWARDED:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    return reader


def _serve(group: int, wake_fd: int) -> None:
    """Delivers signals to `group` until its leader ends. Does not reap the leader.

    A shell dies of SIGTERM at once, while the program that it started still writes a checkpoint.
    So after a signal this waits for the whole group; the launcher enforces the grace period.
    """
    watched = [_LAUNCHER_FD, wake_fd]
    is_handling = False  # the group may still be handling a signal
    while True:
        ended = os.waitid(os.P_PID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if ended and not (is_handling and _has_members(group)):
            return
        for fd in select.select(watched, [], [], _POLL_S if ended else None)[0]:
            try:
                received = os.read(fd, 64)
            except OSError:  # a killed launcher may reset the socket
                received = b""
            if not received:
                watched.remove(fd)
                received = bytes([signal.SIGKILL])
            for signum in received:
                if signum != signal.SIGCHLD:
                    _signal_group(group, signum)
                    is_handling = signum != signal.SIGKILL


def _has_members(group: int) -> bool:
    processes: list[str] = []
    with contextlib.suppress(OSError):  # without /proc there is no waiting
        processes = os.listdir("/proc")
    for pid in filter(str.isdigit, processes):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
            state, _, member_of = stat.read().rpartition(b")")[2].split()[:3]
            if int(member_of) == group and state not in (b"Z", b"X"):
                return True
    return False


def _signal_group(group: int, signum: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(group, signum)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
