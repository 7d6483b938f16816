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

import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import time
from typing import Any

from hostopt.adapters.place import Place
from hostopt.cluster import tf_config
from hostopt.errors import AuthError, ConfigError, HostOptError, RendezvousTimeoutError
from hostopt.options import shown
from hostopt.process import descriptors
from hostopt.transport.addresses import host_and_port, is_loopback

_log = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 20
PROGRESS_S = 10.0  # between two lines of the log
RETRY_S = 0.1
_CONNECT_TIMEOUT_S = 5.0  # of one attempt
_SILENCE_S = 3 * PROGRESS_S  # after which a peer connects again
_GRACE_S = 2.0  # rank 0 gives up first, and names the missing ranks
_ERRORS = {each.__name__: each for each in (AuthError, ConfigError, RendezvousTimeoutError)}


class Peer:
    """A rank other than 0."""

    def __init__(self, place: Place, port: int, token: bytes | None, deadline_s: float) -> None:
        self._place = place
        self._port = port
        self._token = token
        self._deadline_s = deadline_s
        self._progress = Progress(place)
        self._missing = [0]
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
                raise timeout_error(self._place, self._missing, self._refusal)
            time.sleep(RETRY_S)

    def _connect(self) -> socket.socket:
        timeout_s = max(RETRY_S, min(_CONNECT_TIMEOUT_S, self._deadline_s - time.monotonic()))
        name = unix_name(self._place)
        if name is None:
            assert self._place.rendezvous is not None
            return socket.create_connection(host_and_port(self._place.rendezvous), timeout_s)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout_s)
            connection.connect(name)
            if user_of(connection) != os.getuid():
                raise ConnectionRefusedError("rank 0 of another user")
        except BaseException:
            connection.close()
            raise
        return connection

    def _register(self, connection: socket.socket) -> list[str]:
        """Registers, and returns the addresses; raises OSError if the other end is not rank 0."""
        lines = _LineReader(connection)
        self._missing = [0]
        nonce, own_nonce = self._read(lines, _CONNECT_TIMEOUT_S).get("nonce"), new_nonce()
        if not isinstance(nonce, str):
            raise ConnectionError("not rank 0")
        place = self._place
        address = announced_address(place, connection, self._port)
        fields = [place.run_id, place.rank, place.size, address, own_nonce]
        connection.sendall(line(fields=fields, proof=proof(self._token, nonce, *fields)))
        while True:
            answer = self._read(lines, _SILENCE_S)
            kind, value = answer.get("kind"), answer.get("value")
            is_proven = is_proof(answer.get("proof"), self._token, own_nonce, kind, value)
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

    def _read(self, lines: _LineReader, timeout_s: float) -> dict[str, Any]:
        """Reads a message; logs progress meanwhile."""
        end_s = min(time.monotonic() + timeout_s, self._deadline_s + _GRACE_S)
        while True:
            try:
                return lines.read(min(end_s, time.monotonic() + PROGRESS_S))
            except socket.timeout:  # another class before Python 3.10
                if time.monotonic() >= end_s:
                    raise
            self._progress.log(self._missing)

    def _are_valid(self, addresses: list[Any]) -> bool:
        return len(addresses) == self._place.size and all(map(tf_config.is_address, addresses))


class _LineReader:
    """Reads messages from a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""

    def read(self, deadline_s: float) -> dict[str, Any]:
        """Returns the next message, if all of it arrives by the deadline."""
        while b"\n" not in self._received:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise socket.timeout("no message in time")
            self._connection.settimeout(left_s)
            data = self._connection.recv(1 << 16)
            if not data or len(self._received) > MAX_LINE_BYTES:
                raise ConnectionError("the connection has ended")
            self._received += data
        first, _, self._received = self._received.partition(b"\n")
        return parsed(first)


class Progress:
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
    """Returns the address of this process, as the other ranks reach it.

    Args:
      connection: its connection to rank 0; None in rank 0.
    """
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


def unix_name(place: Place) -> str | None:
    """Returns the name of the UNIX socket of rank 0; None between machines."""
    if place.rendezvous is None or not place.rendezvous.startswith("@"):
        return None
    return f"\0hostopt-{os.getuid()}-{place.rendezvous[1:]}"


def user_of(connection: socket.socket) -> int:
    """Returns the ID of the user at the other end of a UNIX socket."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", packed)[1])


def timeout_error(place: Place, missing: list[int], refusal: str = "") -> HostOptError:
    """Returns the error of a rank that has waited in vain.

    Args:
      refusal: answer of a process that did not prove that it is rank 0.
    """
    answer = f". A process there without its token answered {refusal}" if refusal else ""
    return RendezvousTimeoutError(
        f"rank {place.rank} of {place.size} ({place.launcher}) waited at {place.rendezvous} for "
        f"rank {', '.join(map(str, missing))}{answer}. Look at their output, or increase "
        "rendezvous_timeout_s",
        rank=place.rank,
    )


def proof(token: bytes | None, nonce: str, *fields: Any) -> str:
    """Returns the proof that the sender of a message knows the token; empty without a token."""
    if token is None:
        return ""
    text = json.dumps(["hostopt rendezvous", nonce, *fields])
    return hmac.new(token, text.encode(), hashlib.sha256).hexdigest()


def is_proof(value: Any, token: bytes | None, nonce: str, *fields: Any) -> bool:
    """Returns True if a received value is the proof of a message."""
    received = str(value).encode(errors="replace")
    return hmac.compare_digest(received, proof(token, nonce, *fields).encode())


def line(**fields: Any) -> bytes:
    """Returns a message."""
    return json.dumps(fields).encode() + b"\n"


def parsed(received: bytes) -> dict[str, Any]:
    """Returns the fields of a message, empty if it has none; raises OSError if it is no JSON."""
    try:
        message = json.loads(received)
    except (ValueError, RecursionError):
        raise ConnectionError("not a line of JSON") from None
    return message if isinstance(message, dict) else {}


def new_nonce() -> str:
    """Returns a random number that is never used again."""
    return secrets.token_hex(16)
