"""The data port: peers are served, strangers are refused, and none of them lasts."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from certificates import Certificates
from sockets import run

from hostopt.cluster.cluster import Cluster
from hostopt.options import Options
from hostopt.transport.security import Identity, Security
from hostopt.transport.tcp import data_server
from hostopt.transport.tcp.data_server import DataServer
from hostopt.transport.tcp.data_socket import DataSocket

CALLER, CALLED = Identity(1, "a1b2"), Identity(0, "c3d4")
MOST_STRANGERS = 3


def security_of(tls_dir: str | None = None) -> Security:
    cluster = Cluster.from_dict({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "worker", 0)
    return Security(cluster, Options(tls_dir=tls_dir), {})


class Server:
    """A data server whose peers are sent one byte."""

    def __init__(self, security: Security, handshake_s: float = 30.0) -> None:
        self.peers: list[int] = []
        self.server = DataServer(
            CALLED, {1: CALLER.incarnation}.get, security, handshake_s, MOST_STRANGERS, self.serve
        )
        self.server.start("127.0.0.1:1")
        self.address = f"127.0.0.1:{self.server.port}"

    async def serve(self, connection: DataSocket, peer: int, stream: int) -> None:
        assert stream == 0
        self.peers.append(peer)
        await data_server.accept(connection)
        await connection.write([b"!"])

    async def open_connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.server.port)


@asynccontextmanager
async def serving(*args: Any, **kwargs: Any) -> AsyncIterator[Server]:
    server = Server(*args, **kwargs)
    try:
        yield server
    finally:
        await server.server.stop(0)


async def call(server: Server, security: Security) -> bytes:
    context = security.tls and security.tls.client_context("127.0.0.1")
    connection = await data_server.connect(server.address, CALLER, CALLED, security, context)
    return await connection.read_exactly(1)


@pytest.mark.parametrize("kind", [None, "good"])
def test_a_peer_is_served(certificates: Certificates, kind: str | None) -> None:
    security = security_of(kind and certificates[kind])

    async def serve_twice() -> list[int]:
        async with serving(security) as server:
            assert await call(server, security) == b"!"
            assert await call(server, security) == b"!"
            return server.peers

    assert run(serve_twice()) == [1, 1]


@pytest.mark.parametrize(
    ("of_server", "of_caller"),
    [
        ("good", "of-another-ca"),
        ("good", "refused"),
        ("good", None),
        (None, "good"),
        ("of-another-host", "good"),
        ("expired", "good"),
        ("good", "expired"),
    ],
)
def test_certificates_that_do_not_match_are_refused(
    certificates: Certificates, of_server: str | None, of_caller: str | None
) -> None:
    async def refuse() -> list[int]:
        security = security_of(of_server and certificates[of_server])
        async with serving(security, handshake_s=2.0) as server:
            with pytest.raises(OSError):
                await call(server, security_of(of_caller and certificates[of_caller]))
            return server.peers

    assert run(refuse()) == []


def test_a_caller_that_sends_nothing_is_ended_at_the_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def call_silently() -> bytes:
        async with serving(security_of(), handshake_s=0.1) as server:
            reader, _ = await server.open_connection()
            return await reader.read()

    assert run(call_silently()) == b""
    assert "refused a data connection: the handshake took too long" in caplog.text


def test_strangers_beyond_the_limit_are_ended_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def call_often() -> None:
        async with serving(security_of()) as server:
            opened = [await server.open_connection() for _ in range(MOST_STRANGERS + 1)]
            assert await opened[-1][0].read() == b""
            opened[0][1].write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:12222\r\n\r\n")
            assert await opened[0][0].read() == b""
            assert await call(server, security_of()) == b"!"  # there is room for a peer again

    run(call_often())
    assert "another program calls" in caplog.text


def test_a_process_without_descriptors_serves_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_server, "_PAUSE_S", 0.01)

    class Listener:
        """A listener whose first accept fails."""

        def __init__(self, listener: socket.socket) -> None:
            self._listener = listener
            self.failures = 1

        def accept(self) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self._listener.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._listener, name)

    async def serve() -> int:
        async with serving(security_of()) as server:
            listener: Any = Listener(server.server._listener)  # type: ignore[arg-type]
            server.server._listener = listener
            assert await call(server, security_of()) == b"!"
            return int(listener.failures)

    assert run(serve()) == 0


def test_an_address_that_is_not_there_is_an_os_error() -> None:
    async def connect() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        await data_server.connect(f"127.0.0.1:{port}", CALLER, CALLED, security_of(), None)

    with pytest.raises(ConnectionRefusedError):
        run(connect())
