"""Data sockets for tests: connected pairs, and bytes that an attacker would send."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

from harness import DEADLINE_S, deadline_s

from hostopt.transport.tcp.data_socket import DataSocket

Result = TypeVar("Result")


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine on a new event loop; fails the test if it does not end."""
    return asyncio.run(asyncio.wait_for(coroutine, deadline_s(DEADLINE_S)))


def connected_pair() -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        second, _ = listener.accept()
    return first, second


def data_sockets() -> tuple[DataSocket, DataSocket]:
    """Returns both ends of a connection as data sockets, on the running event loop."""
    first, second = connected_pair()
    return DataSocket(first), DataSocket(second)
