"""Addresses: loopback addresses, the address that a rank listens at, and held ports."""

from __future__ import annotations

import errno
import socket

import pytest

from hostopt.transport.addresses import (
    hold_port,
    host_and_port,
    is_loopback,
    listen_address,
    port_of,
)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("host0:2222", ("host0", 2222)),
        ("10.0.0.1:2222", ("10.0.0.1", 2222)),
        ("[::1]:2222", ("::1", 2222)),
    ],
)
def test_host_and_port(address: str, expected: tuple[str, int]) -> None:
    assert host_and_port(address) == expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.1.2.3:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("10.0.0.1:1", False),
        ("[fe80::1]:1", False),
        ("host0:1", False),
    ],
)
def test_is_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) == expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:2222", "127.0.0.1:2222"),
        ("localhost:2222", "127.0.0.1:2222"),
        ("10.0.0.1:2222", "0.0.0.0:2222"),
        ("[2001:db8::1]:2222", "[::]:2222"),
    ],
)
def test_listen_address(address: str, expected: str) -> None:
    assert listen_address(address) == expected


def test_a_held_port_is_kept_on_every_address_that_its_rank_listens_at() -> None:
    with hold_port("192.0.2.1") as holder, socket.socket() as other, socket.socket() as server:
        with pytest.raises(OSError, match="in use") as raised:
            other.bind(("127.0.0.1", port_of(holder)))
        assert raised.value.errno == errno.EADDRINUSE
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("0.0.0.0", port_of(holder)))
        server.listen()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_held_port_of_a_loopback_address_is_on_loopback_alone(host: str) -> None:
    with hold_port(host) as holder:
        assert holder.getsockname()[0] == host
