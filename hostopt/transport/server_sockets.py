"""The sockets of servers of other libraries, such as gRPC, in this process: found by their port.

While a forked child of a killed rank is alive and has them, the peers would not detect the end of
the rank, and its address would stay in use. So each child replaces them by /dev/null. It does not
close them, as gRPC in the child may still close them by number.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from hostopt.errors import ConfigError
from hostopt.process import descriptors
from hostopt.transport.addresses import is_loopback

_LOOPBACK = b"lo\0"
_MAX_DEVICE_BYTES = 16
closed_in_children: set[int] = set()  # ports of servers of this process


def confine(port: int) -> None:
    """Makes a server of this process accept connections from this machine only.

    The kernel then delivers only packets of the loopback interface to its listening sockets
    (SO_BINDTODEVICE). Connections of other machines that it has accepted before are ended. Call
    this repeatedly, as the server may accept those later that have begun before.
    """
    try:
        found = [_confine(each) for each in _sockets_at(port)]
    except OSError as error:
        descriptors.check(error)
        raise ConfigError(
            f"the server at port {port} cannot be confined to this machine: {error}. Linux 5.7 or "
            "newer allows it to any user; set insecure=True if nobody else can reach this machine"
        ) from error
    if not any(found):
        raise ConfigError(
            f"no server at port {port} is found in /proc/self/fd, so it cannot be confined to "
            "this machine. Set insecure=True if nobody else can reach this machine"
        )


def _confine(each: socket.socket) -> bool:
    """Confines a listening socket, or ends a connection from elsewhere; True if it listens."""
    if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        # without privileges a socket can be bound to a device only once
        device = each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _MAX_DEVICE_BYTES)
        if device != _LOOPBACK:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK)
        return True
    with contextlib.suppress(OSError):  # it has ended
        peer = str(each.getpeername()[0]).removeprefix("::ffff:")
        if not is_loopback(f"{peer}:0"):
            each.shutdown(socket.SHUT_RDWR)
    return False


def _sockets_at(port: int) -> Iterator[socket.socket]:
    """Yields the TCP sockets of this process that have a local port."""
    for descriptor in descriptors.open_descriptors():
        try:
            copy = os.dup(descriptor)
        except OSError:  # closed meanwhile
            continue
        try:
            each = socket.socket(fileno=copy)
        except OSError:  # another kind of file
            os.close(copy)
            continue
        with each:
            if _local_port(each) == port:
                yield each


def _local_port(end: socket.socket) -> int | None:
    is_tcp = end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM
    return int(end.getsockname()[1]) if is_tcp else None


def _close_in_child() -> None:
    if not closed_in_children:
        return
    nothing = None
    with contextlib.suppress(OSError):  # no descriptor is left, so sockets are closed below
        nothing = os.open(os.devnull, os.O_RDWR)
    for fd in descriptors.open_descriptors():
        with contextlib.suppress(OSError):  # it is not a socket, or is closed already
            end = socket.socket(fileno=fd)
            try:
                if _local_port(end) not in closed_in_children:
                    continue
            finally:
                end.detach()
            if nothing is None:
                os.close(fd)
            else:
                os.dup2(nothing, fd, inheritable=False)
    if nothing is not None:
        os.close(nothing)


os.register_at_fork(after_in_child=_close_in_child)
