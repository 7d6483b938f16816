"""Sockets of a rank in forked children."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
from collections.abc import Callable

import pytest

from hostopt.process import descriptors
from hostopt.transport import server_sockets


def in_child(look: Callable[[], bool]) -> bool:
    """Returns the result of a function in a forked child."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(11 if look() else 10)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (10, 11), f"the child ended with exit code {code}"
    return code == 11


def is_socket(end: socket.socket) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(end.fileno()).st_mode)
    except OSError:  # it is closed
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_server_and_accepted_connections_are_closed(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as caller,
        server.accept()[0] as accepted,
        socket.create_server((host, 0), family=family) as of_the_user,
        socket.socket(socket.AF_UNIX) as local,
    ):
        port = server.getsockname()[1]
        others = (caller, of_the_user, local)
        server_sockets.closed_in_children.add(port)
        try:
            assert in_child(lambda: not is_socket(server) and not is_socket(accepted))
            assert in_child(lambda: all(map(is_socket, others)))
            assert in_child(lambda: not os.get_inheritable(server.fileno()))
        finally:
            server_sockets.closed_in_children.discard(port)
        assert in_child(lambda: is_socket(server) and is_socket(accepted))
        caller.sendall(b"still here")  # nothing was shut down
        assert accepted.recv(10) == b"still here"


def test_sockets_are_closed_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_OPEN", "/nothing/here")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as other:
        port = server.getsockname()[1]
        server_sockets.closed_in_children.add(port)
        try:
            assert in_child(lambda: not is_socket(server) and is_socket(other))
        finally:
            server_sockets.closed_in_children.discard(port)


def test_sockets_are_closed_without_free_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket() as other,
        contextlib.ExitStack() as stack,
    ):
        port = server.getsockname()[1]
        server_sockets.closed_in_children.add(port)
        stack.callback(server_sockets.closed_in_children.discard, port)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        most = max(server.fileno(), other.fileno()) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(other.fileno()))
        assert in_child(lambda: not is_socket(server) and is_socket(other))
        assert is_socket(server)
