"""The seam between the launcher and the machines on which it starts tasks, and this machine.

An engine has slots, 0 to N-1 for ranks, and N and above for evaluators and data workers. It
reserves a place for each slot of an attempt, and starts a task at a place.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from hostopt.cluster.tf_config import RING_JOBS
from hostopt.launch.environment import find_command, shares_of_cores, with_defaults
from hostopt.transport.addresses import hold_port, port_of

_SUPERVISOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_supervisor.py")


TaskId = tuple[str, int]  # job and index
Settings = Mapping[str, str]  # environment variables of a task, besides those of the launcher


@dataclass(frozen=True)
class Place:
    """A place for one task."""

    slot: int
    address: str  # ``host:port`` for TF_CONFIG; the port is held for the task
    node: str = ""  # name of the machine for logs; empty for this machine
    cores: tuple[int, ...] = ()  # of this machine to bind a rank to; empty for no binding
    size: int = 1  # number of ranks that share the cores of this machine


Poll = Callable[[], "Sequence[Place] | None"]


class Supervisor(Protocol):
    """The process that runs a command, on this machine or on another one."""

    stdout: IO[bytes] | None  # of the command
    stderr: IO[bytes] | None

    def wait(self, timeout: float | None = None) -> int:
        """Waits like `Popen.wait`, and returns its exit code; -n if signal n ended it."""

    def kill(self) -> None:
        """Kills it, and its command with it."""


class Engine(Protocol):
    """Starts tasks on one kind of machines."""

    def open(
        self, size: int, evaluators: int, min_size: int
    ) -> contextlib.AbstractContextManager[None]:
        """Connects to the machines for the time of a run of at least `min_size` ranks."""

    def reserve(self, slots: Sequence[int], least: int) -> contextlib.AbstractContextManager[Poll]:
        """Reserves a place for each slot, or for at least `least` of them, until the context ends.

        The function that it yields returns the places in the order of their slots, or None while
        they are not ready. A later call replaces places that have been lost meanwhile. It raises
        OSError if no place can be made on this machine, and ResourceError if there are too few.
        """

    def start(
        self, place: Place, command: Sequence[str], task: TaskId, settings: Settings
    ) -> tuple[Supervisor, socket.socket]:
        """Returns the supervisor of a task that it starts, and the launcher's end of its lifeline.

        A program that ends in ``.py`` is run with the Python of the machine. OSError means that
        the task cannot be started on this machine.
        """


class LocalEngine:
    """Starts tasks on this machine."""

    def __init__(self, binds: bool = True) -> None:
        self._binds = binds

    @contextlib.contextmanager
    def open(self, size: int, evaluators: int, min_size: int) -> Iterator[None]:
        """Needs no preparation."""
        yield

    @contextlib.contextmanager
    def reserve(self, slots: Sequence[int], least: int) -> Iterator[Poll]:
        """Reserves a port and a share of the cores for each slot."""
        size = len(slots)
        shares = shares_of_cores(size) if self._binds and slots else [[] for _ in slots]
        with contextlib.ExitStack() as holders:
            ports = [port_of(holders.enter_context(hold_port())) for _ in slots]
            places = [
                Place(slot, f"127.0.0.1:{port}", cores=tuple(cores), size=size)
                for slot, port, cores in zip(slots, ports, shares)
            ]
            yield lambda: places

    def start(
        self, place: Place, command: Sequence[str], task: TaskId, settings: Settings
    ) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Starts a task."""
        environment = with_defaults({**os.environ, **settings}, task[0], place.size)
        cores = place.cores if task[0] in RING_JOBS else ()
        return supervise(find_command(command), environment, cores)


def supervise(
    command: Sequence[str], environment: Mapping[str, str], cores: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a command under a supervisor."""
    lifeline, supervisor_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", _SUPERVISOR, ",".join(map(str, cores)), *command],
            stdin=supervisor_end.fileno(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only the launcher
        )
    except BaseException:
        lifeline.close()
        raise
    finally:
        supervisor_end.close()
    return supervisor, lifeline
