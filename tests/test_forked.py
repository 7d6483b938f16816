"""Children that are forked: which sockets of a rank they keep."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable

import pytest

from hostopt.transport import forked


def in_child(look: Callable[[], bool]) -> bool:
    """What a function finds in a forked child."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if look() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def is_socket(end: socket.socket) -> bool:
    return stat.S_ISSOCK(os.fstat(end.fileno()).st_mode)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_server_and_what_it_has_accepted_are_closed(host: str) -> None:
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
        forked.keep_from_children(port)
        try:
            assert in_child(lambda: not is_socket(server) and not is_socket(accepted))
            assert in_child(lambda: all(map(is_socket, others)))
            assert in_child(lambda: not os.get_inheritable(server.fileno()))
        finally:
            forked.forget(port)
        assert in_child(lambda: is_socket(server) and is_socket(accepted))
        caller.sendall(b"still here")  # nothing was shut down
        assert accepted.recv(10) == b"still here"
