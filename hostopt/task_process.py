"""One task of a cluster on this machine: its supervisor, its lifeline and its output."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import IO

from hostopt import output
from hostopt.output import Outlet

__all__: list[str] = []

_DRAIN_S = 5.0  # for the last output of commands that have ended
_LINE_BYTES = 1 << 20  # a longer line is cut in pieces
_SUPERVISOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_supervisor.py")
_END_S = 2.0  # for a supervisor to end its command at once
_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class TaskProcess:
    """A task that was started.

    Args:
      task: job and index.
      supervisor: the process that runs the command.
      lifeline: this end of the socket pair.
      pumps: the threads that copy standard output and standard error.
      report: file in which the command may leave the cause of its end.
      group: process group of the command, once it is known.
      code: exit code of the command, once it has ended.
      forced: whether the launcher lost its patience with it.
    """

    task: tuple[str, int]
    supervisor: subprocess.Popen[bytes]
    lifeline: socket.socket
    pumps: list[threading.Thread]
    report: str = ""
    group: int | None = None
    code: int | None = None
    forced: bool = False
    _told: int | None = None  # exit code of the command, as the supervisor says
    _is_killed: bool = False

    @property
    def name(self) -> str:
        """``type:index``, as logs show it."""
        return "{}:{}".format(*self.task)

    def signal(self, signum: int) -> None:
        """Have a signal delivered to all processes of the command.

        The second SIGKILL goes to the supervisor, of which the command dies: it may be stopped.
        """
        if signum == signal.SIGKILL and self._is_killed:
            self.supervisor.kill()
        self._is_killed = self._is_killed or signum == signal.SIGKILL
        with contextlib.suppress(OSError):  # it has ended
            self.lifeline.send(bytes([signum]))

    def has_ended(self) -> bool:
        """Take one message from the lifeline, and tell if it was the end."""
        try:
            kind, _, number = self.lifeline.recv(64).partition(b" ")
        except OSError:
            kind = b""
        if kind == b"group":
            self.group = int(number)
        elif kind == b"code":
            self._told = int(number)
        if kind:
            return False
        code = self.supervisor.wait()
        if self._told is not None:
            code = self._told
        elif code == 0:  # it did not get to tell, and somebody else has waited for it
            code = -signal.SIGKILL
        self.code = code if code >= 0 else 128 - code
        if code < 0 and self.group is not None:  # somebody killed the supervisor
            with contextlib.suppress(OSError):
                os.killpg(self.group, signal.SIGKILL)
        self.drain(0.5)  # so that its last words come before ours
        return True

    def drain(self, timeout_s: float) -> bool:
        """Wait for the pumps, and tell if they are done."""
        deadline = time.monotonic() + timeout_s
        for pump in self.pumps:
            pump.join(max(0.0, deadline - time.monotonic()))
        return not any(pump.is_alive() for pump in self.pumps)

    def close(self) -> None:
        """Kill the command if it still runs, and wait for the last of its output."""
        self.lifeline.close()
        try:
            self.supervisor.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.supervisor.kill()
            self.supervisor.wait()
        if not self.drain(_DRAIN_S):
            _LOG.warning("the output of %s is still open; its rest is dropped", self.name)


def start(command: list[str], task: tuple[str, int], environment: dict[str, str]) -> TaskProcess:
    """Start one task.

    Args:
      command: program and arguments.
      task: job and index.
      environment: of the command.

    Returns:
      The task, which runs until it ends or is closed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", _SUPERVISOR, *command],
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the launcher alone
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    process = TaskProcess(task, supervisor, ours, [])
    for pipe, outlet in ((supervisor.stdout, output.OUT), (supervisor.stderr, output.ERR)):
        arguments = (pipe, outlet, f"[{process.name}] ".encode())
        process.pumps.append(threading.Thread(target=_pump, args=arguments, daemon=True))
        process.pumps[-1].start()
    return process


def _pump(pipe: IO[bytes], outlet: Outlet, prefix: bytes) -> None:
    """Copy `pipe` to `outlet` line by line, each with `prefix`, until all writers are gone."""
    with pipe:
        for line in iter(lambda: pipe.readline(_LINE_BYTES), b""):
            outlet.write(prefix + line.rstrip(b"\n") + b"\n")
