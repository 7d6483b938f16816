"""Data connections: a rank listens for those of its peers, ends those of strangers, and connects.

In the handshake, which docs/wire.md describes, both sides prove that they are the ranks of this
ring, and agree on the result: the caller uses the connection once it has confirmed, and the called
rank once it has the confirmation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
import struct
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Callable

from hostopt.transport import event_loop
from hostopt.transport.addresses import host_and_port, listen_address
from hostopt.transport.frame import WIRE_VERSION
from hostopt.transport.security import Identity, Security
from hostopt.transport.tcp.data_socket import DataSocket

_log = logging.getLogger(__name__)

_BACKLOG = 128
_PAUSE_S = 0.2  # after the process had no descriptor for a connection
_MAGIC = b"HOD"
_GREETING = struct.Struct("<3sBIBQQ16s")
_NONCE_BYTES, _PROOF_BYTES = 16, 64
_ACCEPTED, _CONFIRMED = b"\x01", b"\x03"
_CALLED, _CALLER = "data of called", "data of caller"


class HandshakeError(ConnectionError):
    """The other side of a data connection is not a rank of this ring."""


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
        # peers call the IPv4 addresses of interfaces even if this rank has an IPv6 address
        both = host == "::" and socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            (host, 0), family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
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
        return await identify(connection, self._identity, self._incarnation_of, self._security)

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
        await introduce(connection, caller, called, security, stream)
    except BaseException:
        with contextlib.suppress(OSError):
            (connection or plain).close()
        raise
    return connection


async def _resolve(host: str, port: int) -> list[Any]:
    loop = asyncio.get_running_loop()
    return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)


async def introduce(
    connection: DataSocket, caller: Identity, called: Identity, security: Security, stream: int = 0
) -> None:
    """Proves to a peer that this rank calls it for a stream, and checks that it is the peer."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    incarnations = (int(each.incarnation, 16) for each in (caller, called))
    greeting = _GREETING.pack(_MAGIC, WIRE_VERSION, caller.rank, stream, *incarnations, nonce)
    await connection.write([greeting])
    answer = await connection.read_exactly(_NONCE_BYTES + _PROOF_BYTES)
    signed = greeting + answer[:_NONCE_BYTES]
    if not security.is_proof(
        answer[_NONCE_BYTES:], *_fields(_CALLED, caller, called), body=signed
    ):
        raise HandshakeError("it does not know the token of this rank")
    proof = security.proof(*_fields(_CALLER, caller, called), body=signed)
    await connection.write([proof.encode()])
    if await connection.read_exactly(len(_ACCEPTED)) != _ACCEPTED:
        raise HandshakeError("another program answers")
    await connection.write([_CONFIRMED])  # one byte, which the buffers of the kernel always take


async def identify(
    connection: DataSocket,
    called: Identity,
    incarnation_of: Callable[[int], str | None],
    security: Security,
) -> tuple[int, int]:
    """Returns the rank and the stream of the peer that connects; `accept` must follow."""
    greeting = await connection.read_exactly(_GREETING.size)
    magic, version, rank, stream, from_, to, _ = _GREETING.unpack(greeting)
    if magic != _MAGIC or version != WIRE_VERSION:
        raise HandshakeError("another program calls")
    incarnation = incarnation_of(rank)
    if incarnation is None or (int(incarnation, 16), int(called.incarnation, 16)) != (from_, to):
        raise HandshakeError(f"the caller claims to be rank {rank} of another ring")
    caller = Identity(rank, incarnation)
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    signed = greeting + own_nonce
    own_proof = security.proof(*_fields(_CALLED, caller, called), body=signed)
    await connection.write([own_nonce, own_proof.encode()])
    proof = await connection.read_exactly(_PROOF_BYTES)
    if not security.is_proof(proof, *_fields(_CALLER, caller, called), body=signed):
        raise HandshakeError(f"the caller claims to be rank {rank}, but has another token")
    return rank, stream


async def accept(connection: DataSocket) -> None:
    """Accepts the connection of a peer that `identify` has checked."""
    await connection.write([_ACCEPTED])
    if await connection.read_exactly(len(_CONFIRMED)) != _CONFIRMED:
        raise HandshakeError("the caller does not confirm the connection")


def _fields(kind: str, caller: Identity, called: Identity) -> tuple[str, ...]:
    return (kind, str(caller.rank), str(called.rank), caller.incarnation, called.incarnation)
