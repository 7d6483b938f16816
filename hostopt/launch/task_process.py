"""One task of a cluster: its supervisor, its lifeline and its output."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from hostopt.launch import output
from hostopt.launch.engine import Supervisor
from hostopt.launch.output import QueuedWriter

_DRAIN_TIMEOUT_S = 5.0  # for the last output of a task that has ended
_FIRST_DRAIN_TIMEOUT_S = 0.5
_END_TIMEOUT_S = 2.0  # for a supervisor to kill its command
_LINE_BYTES = 1 << 20  # a longer line is split
_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class TaskProcess:
    """A started task."""

    task: tuple[str, int]
    supervisor: Supervisor
    lifeline: socket.socket
    pumps: list[threading.Thread]
    report: str = ""  # path of the file for the error that ends the command
    slot: int | None = None  # of a rank
    group: int | None = None
    code: int | None = None
    forced: bool = False  # the launcher signalled it because its grace period was over
    _reported_code: int | None = None  # exit code of the command, as the supervisor sent it
    _is_killed: bool = False

    @property
    def name(self) -> str:
        """``type:index``, for logs."""
        return "{}:{}".format(*self.task)

    def signal(self, signum: int) -> None:
        """Delivers a signal to all processes of the command, through the supervisor.

        A stopped supervisor does not deliver signals. So the second SIGKILL kills the supervisor,
        and the kernel then kills the command.
        """
        if signum == signal.SIGKILL and self._is_killed:
            self.supervisor.kill()
        self._is_killed = self._is_killed or signum == signal.SIGKILL
        with contextlib.suppress(OSError):  # the task has ended
            self.lifeline.send(bytes([signum]))

    def has_ended(self) -> bool:
        """Reads one message from the lifeline, and returns True at the end of the task."""
        try:
            kind, _, number = self.lifeline.recv(64).partition(b" ")
        except OSError:
            kind = b""
        if kind == b"group":
            self.group = int(number)
        elif kind == b"code":
            self._reported_code = int(number)
        if kind:
            return False
        code = self.supervisor.wait()
        if self._reported_code is not None:
            code = self._reported_code
        elif code == 0:  # killed before it could report, and reaped by other code of this process
            code = -signal.SIGKILL
        self.code = code if code >= 0 else 128 - code
        if code < 0 and self.group is not None:  # the supervisor was killed
            with contextlib.suppress(OSError):
                os.killpg(self.group, signal.SIGKILL)
        self.drain(_FIRST_DRAIN_TIMEOUT_S)  # shows its last lines before what the launcher logs
        return True

    def drain(self, timeout_s: float) -> bool:
        """Waits for the pumps, and returns True if all output was copied."""
        deadline = time.monotonic() + timeout_s
        for pump in self.pumps:
            pump.join(max(0.0, deadline - time.monotonic()))
        return not any(pump.is_alive() for pump in self.pumps)

    def close(self) -> None:
        """Kills the command if it still runs, and waits for the rest of its output."""
        self.lifeline.close()
        try:
            self.supervisor.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.supervisor.kill()
            self.supervisor.wait()
        if not self.drain(_DRAIN_TIMEOUT_S):
            _LOG.warning("the output of %s is still open; the rest of it is dropped", self.name)


def attend(
    task: tuple[str, int],
    supervisor: Supervisor,
    lifeline: socket.socket,
    log_file: str | None,
    shows: Callable[[bytes], bool] | None,
) -> TaskProcess:
    """Copies the output of a task that has started."""
    process = TaskProcess(task, supervisor, lifeline, [])
    prefix = f"[{process.name}] ".encode()
    is_terminal = os.isatty(1) and os.isatty(2)  # the same, which one writer can draw on
    for arguments in (
        (supervisor.stdout, output.ERR if is_terminal else output.OUT, prefix, log_file, None),
        (supervisor.stderr, output.ERR, prefix, log_file, shows),
    ):
        process.pumps.append(threading.Thread(target=_pump, args=arguments, daemon=True))
        process.pumps[-1].start()
    return process


def _pump(
    pipe: IO[bytes],
    writer: QueuedWriter,
    prefix: bytes,
    log_file: str | None,
    shows: Callable[[bytes], bool] | None,
) -> None:
    """Copies `pipe` to `writer` line by line, each with `prefix`, until all writers are gone."""
    with pipe, contextlib.ExitStack() as stack:
        log = None
        if log_file is not None:
            try:
                log = stack.enter_context(open(log_file, "ab", buffering=0))
            except OSError as error:
                _LOG.warning("no log of %s is written: %s", prefix.decode().strip(), error)
        for text in iter(lambda: pipe.readline(_LINE_BYTES), b""):
            line = text.rstrip(b"\n") + b"\n"
            if log is not None:
                with contextlib.suppress(OSError):  # a full disk
                    log.write(line)
            if shows is None or shows(line):
                writer.write(prefix + line)
