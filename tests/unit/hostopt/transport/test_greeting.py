"""Signs of life of a server: one that answers, one that is frozen, and none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from harness import reserved_addresses

from hostopt.transport.addresses import greets, is_silent, listens


@pytest.fixture
def frozen() -> Iterator[str]:
    """An address at which a program listens that accepts nothing, like a frozen one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def gone() -> Iterator[str]:
    with reserved_addresses(1) as (address,):
        yield address


def signs_of(address: str, timeout_s: float) -> tuple[bool, bool, bool]:
    """Returns if a server greets, listens and is silent."""
    silent = asyncio.run(is_silent(address, timeout_s))
    return greets(address, timeout_s), listens(address, timeout_s), silent


def test_a_server_of_grpc_greets() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    assert signs_of(f"127.0.0.1:{port}", 10.0) == (True, True, False)
    server.stop(None).wait()


def test_a_frozen_process_is_silent(frozen: str) -> None:
    assert signs_of(frozen, 0.1) == (False, True, True)


def test_a_process_that_is_gone_is_not_silent(gone: str) -> None:
    assert signs_of(gone, 0.1) == (False, False, False)


def test_another_program_is_not_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: [server.accept()[0].close() for _ in range(3)])
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert signs_of(address, 10.0) == (False, True, False)
