"""Processes, addresses and deadlines of tests."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "programs"
# Environment of a process that imports TensorFlow.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1", "PYTHONUNBUFFERED": "1"}
# Task and output of the processes of the current test; `failed_ranks` prints them if it fails.
LOGS: list[tuple[str, Path]] = []


# --- deadlines --------------------------------------------------------------------------------

# Ends a test that would hang, on an idle machine; no result depends on it.
DEADLINE_S = 30.0


def load_factor() -> float:
    """1 on an idle machine, 2 with one runnable process per processor, and so on."""
    return 1.0 + os.getloadavg()[0] / (os.cpu_count() or 1)


def deadline_s(seconds: float) -> float:
    """Scales a deadline of an idle machine by the load, so that a busy one fails no test."""
    return seconds * load_factor()


def until(condition: Callable[[], object], name: str, limit_s: float = 15.0) -> None:
    """Polls a condition until it holds, or the time limit of an idle machine is over."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < deadline_s(limit_s), f"no {name} within {limit_s} s"
        time.sleep(0.01)


# --- addresses --------------------------------------------------------------------------------


@contextmanager
def reserved_addresses(count: int) -> Iterator[list[str]]:
    """Loopback addresses that nobody else gets, and on which a gRPC server can listen."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for holder in sockets:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
        yield [f"127.0.0.1:{holder.getsockname()[1]}" for holder in sockets]
    finally:
        for holder in sockets:
            holder.close()


def split_address(address: str) -> tuple[str, int]:
    """Host and port, as sockets take them."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def listens(address: str) -> bool:
    """True if a server listens at `address`."""
    with socket.socket() as caller:
        return caller.connect_ex(split_address(address)) == 0


def jobs_of(addresses: list[str]) -> dict[str, list[str]]:
    """The "cluster" of TF_CONFIG: rank 0 is the chief, the others are workers."""
    return {"chief": addresses[:1], "worker": addresses[1:]}


def task_of(rank: int) -> tuple[str, int]:
    """Task type and index of a rank of `jobs_of`."""
    return ("chief", 0) if rank == 0 else ("worker", rank - 1)


# --- processes --------------------------------------------------------------------------------


class Process(subprocess.Popen):
    """A process whose deadlines, those of an idle machine, grow with the load."""

    def wait(self, timeout: float | None = None) -> int:
        return super().wait(None if timeout is None else deadline_s(timeout))

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        return super().communicate(input, None if timeout is None else deadline_s(timeout))

    def ended_with(self, code: int = 0, limit_s: float = 30.0) -> tuple[Any, Any]:
        """Waits for its end, with that exit code; returns its standard output and error."""
        out, err = self.communicate(timeout=limit_s)
        assert self.returncode == code, f"{self.returncode}:\n{out}{err}"
        return out, err


def start_python(
    *arguments: object, ranks: int = 0, without: str = "", cwd: Path | None = None, **environ: str
) -> Process:
    """Starts Python, or several ranks of it that `hostopt run` starts.

    Args:
      ranks: number of ranks; 0 starts Python itself.
      without: regular expression of the names of variables that it does not inherit.
    """
    inherited = {k: v for k, v in os.environ.items() if not (without and re.match(without, k))}
    command = [sys.executable, *map(str, arguments)]
    if ranks:
        command = [sys.executable, "-m", "hostopt", "run", "-np", str(ranks), "--", *command]
    return Process(
        command,
        cwd=cwd,
        env={**inherited, **QUIET, "PYTHONPATH": str(ROOT), **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(
    *arguments: object, code: int | None = 0, limit_s: float = 200.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs what `start_python` starts with the same options, to the end.

    Args:
      code: exit code that it must have; None for any.
    """
    with start_python(*arguments, **options) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        finally:
            process.kill()
    assert code in (None, process.returncode), f"{process.returncode}:\n{out}{err}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def python(code: str) -> list[str]:
    """The command that runs `code`, which may be indented."""
    return [sys.executable, "-c", textwrap.dedent(code)]


def is_gone(pid: int) -> bool:
    """True if the process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def default_signals(signums: Any = (signal.SIGINT,)) -> Iterator[None]:
    """Scope in which started processes do not inherit that signals are ignored.

    A shell starts background jobs with SIGINT ignored.
    """
    previous = {
        signum: signal.signal(signum, signal.SIG_DFL)
        for signum in signums
        if signal.getsignal(signum) is signal.SIG_IGN
    }
    yield
    for signum, handler in previous.items():
        signal.signal(signum, handler)
