"""Addresses of ranks: where they listen, held ports, and whether a server answers there."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable

from hostopt.cluster.cluster import Cluster
from hostopt.process import descriptors

# RFC 9113: a client begins with this text and its SETTINGS, which may be empty. The server answers
# with its own, before any call.
_HEADER_BYTES = 9
_SETTINGS = 4  # type of the frame, the fourth byte of its header
_ANSWER_S, _POLL_S = 1.0, 0.5  # of `wait_for`
_SIOCGIFADDR, _IFREQ = 0x8915, struct.Struct("16s4x4s16x")  # of Linux, for an IPv4 address
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])


def listen_address(address: str) -> str:
    """Returns the one numeric address that a rank listens at.

    A rank with a loopback address listens on loopback only, any other rank on every interface.
    With two addresses (::1 and 127.0.0.1) a second process could take one of them.
    """
    host, port = host_and_port(address)
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, sockaddr = min(infos, key=lambda info: info[0] != socket.AF_INET)
    ip = str(sockaddr[0])
    if not is_loopback(address):
        ip = "::" if family == socket.AF_INET6 else "0.0.0.0"
    return f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """Keeps a free port of this machine for a rank until the socket is closed.

    The socket is bound to the address that the rank will listen at, with SO_REUSEADDR, but does
    not listen. Programs that ask for any free port get another one, and a server that names this
    one can still listen there.
    """
    ip, _ = host_and_port(listen_address(f"{host}:0"))
    holder = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((ip, 0))
    except OSError:
        holder.close()
        raise
    return holder


def port_of(holder: socket.socket) -> int:
    """Returns the port that a socket is bound to."""
    return int(holder.getsockname()[1])


def is_loopback(address: str) -> bool:
    """Returns True if an address is written as a loopback address."""
    host, _ = host_and_port(address)
    # some systems resolve their own name to a loopback address, so of names only localhost counts
    return host == "localhost" or (not is_name(address) and ipaddress.ip_address(host).is_loopback)


def is_local(cluster: Cluster) -> bool:
    """Returns True if the addresses of all ranks are written as loopback addresses."""
    return all(is_loopback(task.address) for task in cluster.ring)


def is_name(address: str) -> bool:
    """Returns True if the host of an address has to be looked up, and so may change."""
    host, _ = host_and_port(address)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


def host_and_port(address: str) -> tuple[str, int]:
    """Splits an address into the host, without brackets, and the port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def address_of_interface(name: str) -> str:
    """Returns the IPv4 address of a network interface of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        socket.if_nametoindex(name)  # the request cuts a long name
        answer = fcntl.ioctl(end, _SIOCGIFADDR, _IFREQ.pack(os.fsencode(name), b""))
    return socket.inet_ntoa(_IFREQ.unpack(answer)[1])


def listens(address: str, timeout_s: float) -> bool:
    """Returns True if a process listens at an address, even if it is frozen."""
    try:
        socket.create_connection(host_and_port(address), timeout_s).close()
    except OSError as error:
        descriptors.check(error)
        return False
    return True


def greets(address: str, timeout_s: float) -> bool:
    """Returns True if a server of HTTP/2 answers.

    The kernel connects to a frozen process as well, so this waits for the server's first frame.
    """
    try:
        with socket.create_connection(host_and_port(address), timeout_s) as connection:
            connection.sendall(_GREETING)
            header = connection.recv(_HEADER_BYTES, socket.MSG_WAITALL)
    except OSError as error:
        descriptors.check(error)
        return False
    return header[3:4] == bytes([_SETTINGS])


async def is_silent(address: str, timeout_s: float) -> bool:
    """Returns True if a process is frozen, or its host or link is silent.

    The kernel refuses or ends a connection to a process that is gone. This works while the
    interpreter exits, when no thread can be started, unless a host name has to be looked up.
    """
    try:
        opening = asyncio.open_connection(*host_and_port(address))
        reader, writer = await asyncio.wait_for(opening, timeout_s)
        with contextlib.closing(writer):
            writer.write(_GREETING)
            await asyncio.wait_for(reader.read(_HEADER_BYTES), timeout_s)
    except (asyncio.TimeoutError, TimeoutError):  # different types before Python 3.11
        return True
    except OSError as error:
        return error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
    except RuntimeError:  # no thread for the look-up
        return False
    return False


def wait_for(address: str, until_s: float, check: Callable[[], None] = lambda: None) -> bool:
    """Waits until a server of HTTP/2 answers; False at `until_s`, by `time.monotonic`."""
    while not greets(address, _ANSWER_S):
        check()
        if time.monotonic() > until_s:
            return False
        time.sleep(_POLL_S)
    return True
