"""Certificates for tests, as the files of a `tls_dir`."""

from __future__ import annotations

import socket
from datetime import datetime, timedelta, timezone
from pathlib import Path

import trustme

HOST = "127.0.0.1"
TOKEN = "7e3a0d3c5a1f4b60"
OTHER_TOKEN = "1b5f00d5c0ffee11"


def write_tls_dir(
    directory: Path,
    ca: trustme.CA,
    *names: str,
    trusted: trustme.CA | None = None,
    days: float = 365,
) -> Path:
    """Creates a directory with a certificate that a CA signs, and returns it.

    Args:
      names: names or IP addresses in the certificate; `HOST` by default.
      trusted: CA that the rank trusts, if not `ca`.
      days: validity; negative for an expired certificate.
    """
    directory.mkdir()
    now = datetime.now(timezone.utc)
    begin, end = now - timedelta(days=9), now + timedelta(days=days)
    issued = ca.issue_cert(*(names or (HOST,)), not_before=begin, not_after=end)
    (trusted or ca).cert_pem.write_to_path(str(directory / "ca.pem"))
    chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
    (directory / "cert.pem").write_bytes(chain)
    key = directory / "key.pem"
    key.touch(mode=0o600)
    key.write_bytes(issued.private_key_pem.bytes())
    return directory


class Certificates:
    """Directories with matching and with faulty certificates, and token files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ca, self._other_ca = trustme.CA(), trustme.CA()

    def __getitem__(self, kind: str) -> str:
        directory = self._directory / kind
        if not directory.exists():
            self._make(kind, directory)
        return str(directory)

    def _make(self, kind: str, directory: Path) -> None:
        if kind == "token-file":
            directory.touch(mode=0o600)
            directory.write_text(f"{TOKEN}\n")
        elif kind == "good":
            write_tls_dir(directory, self._ca)
        elif kind == "expired":
            write_tls_dir(directory, self._ca, days=-1)
        elif kind == "of-another-ca":
            write_tls_dir(directory, self._other_ca)
        elif kind == "refused":  # this rank accepts the others, which do not accept it
            write_tls_dir(directory, self._other_ca, trusted=self._ca)
        elif kind == "of-this-host":
            write_tls_dir(directory, self._ca, socket.gethostname())
        elif kind == "of-another-host":
            write_tls_dir(directory, self._ca, "10.0.0.1")
        else:
            raise ValueError(kind)


def environ_of(certificates: Certificates, way: str) -> dict[str, str]:
    """Returns the variables of a rank with a token or certificates, such as "token+expired"."""
    environ: dict[str, str] = {}
    for part in way.split("+"):
        if part in ("token", "other-token"):
            environ["HOSTOPT_TOKEN"] = TOKEN if part == "token" else OTHER_TOKEN
        elif part == "token-file":
            environ["HOSTOPT_TOKEN_FILE"] = certificates[part]
        elif part != "nothing":
            environ["HOSTOPT_TLS_DIR"] = certificates[part]
    return {"HOSTOPT_RENDEZVOUS_TIMEOUT_S": "300", **environ}
