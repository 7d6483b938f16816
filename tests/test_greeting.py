"""Signs of life of a server: one that answers, one that is frozen, and none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from harness import reserved_addresses
from sockets import run

from hostopt.transport.greeting import greets, is_silent, listens


@pytest.fixture
def frozen() -> Iterator[str]:
    """An address whose connections nobody accepts, like those of a frozen process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def gone() -> Iterator[str]:
    with reserved_addresses(1) as (address,):
        yield address


def test_a_server_of_grpc_greets() -> None:
    async def ask() -> list[bool]:
        server = grpc.aio.server()
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        functions: list[Any] = [greets, listens, is_silent]
        answers = [await asyncio.to_thread(each, address, 10.0) for each in functions]
        await server.stop(0)
        return answers

    assert run(ask()) == [True, True, False]


def test_a_frozen_process_is_silent(frozen: str) -> None:
    assert (greets(frozen, 0.1), listens(frozen, 0.1), is_silent(frozen, 0.1)) == (0, 1, 1)


def test_a_process_that_is_gone_is_not_silent(gone: str) -> None:
    assert (greets(gone, 0.1), listens(gone, 0.1), is_silent(gone, 0.1)) == (0, 0, 0)


def test_another_program_is_not_silent() -> None:
    async def ask() -> tuple[bool, bool]:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            return (
                await asyncio.to_thread(greets, address, 10.0),
                await asyncio.to_thread(is_silent, address, 10.0),
            )

    assert run(ask()) == (False, False)
