"""Protects a ring by a token that all ranks share, or by certificates; it does not need gRPC.

docs/wire.md describes what the two sides of a call prove to each other, in metadata. A caller that
does not know the other's incarnation is refused with that incarnation as challenge, and calls
again. An observer is no rank: it carries no `rank`, and a number that it draws for this call as
`from`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import ssl
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from hostopt.cluster.cluster import Cluster
from hostopt.errors import ConfigError
from hostopt.options import Options
from hostopt.process import descriptors
from hostopt.transport.addresses import host_and_port, is_loopback

Metadata = tuple[tuple[str, str], ...]
Caller = dict[str, str]  # metadata of a call

_CALL, _ANSWER = "call", "answer"
_FOR_OBSERVERS = {_CALL: "call of an observer", _ANSWER: "answer to an observer"}
MAX_RANK_DIGITS = 9
_CA, _CERT, _KEY = "ca.pem", "cert.pem", "key.pem"
_ROUND_TRIPS = 4  # more than any TLS handshake needs
# ssl.VERIFY_X509_PARTIAL_CHAIN, which Python 3.9 lacks: trusts an intermediate CA, as gRPC does.
_PARTIAL_CHAIN = 0x80000
_PROBE_TIMEOUT_S = 1.0
_MAX_FILE_BYTES = 1 << 20  # of a token or certificate file
_NO_PROOF = "\0" * 64  # of a rank without a token, as long as any other
_WANTS_TLS = "wants TLS, and this rank has no tls_dir"


def read_token(options: Options, environ: Mapping[str, str] | None = None) -> bytes | None:
    """Returns the token of HOSTOPT_TOKEN, or of the file; None without one."""
    environ = os.environ if environ is None else environ
    if "HOSTOPT_TOKEN" in environ:
        source, token = "the variable HOSTOPT_TOKEN", os.fsencode(environ["HOSTOPT_TOKEN"])
    elif options.token_file is not None:
        source = f"token_file {options.token_file}"
        token = _read(Path(options.token_file), source, is_secret=True)
    else:
        return None
    if not token.strip():
        raise ConfigError(
            f"{source} is empty, expected a token that all ranks share. Create one with "
            "`openssl rand -hex 32`"
        )
    return token.strip()


class Identity(NamedTuple):
    """One side of a call or of a data connection."""

    rank: int  # -1 if it is an observer, or names none
    incarnation: str


class Security:
    """The token and the certificates of one rank."""

    def __init__(
        self, cluster: Cluster, options: Options, environ: Mapping[str, str] | None = None
    ) -> None:
        self._token = read_token(options, environ)
        self.has_token = self._token is not None
        self.tls = None if options.tls_dir is None else Tls(options.tls_dir)
        host = None if cluster.task is None else host_and_port(cluster.task.address)[0]
        self.local_fault = None if self.tls is None else self.tls.fault(host)
        others = [task for task in cluster.ring if not is_loopback(task.address)]
        if others and not (self.has_token or self.tls or options.insecure):
            raise ConfigError(
                f"the ring has addresses that other machines can reach, such as {others[0]}, but "
                "neither a token nor certificates. Give all ranks the same token, in a "
                "token_file or in HOSTOPT_TOKEN, or each a tls_dir (see docs/security.md), or set "
                "insecure=True if nobody else can reach these addresses"
            )

    def proof(self, *fields: str, body: bytes) -> str:
        """Returns the proof that this rank knows the token: HMAC-SHA256, in hexadecimal."""
        if self._token is None:
            return _NO_PROOF
        signed = json.dumps(fields).encode() + b"\n" + body
        return hmac.new(self._token, signed, hashlib.sha256).hexdigest()

    def is_proof(self, proof: bytes, *fields: str, body: bytes) -> bool:
        """Returns True if `proof` is the proof of these fields and this message."""
        return hmac.compare_digest(proof, self.proof(*fields, body=body).encode())


@dataclass(frozen=True)
class Authenticator:
    """Signs and checks the calls and answers of one side, those of ranks or those of observers.

    The proofs of the two are of different kinds, so neither is accepted in place of the other.
    """

    _local: Identity
    _security: Security
    _for_observers: bool = False

    def call_metadata(self, called: Identity, method: str, request: bytes = b"") -> Metadata:
        """Returns the metadata of a call to a rank; the request of a stream is empty."""
        metadata: Metadata = (("from", self._local.incarnation), ("to", called.incarnation))
        if not self._for_observers:
            metadata = (("rank", str(self._local.rank)), *metadata)
        if not self._security.has_token:
            return metadata
        fields, digest = self._fields(_CALL, method, self._local, called), _digest(request)
        proof = self._security.proof(*fields, body=digest.encode())
        return (*metadata, ("digest", digest), ("proof", proof))

    def is_answer(self, called: Identity, method: str, answer: bytes, metadata: Any) -> bool:
        """Returns True if an answer proves that the rank knows the token, if there is one."""
        proof = read_metadata(metadata).get("proof", "").encode()
        fields = self._fields(_ANSWER, method, called, self._local)
        return not self._security.has_token or self._security.is_proof(proof, *fields, body=answer)

    def answer_metadata(self, method: str, caller: Caller, answer: bytes) -> Metadata:
        """Returns the trailing metadata of an answer."""
        if not self._security.has_token:
            return ()
        fields = self._fields(_ANSWER, method, self._local, claim_of(caller))
        return (("proof", self._security.proof(*fields, body=answer)),)

    def needs_challenge(self, caller: Caller) -> bool:
        """Returns True if a caller with a token does not know this rank's incarnation yet."""
        is_signed = self._security.has_token and "proof" in caller
        return is_signed and caller.get("to") != self._local.incarnation

    def reason_to_refuse(self, method: str, caller: Caller) -> str | None:
        """Returns the reason to refuse a call before its request is read; None without one."""
        proof = caller.get("proof")
        if not self._security.has_token:
            return None if proof is None else "the caller has a token, and this rank has none"
        if proof is None:
            return "the caller has no token, and this rank has one"
        fields = self._fields(_CALL, method, claim_of(caller), self._local)
        digest = caller.get("digest", "").encode()
        if self._security.is_proof(proof.encode(), *fields, body=digest):
            return None
        return "the caller has another token"

    def is_signed(self, caller: Caller, request: bytes) -> bool:
        """Returns True if the request of an accepted call is the one that was signed."""
        return not self._security.has_token or _digest(request) == caller.get("digest")

    def _fields(
        self, kind: str, method: str, sender: Identity, receiver: Identity
    ) -> tuple[str, ...]:
        incarnations = sender.incarnation, receiver.incarnation
        if self._for_observers:
            return (_FOR_OBSERVERS[kind], method, *incarnations)
        return (kind, method, str(sender.rank), str(receiver.rank), *incarnations)


def read_metadata(metadata: Any) -> Caller:
    """Returns the texts of metadata by key; gRPC's own type is not always a dict."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def claim_of(caller: Caller) -> Identity:
    """Returns who a caller claims to be; its rank is -1 if it names none."""
    rank = caller.get("rank", "")
    is_number = rank.isascii() and rank.isdigit() and len(rank) <= MAX_RANK_DIGITS
    return Identity(int(rank) if is_number else -1, caller.get("from", ""))


def _digest(request: bytes) -> str:
    return hashlib.sha256(request).hexdigest()


class Tls:
    """The certificates of one rank in a directory. The files are read once."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._directory = Path(path)
        description = f"tls_dir {path}"
        self.ca, self.cert, self.key = (
            _read(self._directory / name, f"{name} of {description}", is_secret=name == _KEY)
            for name in (_CA, _CERT, _KEY)
        )
        self._context(ssl.PROTOCOL_TLS_SERVER)  # raises if they cannot be used

    @property
    def expires(self) -> datetime:
        """The time at which the certificate expires, in UTC; it must have no `fault`."""
        seconds = ssl.cert_time_to_seconds(str(self._handshake_with_self(None)["notAfter"]))
        return datetime.fromtimestamp(seconds, timezone.utc)

    def fault(self, host: str | None) -> str | None:
        """Returns the reason why a peer with the same CA would refuse the certificate, if any."""
        try:
            self._handshake_with_self(host)
        except ssl.SSLError as error:
            return f"{_CERT} of tls_dir {self._directory} is not accepted: {_reason(error)}"
        return None

    def client_context(self, host: str | None) -> ssl.SSLContext:
        """Returns the TLS settings for calls to a peer whose certificate names `host`, if any."""
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = host is not None
        return context

    def server_context(self) -> ssl.SSLContext:
        """Returns the TLS settings for calls of peers, which need a certificate."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.set_alpn_protocols(["h2"])
        context.verify_flags |= _PARTIAL_CHAIN
        try:
            context.load_verify_locations(self._directory / _CA)
        except ssl.SSLError as error:
            raise self._unusable(_CA, "CA certificates in PEM format", error) from None
        try:
            context.load_cert_chain(
                self._directory / _CERT, self._directory / _KEY, password=self._refuse_password
            )
        except ssl.SSLError as error:
            expected = f"a certificate in PEM format, and its key in {_KEY}"
            raise self._unusable(_CERT, expected, error) from None
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _refuse_password(self) -> str:
        raise ConfigError(
            f"{_KEY} of tls_dir {self._directory} has a password. Use a key without a password "
            "in a file that only its owner can read"
        )

    def _unusable(self, name: str, expected: str, error: ssl.SSLError) -> ConfigError:
        fault = f"cannot be used ({_reason(error)})"
        return ConfigError(f"{name} of tls_dir {self._directory} {fault}, expected {expected}")

    def _handshake_with_self(self, host: str | None) -> dict[str, Any]:
        """Runs a TLS handshake of this rank with itself in memory; returns the certificate."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.client_context(host).wrap_bio(to_client, to_server, server_hostname=host)
        server = self.server_context().wrap_bio(to_server, to_client, server_side=True)
        for _ in range(_ROUND_TRIPS):
            for end in (client, server):
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        return client.getpeercert() or {}


def _read(path: Path, name: str, *, is_secret: bool) -> bytes:
    try:
        with open(path, "rb", opener=_open_without_blocking) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        descriptors.check(error)
        raise ConfigError(
            f"{name} cannot be read: {error.strerror}. Give a file that this user can read"
        ) from None
    if is_secret and mode & 0o077:
        raise ConfigError(
            f"{name} has mode {mode:04o} and is accessible to other users, expected 0600 or less. "
            f"Run `chmod 600 {path}`, and replace the secret if others could have read it"
        )
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(
            f"{name} has more than {_MAX_FILE_BYTES} bytes. Give the path of the right file"
        )
    return content


def _open_without_blocking(path: str, flags: int) -> int:
    """Opens a file like `os.open`, but does not block on a named pipe without a writer."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def _reason(error: ssl.SSLError) -> str:
    return (getattr(error, "verify_message", "") or error.reason or str(error)).rstrip(".")


async def probe(address: str, tls: Tls | None) -> str | None:
    """Returns the fault of TLS because of which a peer cannot be reached, as a predicate.

    gRPC does not report it. None if there is no listener, or if TLS is not the reason.
    """
    try:
        for _ in range(2):  # a peer that is just shutting down does not accept a second connection
            if await asyncio.wait_for(_handshake(address, tls), _PROBE_TIMEOUT_S):
                return None if tls else _WANTS_TLS
    except ssl.SSLError as error:
        return _fault_of(error, tls)
    except (OSError, asyncio.TimeoutError):
        return None
    return "does not accept the certificate of this rank: it ends the connection"


async def _handshake(address: str, tls: Tls | None) -> bool:
    """Returns False if the peer closes the connection after it has this rank's certificate."""
    host, port = host_and_port(address)
    if tls is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context = tls.client_context(host)
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        return tls is None or bool(await reader.read(1))
    finally:
        writer.transport.abort()


def _fault_of(error: ssl.SSLError, tls: Tls | None) -> str | None:
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return None  # it is shutting down
    speaks_tls = isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in (error.reason or "")
    if tls is None:
        return _WANTS_TLS if speaks_tls else None
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"has a certificate that is not accepted: {_reason(error)}"
    if speaks_tls:
        return f"does not accept the certificate of this rank: {_reason(error)}"
    return "answers without TLS, which this rank wants"
