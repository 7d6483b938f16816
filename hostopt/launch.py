"""Starts the processes of one cluster on this machine, and ends them together.

::

    hostopt run --- lifeline --- supervisor --- command      (one row for each task)
         `--------- lifeline --- supervisor --- command

A lifeline is a socket pair. Through it the launcher has signals delivered to the command's process
group, and both ends notice the death of the other: the launcher when a task is over, the
supervisor when the launcher was killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from hostopt.cluster import CHIEF, EVALUATOR, WORKER

__all__: list[str] = []

GRACE_S = 10.0  # from the first failure or signal to SIGTERM
KILL_S = 5.0  # from SIGTERM to SIGKILL
_DRAIN_S = 5.0  # for the last output of commands that have ended
_LINE_BYTES = 1 << 20  # a longer line is cut in pieces
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SUPERVISOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_supervisor.py")
_LOG = logging.getLogger(__name__)
_output_lock = threading.Lock()


def launch(
    command: Sequence[str], *, size: int, evaluators: int = 0, grace_s: float = GRACE_S
) -> int:
    """Run one command as every task of a cluster on this machine, and wait for all of them.

    Args:
      command: program and arguments; a first word that ends in ``.py`` is run with this Python.
      size: number of ranks: one chief and ``size - 1`` workers.
      evaluators: number of evaluators beside the ring.
      grace_s: seconds from the first failure or signal until SIGTERM; SIGKILL follows 5 s later.

    Returns:
      0 where all tasks succeed, else the exit code of the rank that failed first (of the evaluator
      that failed first, where all ranks succeed). 128 + n stands for a task that signal n ended,
      and for a run that signal n stopped.

    Raises:
      FileNotFoundError: there is no such command.
      ValueError: `size` or `evaluators` is too small, or this is not the main thread.
    """
    if size < 1 or evaluators < 0:
        raise ValueError(f"too few tasks: (size: {size}, evaluators: {evaluators})")
    command = _find_command(command)
    tasks = _list_tasks(size, evaluators)
    if "TF_CONFIG" in os.environ:
        _LOG.warning("TF_CONFIG is set; each task gets one of its own instead")
    with contextlib.ExitStack() as stack:
        wake_fd = stack.enter_context(_signals_caught())
        ports = stack.enter_context(_ports_reserved(len(tasks)))
        cluster = _cluster_of(tasks, ports)
        processes = []
        for task in tasks:
            process = _start(command, task, _environment(os.environ, cluster, task, size))
            stack.callback(process.close)
            processes.append(process)
        return _Run(processes, grace_s).wait(wake_fd)


@dataclass(eq=False)
class _Process:
    """One task: its supervisor and the threads that print what the command writes.

    Args:
      task: job and index.
      supervisor: the process that runs the command.
      lifeline: this end of the socket pair.
      pumps: the threads that copy standard output and standard error.
      group: process group of the command, once it is known.
      code: exit code of the command, once it has ended.
    """

    task: tuple[str, int]
    supervisor: subprocess.Popen[bytes]
    lifeline: socket.socket
    pumps: list[threading.Thread]
    group: int | None = None
    code: int | None = None

    @property
    def name(self) -> str:
        return "{}:{}".format(*self.task)

    def signal(self, signum: int) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.lifeline.send(bytes([signum]))

    def has_ended(self) -> bool:
        """Take one message from the lifeline, and tell if it was the end."""
        try:
            message = self.lifeline.recv(64)
        except OSError:
            message = b""
        if message:
            self.group = int(message)
            return False
        code = self.supervisor.wait()
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
        self.supervisor.wait()
        if not self.drain(_DRAIN_S):
            _LOG.warning("the output of %s is still open; its rest is dropped", self.name)


@dataclass
class _Run:
    """The processes of a cluster from start to end, and why they have to end.

    Args:
      processes: all of them, started.
      grace_s: seconds between the cause and SIGTERM.
      cause: exit code of the first rank that failed, or 128 + the signal that came before.
      evaluator_code: exit code of the first evaluator that failed.
      interrupted: whether a signal was forwarded.
      deadlines: (`time.monotonic()`, signal for those still there), soonest first.
    """

    processes: list[_Process]
    grace_s: float
    cause: int = 0
    evaluator_code: int = 0
    interrupted: bool = False
    deadlines: list[tuple[float, int]] = field(default_factory=list)

    def wait(self, wake_fd: int) -> int:
        """Wait until every process has ended, and return the exit code of the run."""
        with selectors.DefaultSelector() as selector:
            selector.register(wake_fd, selectors.EVENT_READ)
            for process in self.processes:
                selector.register(process.lifeline, selectors.EVENT_READ, process)
            while any(process.code is None for process in self.processes):
                for key, _ in selector.select(self._pause_s()):
                    if key.data is None:
                        self._forward(os.read(wake_fd, 64))
                    elif key.data.has_ended():
                        selector.unregister(key.fileobj)
                        self._note_end(key.data)
                self._enforce_deadlines()
        return self.cause or self.evaluator_code

    def _pause_s(self) -> float | None:
        return max(0.0, self.deadlines[0][0] - time.monotonic()) if self.deadlines else None

    def _note_end(self, process: _Process) -> None:
        code = process.code
        if not code or self.cause:
            return
        if process.task[0] == EVALUATOR:
            self.evaluator_code = self.evaluator_code or code
            _LOG.error("%s failed: %s; training goes on without it", process.name, _describe(code))
            return
        self.cause = code
        self._set_deadlines()
        text = "%s failed first: %s; the others have %g s to end"
        _LOG.error(text, process.name, _describe(code), self.grace_s)

    def _forward(self, signums: bytes) -> None:
        for signum in signums:
            if signum not in _FORWARDED:  # somebody else's handler
                continue
            if signum == signal.SIGINT and self.interrupted:
                _LOG.warning("interrupted again: killing all tasks")
                self._signal_all(signal.SIGKILL)
                continue
            _LOG.warning("got %s, passing it on to all tasks", signal.Signals(signum).name)
            self.interrupted = True
            self.cause = self.cause or 128 + signum
            self._signal_all(signum)
            self._set_deadlines()

    def _signal_all(self, signum: int) -> None:
        for process in self.processes:
            if process.code is None:
                process.signal(signum)

    def _set_deadlines(self) -> None:
        if not self.deadlines:
            terminate = time.monotonic() + self.grace_s
            self.deadlines = [(terminate, signal.SIGTERM), (terminate + KILL_S, signal.SIGKILL)]

    def _enforce_deadlines(self) -> None:
        while self.deadlines and self.deadlines[0][0] <= time.monotonic():
            signum = self.deadlines.pop(0)[1]
            late = [process.name for process in self.processes if process.code is None]
            if late:
                _LOG.warning("sending %s to %s", signal.Signals(signum).name, ", ".join(late))
            self._signal_all(signum)


def _describe(code: int) -> str:
    try:
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    except ValueError:
        return f"exit code {code}"


def _find_command(command: Sequence[str]) -> list[str]:
    if not command:
        raise FileNotFoundError("no command to run")
    program = command[0]
    if program.endswith(".py"):
        if not os.path.isfile(program):
            raise FileNotFoundError(f"no such script: {program!r}")
        return [sys.executable, *command]
    if shutil.which(program) is None:
        raise FileNotFoundError(f"no such command: {program!r}")
    return list(command)


def _list_tasks(size: int, evaluators: int) -> list[tuple[str, int]]:
    workers = [(WORKER, index) for index in range(size - 1)]
    return [(CHIEF, 0), *workers, *((EVALUATOR, index) for index in range(evaluators))]


def _cluster_of(tasks: list[tuple[str, int]], ports: list[int]) -> dict[str, list[str]]:
    cluster: dict[str, list[str]] = {}
    for (job, _), port in zip(tasks, ports):
        cluster.setdefault(job, []).append(f"127.0.0.1:{port}")
    return cluster


def _environment(
    base: Mapping[str, str], cluster: dict[str, list[str]], task: tuple[str, int], size: int
) -> dict[str, str]:
    """Environment of one task: `base`, TF_CONFIG, and defaults for what `base` does not set."""
    job, index = task
    threads = 1 if job == EVALUATOR else max(1, len(os.sched_getaffinity(0)) // size)
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "TF_USE_LEGACY_KERAS": "1",  # Estimator's graphs need Keras 2
    }
    config = {"cluster": cluster, "task": {"type": job, "index": index}}
    environment = {**defaults, **base, "TF_CONFIG": json.dumps(config)}
    if job == EVALUATOR:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


@contextlib.contextmanager
def _ports_reserved(count: int) -> Iterator[list[int]]:
    """Hold free loopback ports.

    A socket that is bound with SO_REUSEADDR and does not listen keeps its port away from everyone
    who asks for any free port, and still lets a server that names the port bind it and listen.
    """
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            holder = stack.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            ports.append(holder.getsockname()[1])
        yield ports


@contextlib.contextmanager
def _signals_caught() -> Iterator[int]:
    """Turn signals into bytes of a pipe, and give the end to read; ignored ones stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("launch() handles signals, so call it from the main thread")
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handlers = {
        signum: signal.signal(signum, lambda *_: None)
        for signum in _FORWARDED
        if signal.getsignal(signum) is not signal.SIG_IGN
    }
    try:
        yield reader
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(wakeup_fd)
        os.close(reader)
        os.close(writer)


def _start(command: list[str], task: tuple[str, int], environment: dict[str, str]) -> _Process:
    ours, theirs = socket.socketpair()
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
    process = _Process(task, supervisor, ours, [])
    for pipe, fd in ((supervisor.stdout, 1), (supervisor.stderr, 2)):
        arguments = (pipe, fd, f"[{process.name}] ".encode())
        process.pumps.append(threading.Thread(target=_pump, args=arguments, daemon=True))
        process.pumps[-1].start()
    return process


def _pump(pipe: IO[bytes], fd: int, prefix: bytes) -> None:
    """Copy `pipe` to `fd` line by line, each with `prefix`, until all writers are gone."""
    with pipe:
        for line in iter(lambda: pipe.readline(_LINE_BYTES), b""):
            with _output_lock, contextlib.suppress(OSError):  # unread output must not stop a rank
                _write(fd, prefix + line.rstrip(b"\n") + b"\n")


def _write(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])
