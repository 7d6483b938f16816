"""Children that are forked and start no program do not keep a rank's server open.

A connection lives as long as any process has its socket, so peers would not see a killed rank die
while a child of it lives, and its address would stay in use. Each child puts /dev/null in the
place of these sockets at once: gRPC in the child may still close them by number.
"""

from __future__ import annotations

import contextlib
import os
import socket

from hostopt.descriptors import open_descriptors

__all__: list[str] = []

_ports: set[int] = set()  # where servers of this process listen


def keep_from_children(port: int) -> None:
    """Have children close the server on a port and the connections that it has accepted.

    Args:
      port: of this process, until `forget`.
    """
    _ports.add(port)


def forget(port: int) -> None:
    """Undo `keep_from_children`.

    Args:
      port: where no server listens any more.
    """
    _ports.discard(port)


def _close_in_child() -> None:
    if not _ports:
        return
    nothing = None
    with contextlib.suppress(OSError):  # no descriptor is left: sockets are closed instead
        nothing = os.open(os.devnull, os.O_RDWR)
    for fd in open_descriptors():
        with contextlib.suppress(OSError):  # no socket, or it is closed
            if _local_port(fd) not in _ports:
                continue
            if nothing is None:
                os.close(fd)
            else:
                os.dup2(nothing, fd, inheritable=False)
    if nothing is not None:
        os.close(nothing)


def _local_port(fd: int) -> int | None:
    """Port of this end of a TCP socket; None of another one."""
    end = socket.socket(fileno=fd)
    try:
        is_tcp = end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM
        return int(end.getsockname()[1]) if is_tcp else None
    finally:
        end.detach()


os.register_at_fork(after_in_child=_close_in_child)
