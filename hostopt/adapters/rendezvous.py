"""Exchange of addresses between processes that know their ranks and the address of rank 0.

Rank 0 listens. Each other rank, a peer, connects and registers its address. When all have
registered, rank 0 sends the addresses of all::

    rank 0 -> peer     nonce of rank 0
    peer   -> rank 0   run ID, rank, size, address, nonce of the peer, proof
    rank 0 -> peer     "missing", ranks that have not registered, proof; every 10 s
    rank 0 -> peer     "addresses", addresses of all ranks, proof; or an error

Each message is a line of JSON. A proof is an HMAC of the message and of the other's nonce, with
the token of the ranks as key. A peer ignores messages without the right proof, and tries again
until its deadline. On one machine rank 0 listens at an abstract UNIX socket. It has no file that
could be left behind, and the kernel knows the user of the other end.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

from hostopt.adapters.launchers import Place
from hostopt.cluster import tf_config
from hostopt.errors import AuthError, ConfigError, HostOptError, RendezvousTimeoutError
from hostopt.options import shown
from hostopt.process import descriptors
from hostopt.transport.addresses import host_and_port, is_loopback, listen_address

_log = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 20
_NONCE_BYTES = 16
PROGRESS_S = 10.0  # between two lines of the log
RETRY_S = 0.1
_CONNECT_TIMEOUT_S = 5.0  # of one attempt
_SILENCE_S = 3 * PROGRESS_S  # after which a peer connects again
_GRACE_S = 2.0  # rank 0 gives up first, and names the missing ranks
_REGISTER_TIMEOUT_S = 10.0  # for a process that has connected to register
_SEND_TIMEOUT_S = 5.0
_LOST_MS = 30_000  # until a peer counts as lost if its machine does not answer
_SPARE_CONNECTIONS = 64  # of strangers, and one more for each rank
_ERRORS = {each.__name__: each for each in (AuthError, ConfigError, RendezvousTimeoutError)}


def exchange(place: Place, port: int, token: bytes | None, timeout_s: float) -> list[str]:
    """Sends the address of this process to all others, and returns the addresses of all."""
    deadline_s = time.monotonic() + timeout_s
    if place.rank:
        return Peer(place, port, token, deadline_s).exchange()
    with _listen(place) as listener, contextlib.closing(_Server(place, listener, token)) as server:
        return server.exchange(announced_address(place, None, port), deadline_s)


@dataclass
class Peer:
    """A rank other than 0."""

    _place: Place
    _port: int
    _token: bytes | None = field(repr=False)
    _deadline_s: float

    def __post_init__(self) -> None:
        self._progress = _Progress(self._place)
        self._missing = [0]
        self._received = b""  # of the next message
        self._refusal = ""  # of a process without the right proof

    def exchange(self) -> list[str]:
        """Sends the address of this process to rank 0, and returns the addresses of all."""
        while True:
            try:
                with self._connect() as connection:
                    return self._register(connection)
            except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
                descriptors.check(error)
            self._progress.log(self._missing)
            if time.monotonic() > self._deadline_s:
                raise _timeout_error(self._place, self._missing, self._refusal)
            time.sleep(RETRY_S)

    def _connect(self) -> socket.socket:
        timeout_s = max(RETRY_S, min(_CONNECT_TIMEOUT_S, self._deadline_s - time.monotonic()))
        name = _unix_name(self._place)
        if name is None:
            assert self._place.rendezvous is not None
            return socket.create_connection(host_and_port(self._place.rendezvous), timeout_s)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout_s)
            connection.connect(name)
            if _user_of(connection) != os.getuid():
                raise ConnectionRefusedError("rank 0 of another user")
        except BaseException:
            connection.close()
            raise
        return connection

    def _register(self, connection: socket.socket) -> list[str]:
        """Registers, and returns the addresses; raises OSError if the other end is not rank 0."""
        self._received, self._missing = b"", [0]
        nonce = self._read(connection, _CONNECT_TIMEOUT_S).get("nonce")
        own_nonce = secrets.token_hex(_NONCE_BYTES)
        if not isinstance(nonce, str):
            raise ConnectionError("not rank 0")
        place = self._place
        address = announced_address(place, connection, self._port)
        fields = [place.run_id, place.rank, place.size, address, own_nonce]
        connection.sendall(line(fields=fields, proof=_proof(self._token, nonce, *fields)))
        while True:
            answer = self._read(connection, _SILENCE_S)
            kind, value = answer.get("kind"), answer.get("value")
            is_proven = _is_proof(answer.get("proof"), self._token, own_nonce, kind, value)
            if self._token is not None and not is_proven:
                self._refusal = shown(value)
                raise ConnectionError("not rank 0, or with another token")
            if kind in _ERRORS and isinstance(value, str) and value.isprintable():
                raise _ERRORS[kind](value, rank=place.rank)
            if kind == "missing" and isinstance(value, list):
                self._missing = [rank for rank in value if type(rank) is int]
            elif kind == "addresses" and isinstance(value, list) and self._are_valid(value):
                return value
            else:
                raise ConnectionError("not rank 0")

    def _read(self, connection: socket.socket, timeout_s: float) -> dict[str, Any]:
        """Returns the next message, if all of it arrives in time; logs progress meanwhile."""
        end_s = min(time.monotonic() + timeout_s, self._deadline_s + _GRACE_S)
        while b"\n" not in self._received:
            self._progress.log(self._missing)
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise ConnectionError("no message in time")
            connection.settimeout(min(left_s, PROGRESS_S))
            with contextlib.suppress(socket.timeout):  # another class before Python 3.10
                data = connection.recv(1 << 16)
                if not data or len(self._received) > MAX_LINE_BYTES:
                    raise ConnectionError("the connection has ended")
                self._received += data
        first, _, self._received = self._received.partition(b"\n")
        return _parsed(first)

    def _are_valid(self, addresses: list[Any]) -> bool:
        return len(addresses) == self._place.size and all(map(tf_config.is_address, addresses))


def _listen(place: Place) -> socket.socket:
    assert place.rendezvous is not None
    name = _unix_name(place)
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


@dataclass(eq=False)
class _Connection:
    """A process that has connected to rank 0; a peer once it has a rank."""

    socket: socket.socket
    deadline_s: float  # to register
    nonce: str  # of rank 0
    received: bytes = b""
    peer_nonce: str = ""
    rank: int | None = None
    address: str = ""


@dataclass
class _Server:
    """Rank 0, until all peers have the addresses."""

    _place: Place
    _listener: socket.socket
    _token: bytes | None = field(repr=False)

    def __post_init__(self) -> None:
        self._connections: list[_Connection] = []
        self._refused: set[int] = set()  # ranks with another token
        self._selector = selectors.DefaultSelector()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def exchange(self, address: str, deadline_s: float) -> list[str]:
        """Waits for all peers, and sends them the addresses of all."""
        progress = _Progress(self._place)
        while missing := self._missing():
            if time.monotonic() > deadline_s:
                error: HostOptError = _timeout_error(self._place, missing)
                if refused := sorted(self._refused.intersection(missing)):
                    error = AuthError(_other_token(*refused), rank=0)
                self._send_all(type(error).__name__, error.message)
                raise error
            ready = [key.data for key, _ in self._selector.select(RETRY_S)]
            for connection in filter(None, ready):
                self._receive(connection)
            if None in ready:
                self._accept()  # last, as it may end a connection
            now_s = time.monotonic()
            for late in [each for each in self._strangers() if each.deadline_s < now_s]:
                self._close(late)
            if progress.log(missing):
                self._send_all("missing", missing)
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

    def _strangers(self) -> list[_Connection]:
        return [each for each in self._connections if each.rank is None]

    def _missing(self) -> list[int]:
        registered = self._registered()
        return [rank for rank in range(1, self._place.size) if rank not in registered]

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            descriptors.check(error)
            return
        is_unix = accepted.family == socket.AF_UNIX
        if is_unix and _user_of(accepted) != os.getuid():
            accepted.close()
            return
        strangers = self._strangers()
        if len(strangers) >= self._place.size + _SPARE_CONNECTIONS:
            self._close(strangers[0])  # the oldest one
        if not is_unix:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_MS)
        accepted.settimeout(_SEND_TIMEOUT_S)  # it is read only when there is something
        deadline_s = time.monotonic() + _REGISTER_TIMEOUT_S
        connection = _Connection(accepted, deadline_s, secrets.token_hex(_NONCE_BYTES))
        self._connections.append(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        _send(connection, nonce=connection.nonce)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(MAX_LINE_BYTES - len(connection.received))
        except OSError:
            data = b""
        connection.received += data
        is_line = connection.received.endswith(b"\n")
        if data and not is_line and len(connection.received) < MAX_LINE_BYTES:
            return
        # a peer that has registered sends nothing more
        if not is_line or connection.rank is not None or not self._register(connection):
            self._close(connection)

    def _register(self, connection: _Connection) -> bool:
        """Registers the address of a peer; returns False if this is not a peer of this run."""
        try:
            message = _parsed(connection.received)
            run_id, rank, size, address, nonce = fields = message["fields"]
            if type(rank) is not int or not isinstance(nonce, str):
                return False
            connection.peer_nonce = nonce
            if run_id != self._place.run_id or not tf_config.is_address(address):
                return False
            if not _is_proof(message.get("proof"), self._token, connection.nonce, *fields):
                if 0 < rank < self._place.size:
                    self._refused.add(rank)
                self._send(connection, AuthError.__name__, _other_token(rank))
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
        answer = {"kind": kind, "value": value}
        _send(connection, **answer, proof=_proof(self._token, connection.peer_nonce, kind, value))

    def _close(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._connections.remove(connection)


def _other_token(*ranks: int) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} has another token than rank 0. Give all ranks the same token"


def _send(connection: _Connection, **fields: Any) -> None:
    with contextlib.suppress(OSError):  # the peer connects again
        connection.socket.sendall(line(**fields))


class _Progress:
    """Logs every 10 s which ranks are missing."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._next_s = time.monotonic() + PROGRESS_S

    def log(self, missing: list[int]) -> bool:
        """Logs the missing ranks, and returns True, if 10 s have passed since the last time."""
        if time.monotonic() < self._next_s:
            return False
        self._next_s = time.monotonic() + PROGRESS_S
        place = self._place
        _log.warning(
            "rank %s of %s waits at %s for rank %s",
            *(place.rank, place.size, place.rendezvous, ", ".join(map(str, missing))),
        )
        return True


def announced_address(place: Place, connection: socket.socket | None, port: int) -> str:
    """Returns the address of this process, as others reach it; rank 0 has no connection."""
    assert place.rendezvous is not None
    if place.rendezvous.startswith("@"):
        return f"127.0.0.1:{port}"
    host = place.host
    if host is None and connection is not None:
        host = str(connection.getsockname()[0])
        if is_loopback(f"[{host}]:{port}"):
            host = None  # it runs beside rank 0, whose name may be that of a loopback address
    if host is None:
        host = host_and_port(place.rendezvous)[0]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unix_name(place: Place) -> str | None:
    """Returns the name of the UNIX socket of rank 0; None between machines."""
    if place.rendezvous is None or not place.rendezvous.startswith("@"):
        return None
    return f"\0hostopt-{os.getuid()}-{place.rendezvous[1:]}"


def _user_of(connection: socket.socket) -> int:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", packed)[1])


def _timeout_error(place: Place, missing: list[int], refusal: str = "") -> HostOptError:
    """Returns the error of a rank that has waited in vain.

    A refusal is the answer of a process that did not prove that it is rank 0.
    """
    answer = f". A process there without its token answered {refusal}" if refusal else ""
    return RendezvousTimeoutError(
        f"rank {place.rank} of {place.size} ({place.launcher}) waited at {place.rendezvous} for "
        f"rank {', '.join(map(str, missing))}{answer}. Look at their output, or increase "
        "rendezvous_timeout_s",
        rank=place.rank,
    )


def _proof(token: bytes | None, nonce: str, *fields: Any) -> str:
    """Returns the proof that the sender of a message knows the token; empty without a token."""
    if token is None:
        return ""
    text = json.dumps(["hostopt rendezvous", nonce, *fields])
    return hmac.new(token, text.encode(), hashlib.sha256).hexdigest()


def _is_proof(value: Any, token: bytes | None, nonce: str, *fields: Any) -> bool:
    received = str(value).encode(errors="replace")
    return hmac.compare_digest(received, _proof(token, nonce, *fields).encode())


def line(**fields: Any) -> bytes:
    """Returns a message."""
    return json.dumps(fields).encode() + b"\n"


def _parsed(received: bytes) -> dict[str, Any]:
    """Returns the fields of a message, empty if it has none; raises OSError if it is no JSON."""
    try:
        message = json.loads(received)
    except (ValueError, RecursionError):
        raise ConnectionError("not a line of JSON") from None
    return message if isinstance(message, dict) else {}
