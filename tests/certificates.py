"""Certificates for tests, as the files of a `tls_dir`."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import trustme

HOST = "127.0.0.1"


def write_tls_dir(
    directory: Path,
    ca: trustme.CA,
    *names: str,
    trusted: trustme.CA | None = None,
    days: float = 365,
) -> Path:
    """Make a certificate.

    Args:
      directory: where the files go; made here.
      ca: who signs it.
      names: what it names; `HOST` by default.
      trusted: whose certificates its owner accepts, if not those of `ca`.
      days: how long it is valid; less than 0 for one that has expired.

    Returns:
      The directory.
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
