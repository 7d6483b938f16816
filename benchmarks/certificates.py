"""Certificates for ranks on this machine."""

from __future__ import annotations

from pathlib import Path

import trustme


def write_tls_dir(parent: str) -> str:
    """Creates the files of the option `tls_dir` for ranks on this machine.

    Args:
      parent: directory in which the directory of the files is created.

    Returns:
      The path of the new directory.
    """
    directory, ca = Path(parent, "tls"), trustme.CA()
    directory.mkdir()
    issued = ca.issue_cert("127.0.0.1", "localhost")
    ca.cert_pem.write_to_path(str(directory / "ca.pem"))
    issued.cert_chain_pems[0].write_to_path(str(directory / "cert.pem"))
    (directory / "key.pem").touch(mode=0o600)
    issued.private_key_pem.write_to_path(str(directory / "key.pem"))
    return str(directory)
