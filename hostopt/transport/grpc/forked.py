"""Closes the sockets of a rank's server in forked children.

A connection stays open as long as any process has its socket. While a forked child of a killed
rank is alive, the peers would not detect the end of the rank, and its address would stay in use.
So each child replaces these sockets by /dev/null after the fork. It does not close them, as gRPC
in the child may still close them by number.
"""

from __future__ import annotations

import contextlib
import os
import socket

from hostopt.process.descriptors import open_descriptors

_ports: set[int] = set()  # ports of the servers of this process


def keep_from_children(port: int) -> None:
    """Makes forked children close the server at a port of this process, until `forget`."""
    _ports.add(port)


def forget(port: int) -> None:
    """Reverts `keep_from_children`."""
    _ports.discard(port)


def _close_in_child() -> None:
    if not _ports:
        return
    nothing = None
    with contextlib.suppress(OSError):  # no descriptor is left, so sockets are closed below
        nothing = os.open(os.devnull, os.O_RDWR)
    for fd in open_descriptors():
        with contextlib.suppress(OSError):  # it is not a socket, or is closed already
            if _local_port(fd) not in _ports:
                continue
            if nothing is None:
                os.close(fd)
            else:
                os.dup2(nothing, fd, inheritable=False)
    if nothing is not None:
        os.close(nothing)


def _local_port(fd: int) -> int | None:
    end = socket.socket(fileno=fd)
    try:
        is_tcp = end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM
        return int(end.getsockname()[1]) if is_tcp else None
    finally:
        end.detach()


os.register_at_fork(after_in_child=_close_in_child)
