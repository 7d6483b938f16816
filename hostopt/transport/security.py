"""Who may take part in a ring: a token that all ranks share, certificates, or this machine alone.

The token itself is never sent. Who calls, and who answers, proves to know it: by an HMAC of what
is said, by which rank to which, in which incarnations. Those are drawn at random for each life of
a rank, so that a proof that was recorded is of no use in another ring or life; the kind and
direction of a message are part of it, so that none can be sent back. Nothing here knows gRPC.
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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hostopt import descriptors
from hostopt.cluster import Cluster
from hostopt.errors import ConfigError
from hostopt.options import Options
from hostopt.transport.addresses import host_and_port, is_loopback

__all__: list[str] = []

_CA, _CERT, _KEY = "ca.pem", "cert.pem", "key.pem"
_ROUND_TRIPS = 4  # more than any handshake of TLS takes
# A CA that another one has signed is trusted too, as by gRPC; Python 3.9 has no name for it.
_PARTIAL_CHAIN = 0x80000
_PROBE_TIMEOUT_S = 1.0
_MAX_FILE_BYTES = 1 << 20  # of a token or certificates
_WANTS_TLS = "wants TLS, and this rank has no tls_dir"


def read_token(options: Options, environ: Mapping[str, str] | None = None) -> bytes | None:
    """Read the token that all ranks share.

    Args:
      options: `token_file` names the file.
      environ: HOSTOPT_TOKEN in it, the token itself, counts more than the file; `os.environ` by
        default.

    Returns:
      The token, without white space around it; None where there is none.

    Raises:
      ConfigError: the file cannot be read, others than its owner may use it, or it is empty.
    """
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
            f"{source} is empty, wanted a token that all ranks share. Make one with "
            "`openssl rand -hex 32`"
        )
    return token.strip()


def check_tls_dir(path: str, host: str | None = None) -> datetime:
    """Make sure that a rank can meet others with the certificate of a directory.

    Args:
      path: directory with ca.pem, cert.pem and key.pem.
      host: name or IP address of this rank in TF_CONFIG, which the certificate must name.

    Returns:
      When the certificate expires, in UTC.

    Raises:
      ConfigError: a file is missing or no PEM, others than its owner may use key.pem, the key is
        not that of the certificate, or a peer that trusts ca.pem would refuse the certificate.
    """
    tls = Tls(path)
    fault = tls.fault(host)
    if fault is not None:
        raise ConfigError(f"{fault}. Make a new one: see SECURITY.md")
    return tls.expires


class Security:
    """How the ranks of one ring make sure of each other.

    Args:
      cluster: the ring and this rank's place in it.
      options: `token_file`, `tls_dir` and `insecure`.
      environ: where HOSTOPT_TOKEN is looked up.

    Attributes:
      tls: the certificates of this rank, None where it has none.
      own_fault: why peers would refuse them; None where they would not.

    Raises:
      ConfigError: token or certificates cannot be used, or the ring needs them and has neither.
    """

    def __init__(
        self, cluster: Cluster, options: Options, environ: Mapping[str, str] | None = None
    ) -> None:
        self._token = read_token(options, environ)
        self.tls = None if options.tls_dir is None else Tls(options.tls_dir)
        own = None if cluster.task is None else host_and_port(cluster.task.address)[0]
        self.own_fault = None if self.tls is None else self.tls.fault(own)
        others = [task for task in cluster.ring if not is_loopback(task.address)]
        if others and not (self.has_token or self.tls or options.insecure):
            raise ConfigError(
                f"the ring has addresses that other machines reach, such as that of {others[0]}, "
                "and neither a token nor certificates. Give all ranks the same token, in a "
                "token_file or in HOSTOPT_TOKEN, or each a tls_dir (see SECURITY.md). Where "
                "nobody else can reach these addresses, insecure=True does without"
            )

    @property
    def has_token(self) -> bool:
        """Whether the ranks prove to know a token."""
        return self._token is not None

    def proof(self, *facts: str, body: bytes) -> str:
        """Prove to know the token.

        Args:
          facts: what is said by whom to whom, in which lives.
          body: the message.

        Returns:
          Hexadecimal HMAC-SHA256 of all that, under the token.
        """
        said = json.dumps(facts).encode() + b"\n" + body
        return hmac.new(self._token or b"", said, hashlib.sha256).hexdigest()

    def is_proof(self, found: str, *facts: str, body: bytes) -> bool:
        """Whether this is the `proof` of these facts and this message."""
        wanted = self.proof(*facts, body=body)
        return hmac.compare_digest(found.encode(), wanted.encode())


class Tls:
    """The certificates of one rank; the files are read once.

    Args:
      path: directory with ca.pem, cert.pem and key.pem.

    Raises:
      ConfigError: they cannot be used at all; `fault` tells whether peers would accept them.
    """

    def __init__(self, path: str) -> None:
        self._directory = Path(path)
        what = f"tls_dir {path}"
        self.ca, self.cert, self.key = (
            _read(self._directory / name, f"{name} of {what}", is_secret=name == _KEY)
            for name in (_CA, _CERT, _KEY)
        )
        self._context(ssl.PROTOCOL_TLS_SERVER)  # raises where they are of no use

    @property
    def expires(self) -> datetime:
        """When the certificate expires, in UTC, of one that has no `fault`."""
        seconds = ssl.cert_time_to_seconds(str(self._meet_itself(None)["notAfter"]))
        return datetime.fromtimestamp(seconds, timezone.utc)

    def fault(self, host: str | None) -> str | None:
        """Why a peer with the same CA would refuse the certificate; None where it would not.

        Args:
          host: name or IP address that the certificate must name; None for any.
        """
        try:
            self._meet_itself(host)
        except ssl.SSLError as error:
            return f"{_CERT} of tls_dir {self._directory} is not accepted: {_reason(error)}"
        return None

    def client_context(self, host: str | None) -> ssl.SSLContext:
        """How this rank calls others.

        Args:
          host: what is called, which its certificate must name; None for any.
        """
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = host is not None
        return context

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.set_alpn_protocols(["h2"])
        context.verify_flags |= _PARTIAL_CHAIN
        try:
            context.load_verify_locations(self._directory / _CA)
        except ssl.SSLError as error:
            raise self._unusable(_CA, "certificates of a CA, as PEM", error) from None
        try:
            context.load_cert_chain(
                self._directory / _CERT, self._directory / _KEY, password=self._refuse_password
            )
        except ssl.SSLError as error:
            wanted = f"a certificate, as PEM, and in {_KEY} its key"
            raise self._unusable(_CERT, wanted, error) from None
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _refuse_password(self) -> str:
        raise ConfigError(
            f"{_KEY} of tls_dir {self._directory} has a password, wanted a key without: "
            f"the file must be readable by its owner alone instead"
        )

    def _unusable(self, name: str, wanted: str, error: ssl.SSLError) -> ConfigError:
        found = f"cannot be used ({_reason(error)})"
        return ConfigError(f"{name} of tls_dir {self._directory} {found}, wanted {wanted}")

    def _meet_itself(self, host: str | None) -> dict[str, Any]:
        """A handshake of this rank with itself, in memory; returns the certificate."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.client_context(host).wrap_bio(to_client, to_server, server_hostname=host)
        server = self._context(ssl.PROTOCOL_TLS_SERVER).wrap_bio(
            to_server, to_client, server_side=True
        )
        for _ in range(_ROUND_TRIPS):
            for end in (client, server):
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        return client.getpeercert() or {}


def _read(path: Path, what: str, *, is_secret: bool) -> bytes:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        descriptors.check(error)
        raise ConfigError(
            f"{what} cannot be read: {error.strerror}. Name one that this user can read"
        ) from None
    if is_secret and mode & 0o077:
        raise ConfigError(
            f"{what} has the mode {mode:04o}, so that others may use it, wanted 0600 or less. "
            f"Run `chmod 600 {path}`, and make a new one where others could have read it"
        )
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(
            f"{what} has more than {_MAX_FILE_BYTES} bytes. Name the file that was meant"
        )
    return content


def _open_at_once(path: str, flags: int) -> int:
    """Open a file as `os.open` does, but a named pipe into which nobody writes is empty."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def _reason(error: ssl.SSLError) -> str:
    return (getattr(error, "verify_message", "") or error.reason or str(error)).rstrip(".")


async def probe(address: str, tls: Tls | None) -> str | None:
    """Find out why a peer cannot be reached, where TLS is why: gRPC does not tell.

    Args:
      address: ``host:port`` of the peer.
      tls: certificates of this rank; None where it has none.

    Returns:
      What is wrong, said of the peer; None where nobody is there, or TLS is not why.
    """
    try:
        for _ in range(2):  # one that ends would not let itself be called again
            if await asyncio.wait_for(_shake_hands(address, tls), _PROBE_TIMEOUT_S):
                return None if tls else _WANTS_TLS
    except ssl.SSLError as error:
        return _explain(error, tls)
    except (OSError, asyncio.TimeoutError):
        return None
    return "does not accept the certificate of this rank: it ends the connection"


async def _shake_hands(address: str, tls: Tls | None) -> bool:
    """Returns False where the peer goes once it has seen this rank's certificate."""
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


def _explain(error: ssl.SSLError, tls: Tls | None) -> str | None:
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return None  # it ends
    speaks_tls = isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in (error.reason or "")
    if tls is None:
        return _WANTS_TLS if speaks_tls else None
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"has a certificate that is not accepted: {_reason(error)}"
    if speaks_tls:
        return f"does not accept the certificate of this rank: {_reason(error)}"
    return "answers without TLS, which this rank wants"
