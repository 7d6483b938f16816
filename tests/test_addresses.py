"""Addresses: loopback addresses, and the address that a rank listens at."""

from __future__ import annotations

import pytest

from hostopt.transport.addresses import host_and_port, is_loopback, listen_address


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
