"""Starts tasks on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hostopt.cluster.tf_config import RING_JOBS
from hostopt.launch.engine import Place
from hostopt.launch.environment import find_command, shares_of_cores, with_defaults
from hostopt.transport.addresses import hold_port, port_of

_SUPERVISOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_supervisor.py")


@dataclass(frozen=True)
class LocalPlace(Place):
    """A place on this machine.

    Args:
      cores: numbers of the cores to bind a rank to; empty for no binding.
      size: number of ranks that share the cores of this machine.
    """

    cores: tuple[int, ...] = ()
    size: int = 1


class LocalReservation:
    """Ports of this machine, which are held from the start."""

    def __init__(self, places: Sequence[LocalPlace]) -> None:
        self._places = places

    def poll(self) -> Sequence[Place]:
        """Returns the places."""
        return self._places


class LocalEngine:
    """Starts tasks on this machine."""

    def __init__(self, binds: bool = True) -> None:
        self._binds = binds

    @contextlib.contextmanager
    def open(self, size: int, evaluators: int, min_size: int) -> Iterator[None]:
        """Needs no preparation."""
        del size, evaluators, min_size
        yield

    @contextlib.contextmanager
    def reserve(self, slots: Sequence[int], least: int) -> Iterator[LocalReservation]:
        """Reserves a port and a share of the cores for each slot."""
        del least
        size = len(slots)
        shares = shares_of_cores(size) if self._binds and slots else [[] for _ in slots]
        with contextlib.ExitStack() as holders:
            ports = [port_of(holders.enter_context(hold_port())) for _ in slots]
            yield LocalReservation(
                [
                    LocalPlace(slot, f"127.0.0.1:{port}", cores=tuple(cores), size=size)
                    for slot, port, cores in zip(slots, ports, shares)
                ]
            )

    def start(
        self,
        place: Place,
        command: Sequence[str],
        task: tuple[str, int],
        settings: Mapping[str, str],
    ) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Starts a task."""
        assert isinstance(place, LocalPlace)
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
