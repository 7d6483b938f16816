"""Rank 0 of an exchange of addresses, which `hostopt.adapters.rendezvous` describes."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from hostopt.adapters import rendezvous
from hostopt.adapters.place import Place
from hostopt.cluster import tf_config
from hostopt.errors import AuthError, ConfigError, HostOptError
from hostopt.process import descriptors
from hostopt.transport.addresses import host_and_port, is_loopback, listen_address

_REGISTER_TIMEOUT_S = 10.0  # for a process that has connected to register
_SEND_TIMEOUT_S = 5.0
_LOST_MS = 30_000  # until a peer counts as lost if its machine does not answer
_SPARE_CONNECTIONS = 64  # of strangers, and one more for each rank


def exchange(place: Place, port: int, token: bytes | None, timeout_s: float) -> list[str]:
    """Sends the address of this process to all others, and returns the addresses of all."""
    deadline_s = time.monotonic() + timeout_s
    if place.rank:
        return rendezvous.Peer(place, port, token, deadline_s).exchange()
    with _listen(place) as listener, contextlib.closing(_Server(place, listener, token)) as server:
        return server.exchange(rendezvous.announced_address(place, None, port), deadline_s)


def _listen(place: Place) -> socket.socket:
    assert place.rendezvous is not None
    name = rendezvous.unix_name(place)
    try:
        if name is not None:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(name)
            listener.listen()
            return listener
        if is_loopback(place.rendezvous):
            host, port = host_and_port(listen_address(place.rendezvous))
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family)
        # all interfaces, as the name of this machine may be that of its loopback interface
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        address = "", host_and_port(place.rendezvous)[1]
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as error:
        descriptors.check(error)
        raise ConfigError(
            f"rank 0 cannot listen at {place.rendezvous}: {error}. Set HOSTOPT_RENDEZVOUS to an "
            "address of its machine with a free port, on all ranks",
            rank=0,
        ) from None


@dataclass
class _Connection:
    """A process that has connected to rank 0; a peer once it has a rank."""

    socket: socket.socket
    deadline_s: float = field(
        default_factory=lambda: time.monotonic() + _REGISTER_TIMEOUT_S  # to register
    )
    nonce: str = field(default_factory=rendezvous.new_nonce)  # of rank 0
    received: bytes = b""
    peer_nonce: str = ""
    rank: int | None = None
    address: str = ""


class _Server:
    """Rank 0, until all peers have the addresses."""

    def __init__(self, place: Place, listener: socket.socket, token: bytes | None) -> None:
        self._place = place
        self._listener = listener
        self._token = token
        self._connections: list[_Connection] = []
        self._refused: set[int] = set()  # ranks with another token
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def exchange(self, address: str, deadline_s: float) -> list[str]:
        """Waits for all peers, and sends them the addresses of all."""
        progress = rendezvous.Progress(self._place)
        while self._missing():
            if time.monotonic() > deadline_s:
                error = self._failure()
                self._send_all(type(error).__name__, error.message)
                raise error
            for key, _ in sorted(self._selector.select(rendezvous.RETRY_S), key=_is_new):
                if key.data is None:
                    self._accept()  # last, as it may end a connection
                else:
                    self._receive(key.data)
            self._close_late()
            if progress.log(self._missing()):
                self._send_all("missing", self._missing())
        found = {0: address, **self._registered()}
        addresses = [found[rank] for rank in range(self._place.size)]
        self._send_all("addresses", addresses)
        return addresses

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._connections:
            connection.socket.close()
        self._selector.close()

    def _registered(self) -> dict[int, str]:
        return {each.rank: each.address for each in self._connections if each.rank is not None}

    def _missing(self) -> list[int]:
        registered = self._registered()
        return [rank for rank in range(1, self._place.size) if rank not in registered]

    def _failure(self) -> HostOptError:
        refused = sorted(self._refused.intersection(self._missing()))
        if refused:
            ranks = ", ".join(map(str, refused))
            text = f"rank {ranks} has another token than rank 0. Give all ranks the same token"
            return AuthError(text, rank=0)
        return rendezvous.timeout_error(self._place, self._missing())

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            descriptors.check(error)
            return
        is_unix = accepted.family == socket.AF_UNIX
        if is_unix and rendezvous.user_of(accepted) != os.getuid():
            accepted.close()
            return
        strangers = [each for each in self._connections if each.rank is None]
        if len(strangers) >= self._place.size + _SPARE_CONNECTIONS:
            self._close(strangers[0])  # the oldest one
        if not is_unix:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_MS)
        accepted.settimeout(_SEND_TIMEOUT_S)  # it is read only when there is something
        connection = _Connection(accepted)
        self._connections.append(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        _send(connection, nonce=connection.nonce)

    def _receive(self, connection: _Connection) -> None:
        try:
            left = rendezvous.MAX_LINE_BYTES - len(connection.received)
            data = connection.socket.recv(left)
        except OSError:
            data = b""
        connection.received += data
        is_line = connection.received.endswith(b"\n")
        if data and not is_line and len(connection.received) < rendezvous.MAX_LINE_BYTES:
            return
        # a peer that has registered sends nothing more
        if not is_line or connection.rank is not None or not self._register(connection):
            self._close(connection)

    def _register(self, connection: _Connection) -> bool:
        """Registers the address of a peer; returns False if this is not a peer of this run."""
        try:
            message = rendezvous.parsed(connection.received)
            run_id, rank, size, address, nonce = fields = message["fields"]
            if type(rank) is not int or not isinstance(nonce, str):
                return False
            connection.peer_nonce = nonce
            if run_id != self._place.run_id or not tf_config.is_address(address):
                return False
            if not rendezvous.is_proof(
                message.get("proof"), self._token, connection.nonce, *fields
            ):
                if 0 < rank < self._place.size:
                    self._refused.add(rank)
                text = f"rank {rank} has another token than rank 0. Give all ranks the same token"
                self._send(connection, AuthError.__name__, text)
                return False
        except (OSError, KeyError, ValueError, TypeError):
            return False
        if size != self._place.size or not 0 < rank < size:
            text = f"rank {rank} of {size} has connected to rank 0 of {self._place.size}"
            text = f"{text}. Start all ranks with the same launcher"
        elif self._registered().get(rank, address) != address:
            text = f"two processes have rank {rank}. Start each rank once"
        else:
            connection.rank, connection.address = rank, address
            self._send(connection, "missing", self._missing())
            return True
        self._send(connection, ConfigError.__name__, text)
        return False

    def _send_all(self, kind: str, value: Any) -> None:
        for connection in self._connections:
            if connection.rank is not None:
                self._send(connection, kind, value)

    def _send(self, connection: _Connection, kind: str, value: Any) -> None:
        proof = rendezvous.proof(self._token, connection.peer_nonce, kind, value)
        _send(connection, kind=kind, value=value, proof=proof)

    def _close_late(self) -> None:
        now_s = time.monotonic()
        for connection in list(self._connections):
            if connection.rank is None and connection.deadline_s < now_s:
                self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._connections.remove(connection)


def _is_new(event: tuple[selectors.SelectorKey, int]) -> bool:
    """Returns True for the listener, False for a connection."""
    return event[0].data is None


def _send(connection: _Connection, **fields: Any) -> None:
    with contextlib.suppress(OSError):  # the peer connects again
        connection.socket.sendall(rendezvous.line(**fields))
