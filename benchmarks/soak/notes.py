"""Messages from the processes of a soak: over sockets, because faults may damage files."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

VARIABLE = "SOAK_NOTES"  # name of the socket; all processes of a training inherit it
_MESSAGE_BYTES = 1 << 16


def _address(*names: object) -> str:
    """Returns the address of an abstract socket, which needs no file and ends with its process."""
    return "\0" + "-".join(map(str, names))


# --- in the processes of the training -----------------------------------------------------------


class Notes:
    """Sends events of this process to the soak.

    Args:
      role: role of this process, such as ``worker:0``.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(_address(os.environ[VARIABLE]))

    def add(self, kind: str, **attributes: Any) -> None:
        """Sends an event immediately, because this process may be killed at any time.

        Raises:
          ConnectionRefusedError: the soak has ended, so this training may end.
        """
        note = {
            "kind": kind,
            "time": time.time(),
            "role": self.role,
            "pid": os.getpid(),
            **attributes,
        }
        self._socket.send(json.dumps(note).encode())


def listen(do: Callable[[str], None]) -> None:
    """Calls `do` in a thread with each fault that the soak requests from this process."""
    requests = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    requests.bind(_address(os.environ[VARIABLE], os.getpid()))

    def serve() -> None:
        while True:
            do(requests.recv(_MESSAGE_BYTES).decode())

    threading.Thread(target=serve, name="faults", daemon=True).start()


# --- in the soak --------------------------------------------------------------------------------


class Journal:
    """Events of all processes of one training; `starts` has the last start of each role."""

    def __init__(self) -> None:
        self.name = f"hostopt-soak-{secrets.token_hex(8)}"
        self.starts: dict[str, dict[str, Any]] = {}
        self._notes: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_address(self.name))
        threading.Thread(target=self._receive, daemon=True).start()

    def read(self) -> list[dict[str, Any]]:
        """Returns the events since `begin_chapter`, in the order of their times."""
        with self._lock:
            return sorted(self._notes, key=lambda note: note["time"])

    def begin_chapter(self) -> list[dict[str, Any]]:
        """Returns the events so far, and keeps only the last step."""
        with self._lock:
            notes = sorted(self._notes, key=lambda note: note["time"])
            self._notes = [note for note in notes if note["kind"] == "step"][-1:]
        return notes

    def ask(self, pid: int, fault: str) -> None:
        """Requests a fault from a process."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
            asking.sendto(fault.encode(), _address(self.name, pid))

    def close(self) -> None:
        """Closes the socket; processes that still send get an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self) -> None:
        while True:
            try:
                message = self._socket.recv(_MESSAGE_BYTES)
            except OSError:
                return
            if not message:  # it was shut down
                return
            note = json.loads(message)
            with self._lock:
                self._notes.append(note)
                if note["kind"] == "start":
                    self.starts[note["role"]] = note
