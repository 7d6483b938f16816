"""Listens for the data connections of peers, and ends those of strangers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Callable

from hostopt.transport import event_loop
from hostopt.transport.addresses import host_and_port, listen_address
from hostopt.transport.security import Identity, Security
from hostopt.transport.tcp import handshake
from hostopt.transport.tcp.data_socket import DataSocket

_log = logging.getLogger(__name__)

_BACKLOG = 128
_PAUSE_S = 0.2  # after the process had no descriptor for a connection


@dataclass(eq=False)
class DataServer:
    """Accepts data connections; used on the event loop."""

    _identity: Identity
    _incarnation_of: Callable[[int], str | None]
    _security: Security
    _handshake_s: float
    _most_strangers: int
    _on_connected: Callable[[DataSocket, int, int], Awaitable[None]]  # with rank and stream

    def __post_init__(self) -> None:
        self._context: ssl.SSLContext | None = None
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Future[None]
        self._strangers: set[DataSocket] = set()
        self._receiving: set[asyncio.Future[None]] = set()
        self._has_warned = False
        self.port = 0  # 0 before `start`

    def start(self, address: str) -> None:
        """Listens at a free port of the host in this rank's address."""
        if self._security.tls is not None:
            self._context = self._security.tls.server_context()
        host, _ = host_and_port(listen_address(address))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._accepting = asyncio.ensure_future(self._accept_all())

    async def stop(self, grace_s: float) -> None:
        """Stops listening; peers have `grace_s` for their last frames."""
        if self._listener is None:
            return
        self._accepting.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        for connection in self._strangers:
            connection.close()
        if self._receiving:
            await asyncio.wait(self._receiving, timeout=grace_s)
        for each in list(self._receiving):
            each.cancel()

    async def _accept_all(self) -> None:
        while self._listener is not None:
            try:
                connected, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError as error:  # no descriptor is left: the connection stays in the backlog
                _log.debug("a data connection waits: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._strangers) >= self._most_strangers:
                connected.close()
                continue
            receiving = asyncio.ensure_future(self._serve(DataSocket(connected)))
            self._receiving.add(receiving)
            receiving.add_done_callback(self._receiving.discard)

    async def _serve(self, connection: DataSocket) -> None:
        self._strangers.add(connection)
        try:
            peer, stream = await asyncio.wait_for(self._identify(connection), self._handshake_s)
            self._strangers.discard(connection)
            await self._on_connected(connection, peer, stream)
        except (OSError, asyncio.TimeoutError) as error:
            self._warn(error)
        finally:
            self._strangers.discard(connection)
            connection.close()

    async def _identify(self, connection: DataSocket) -> tuple[int, int]:
        if self._context is not None:
            await connection.start_tls(self._context)
        return await handshake.identify(
            connection, self._identity, self._incarnation_of, self._security
        )

    def _warn(self, error: Exception) -> None:
        """Logs the first caller that was refused; the ring is not aborted, as it is a stranger."""
        if self._has_warned or self._listener is None:
            return
        self._has_warned = True
        _log.warning(
            "rank %d has refused a data connection: %s. Further ones are not logged",
            self._identity.rank,
            str(error) or "the handshake took too long",
        )


async def connect(
    address: str,
    caller: Identity,
    called: Identity,
    security: Security,
    context: ssl.SSLContext | None,
    stream: int = 0,
) -> DataSocket:
    """Connects to the data server of a peer, which reads frames from the connection."""
    host, port = host_and_port(address)
    loop = asyncio.get_running_loop()
    infos = await event_loop.run_on(0, _resolve(host, port))  # whose loop has threads for it
    family, kind, protocol, _, sockaddr = min(infos, key=lambda info: info[0] != socket.AF_INET)
    connection = None
    plain = socket.socket(family, kind, protocol)
    try:
        plain.setblocking(False)
        await loop.sock_connect(plain, sockaddr)
        connection = DataSocket(plain)
        if context is not None:
            await connection.start_tls(context, host)
        await handshake.introduce(connection, caller, called, security, stream)
    except BaseException:
        with contextlib.suppress(OSError):
            (connection or plain).close()
        raise
    return connection


async def _resolve(host: str, port: int) -> list[Any]:
    loop = asyncio.get_running_loop()
    return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
