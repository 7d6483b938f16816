"""The seam between the launcher and the machines on which it starts tasks.

An engine has slots, 0 to N-1 for ranks, and N and above for evaluators and data workers. It
reserves a place for each slot of an attempt, and starts a task at a place::

    launcher --- Engine.reserve(slots) --> Reservation.poll() --> places, with their addresses
        `------- Engine.start(place, ...) --> supervisor and lifeline
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol


@dataclass(frozen=True)
class Place:
    """A place for one task.

    Args:
      address: ``host:port`` for TF_CONFIG; the port is held for the task.
      node: name of the machine for logs; empty for this machine.
    """

    slot: int
    address: str
    node: str = ""


class Supervisor(Protocol):
    """The process that runs a command, on this machine or on another one."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """Standard output of the command."""

    @property
    def stderr(self) -> IO[bytes] | None:
        """Standard error of the command."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end, and returns its exit code; -n if signal n ended it.

        Raises:
          subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """

    def kill(self) -> None:
        """Kills it, and its command with it."""


class Reservation(Protocol):
    """Places for the slots of an attempt, which it may take time to find."""

    def poll(self) -> Sequence[Place] | None:
        """Returns the places in the order of their slots; None if they are not ready yet.

        A later call replaces places that have been lost meanwhile.

        Raises:
          OSError: no place can be made on this machine.
          ResourceError: there are too few places.
        """


class Engine(Protocol):
    """Starts tasks on one kind of machines."""

    def open(
        self, size: int, evaluators: int, min_size: int
    ) -> contextlib.AbstractContextManager[None]:
        """Connects to the machines for the time of a run.

        Args:
          min_size: smallest number of ranks to run with.
        """

    def reserve(
        self, slots: Sequence[int], least: int
    ) -> contextlib.AbstractContextManager[Reservation]:
        """Reserves places until the context ends.

        Args:
          slots: the slots that want a place.
          least: smallest number of places to be content with.
        """

    def start(
        self,
        place: Place,
        command: Sequence[str],
        task: tuple[str, int],
        settings: Mapping[str, str],
    ) -> tuple[Supervisor, socket.socket]:
        """Starts a task.

        Args:
          command: program and arguments; a program that ends in ``.py`` is run with the Python
            of the machine.
          settings: environment variables of the task, besides those of the launcher.

        Returns:
          The supervisor, and the launcher's end of the lifeline.

        Raises:
          OSError: the task cannot be started on this machine.
        """
