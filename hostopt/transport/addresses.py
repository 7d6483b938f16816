"""Addresses of ranks: which are of this machine alone, and where to listen."""

from __future__ import annotations

import ipaddress
import socket

__all__: list[str] = []


def listen_address(address: str) -> str:
    """Where to listen: loopback addresses on loopback only, others on every interface.

    Args:
      address: ``host:port`` as the cluster names it.

    Returns:
      One numeric address. With two (::1 and 127.0.0.1) a second process could take the other.
    """
    host, port = host_and_port(address)
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, sockaddr = min(infos, key=lambda info: info[0] != socket.AF_INET)
    ip = str(sockaddr[0])
    if not is_loopback(address):
        ip = "::" if family == socket.AF_INET6 else "0.0.0.0"
    return f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"


def is_loopback(address: str) -> bool:
    """Whether an address is written as one of this machine alone.

    Args:
      address: ``host:port``; a name other than localhost counts as another machine's, as some
        systems resolve their own name to a loopback address.

    Returns:
      True where it is.
    """
    host, _ = host_and_port(address)
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_and_port(address: str) -> tuple[str, int]:
    """Split an address; an IPv6 address loses its brackets.

    Args:
      address: ``host:port``.

    Returns:
      Name or IP address of the host, and the port.
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
