"""Addresses of ranks: where they listen, held ports, and loopback addresses."""

from __future__ import annotations

import ipaddress
import socket


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
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_and_port(address: str) -> tuple[str, int]:
    """Splits an address into the host, without brackets, and the port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
