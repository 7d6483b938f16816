"""Tokens and certificates, with ranks as real processes and with strangers."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timezone
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import trustme
from callers import beside_a_ring, call
from certificates import HOST, OTHER_TOKEN, TOKEN, Certificates, write_tls_dir
from cryptography import x509
from harness import jobs_of
from rings import Spawn

from hostopt.cluster.cluster import Cluster
from hostopt.collectives.communicator import Communicator
from hostopt.errors import ConfigError
from hostopt.options import Options
from hostopt.transport.frame import FrameWriter
from hostopt.transport.grpc.transport import GrpcTransport
from hostopt.transport.message import Tag
from hostopt.transport.security import Identity, Security, Tls, read_token

# --- strangers --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["Hello", "Status", "Details", "Observe", "Leave", "Stream"])
def test_a_recorded_call_of_another_incarnation_is_refused(
    spawn_grpc: Spawn, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setenv("HOSTOPT_TOKEN", TOKEN)

    def refused(communicator: Communicator) -> Any:
        transport = communicator.transport
        address = transport.cluster.ring[0].address
        former = dict(
            transport._client.authenticator.call_metadata(Identity(0, "77"), method, b"{}")
        )
        incarnation = transport._peers.incarnations[0]
        called = Identity(0, incarnation)
        # unchanged, with the present incarnation, and as another call of that incarnation
        other = dict(transport._client.authenticator.call_metadata(called, "Other", b"{}"))
        replays = [former, {**former, "to": incarnation}, other]
        return [call(address, method, b"{}", **replay).code() for replay in replays]

    code = grpc.StatusCode
    expected = [code.UNAUTHENTICATED, code.PERMISSION_DENIED, code.PERMISSION_DENIED]
    assert beside_a_ring(spawn_grpc, refused) == expected


def test_a_call_cannot_be_changed_or_reflected(
    spawn_grpc: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTOPT_TOKEN", TOKEN)

    def refused(communicator: Communicator) -> Any:
        transport = communicator.transport
        incarnation = transport._peers.incarnations[0]
        own = transport.cluster.ring[1].address
        called = Identity(0, incarnation)
        message = dict(transport._client.authenticator.call_metadata(called, "Status", b"{}"))
        back = {"rank": "0", "from": incarnation, "to": transport._peers.incarnation}
        return [
            call(transport.cluster.ring[0].address, "Status", b"{ }", **message).code(),
            call(own, "Status", b"{}", **{**message, **back}).code(),
        ]

    assert beside_a_ring(spawn_grpc, refused) == [grpc.StatusCode.PERMISSION_DENIED] * 2


def test_frames_of_a_stranger_are_refused(
    spawn_grpc: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTOPT_TOKEN", TOKEN)

    def refused(communicator: Communicator) -> Any:
        transport = communicator.transport
        incarnation = transport._peers.incarnations[2]
        writer = FrameWriter(transport._peers.origin(1), True)
        known = {"rank": "1", "from": transport._peers.incarnation, "to": incarnation}
        address = transport.cluster.ring[2].address
        return call(address, "Stream", writer.write(Tag(0, 9), b"flour"), **known).code()

    assert beside_a_ring(spawn_grpc, refused, 3) is grpc.StatusCode.PERMISSION_DENIED


def test_a_client_without_certificate_cannot_connect(
    spawn_grpc: Spawn, certificates: Certificates
) -> None:
    ca = Path(certificates["good"], "ca.pem").read_bytes()

    def codes(communicator: Communicator) -> Iterator[Any]:
        address = communicator.transport.cluster.ring[0].address
        for channel in (
            grpc.secure_channel(address, grpc.ssl_channel_credentials(ca)),
            grpc.insecure_channel(address),
        ):
            with channel:
                status = channel.unary_unary("/hostopt.Ring/Status").future(b"", timeout=30)
                yield status.exception().code()

    result = beside_a_ring(spawn_grpc, lambda ring: [*codes(ring)], tls_dir=certificates["good"])
    assert result == [grpc.StatusCode.UNAVAILABLE] * 2


# --- unusable tokens and certificates ---------------------------------------------------------


@pytest.mark.parametrize("host", ["10.0.0.1", "host0", "0.0.0.0", "[fe80::1]"])
def test_a_ring_over_several_machines_needs_token_or_certificates(
    certificates: Certificates, host: str
) -> None:
    jobs = {"worker": ["127.0.0.1:2222", f"{host}:2222"]}
    cluster = Cluster.from_dict(jobs, "worker", 0)
    with pytest.raises(ConfigError, match="neither a token nor certificates") as caught:
        GrpcTransport(cluster, Options())
    for expected in (f"{host}:2222", "token_file", "HOSTOPT_TOKEN", "tls_dir", "insecure=True"):
        assert expected in str(caught.value)
    Security(cluster, Options(insecure=True))
    Security(cluster, Options(), {"HOSTOPT_TOKEN": TOKEN})
    Security(cluster, Options(tls_dir=certificates["good"]))


def test_evaluators_need_token_or_certificates() -> None:
    jobs = {"worker": ["127.0.0.1:1"], "evaluator": ["127.0.0.1:2", "10.0.0.1:2"]}
    ring = Cluster.from_dict(jobs, "evaluator", 0).evaluator_ring()
    with pytest.raises(ConfigError, match="neither a token nor certificates"):
        GrpcTransport(ring, Options())


def test_ranks_with_loopback_addresses_listen_on_loopback_only(spawn_grpc: Spawn) -> None:
    def work(communicator: Communicator) -> list[str]:
        communicator.barrier()
        ports = [address.rpartition(":")[2] for address in addresses_of(communicator)]
        listening = [
            connection.laddr.ip.rpartition(":")[2]  # ::ffff:127.0.0.1 is IPv4
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and str(connection.laddr.port) in ports
        ]
        communicator.barrier()
        return listening

    for listening in spawn_grpc(2, work):
        assert listening == ["127.0.0.1", "127.0.0.1"]


def addresses_of(communicator: Communicator) -> list[str]:
    return [task.address for task in communicator.transport.cluster.ring]


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_token_file(tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(mode)
    assert read_token(Options(token_file=str(path)), {}) == TOKEN.encode()
    other = {"HOSTOPT_TOKEN": OTHER_TOKEN}
    assert read_token(Options(token_file=str(path)), other) == OTHER_TOKEN.encode()
    assert read_token(Options(), {}) is None
    monkeypatch.setattr(os, "environ", other)
    assert read_token(Options()) == OTHER_TOKEN.encode()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o777])
def test_a_token_file_that_others_can_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}") as caught:
        read_token(Options(token_file=str(path)), {})
    assert f"{mode:04o}" in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_an_empty_or_missing_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    options = Options(token_file=str(path))
    with pytest.raises(ConfigError, match=f"{path} cannot be read: No such file"):
        read_token(options, {})
    path.touch(mode=0o600)
    path.write_text(" \n")
    with pytest.raises(ConfigError, match=f"{path} is empty"):
        read_token(options, {})
    with pytest.raises(ConfigError, match="HOSTOPT_TOKEN is empty"):
        read_token(Options(), {"HOSTOPT_TOKEN": ""})


def test_a_token_in_a_pipe_without_a_writer_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token", 0o600)
    with pytest.raises(ConfigError, match="is empty, expected a token"):
        read_token(Options(token_file=str(tmp_path / "token")), {})


def test_a_token_may_come_through_a_pipe() -> None:
    reader, writer = os.pipe()
    try:
        later = threading.Timer(0.1, lambda: (os.write(writer, b"secret"), os.close(writer)))
        later.start()
        assert read_token(Options(token_file=f"/dev/fd/{reader}"), {}) == b"secret"
        later.join()
    finally:
        os.close(reader)


def test_a_token_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").touch(mode=0o600)
    os.truncate(tmp_path / "token", 1 << 40)
    with pytest.raises(ConfigError, match=r"more than 1048576 bytes\. Give"):
        read_token(Options(token_file=str(tmp_path / "token")), {})


@pytest.mark.parametrize("path", ["/", "/etc/passwd/x", "/no/such", "x" * 5000])
def test_a_token_that_cannot_be_read(path: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: .*\. Give a file"):
        read_token(Options(token_file=path), {})


def test_expiry_of_a_certificate(certificates: Certificates) -> None:
    text = Path(certificates["good"], "cert.pem").read_bytes()
    expected = x509.load_pem_x509_certificate(text).not_valid_after_utc
    assert Tls(certificates["good"]).fault(HOST) is None
    assert Tls(certificates["good"]).expires == expected
    assert Tls(certificates["good"]).expires.tzinfo is timezone.utc


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("expired", "certificate has expired"),
        ("refused", "unable to get local issuer certificate"),
        ("of-another-host", f"not valid for '{HOST}'"),
    ],
)
def test_a_certificate_that_peers_would_refuse(
    certificates: Certificates, kind: str, result: str
) -> None:
    assert result in str(Tls(certificates[kind]).fault(HOST))


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no ca": (lambda path: (path / "ca.pem").unlink(), "ca.pem .* cannot be read"),
    "no certificate": (lambda path: (path / "cert.pem").unlink(), "cert.pem .* cannot be read"),
    "no key": (lambda path: (path / "key.pem").unlink(), "key.pem .* cannot be read"),
    "open key": (lambda path: (path / "key.pem").chmod(0o640), "chmod 600 .*key.pem"),
    "ca no PEM": (lambda path: (path / "ca.pem").write_text("flour"), "ca.pem .* in PEM format"),
    "empty ca": (lambda path: (path / "ca.pem").write_text(""), "ca.pem .* in PEM format"),
    "certificate no PEM": (
        lambda path: (path / "cert.pem").write_text("flour"),
        "cert.pem .* in PEM format",
    ),
    "key of another": (
        lambda path: (path / "key.pem").write_bytes(
            trustme.CA().issue_cert(HOST).private_key_pem.bytes()
        ),
        "cert.pem .*KEY_VALUES_MISMATCH",
    ),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_unusable_files_of_a_tls_dir(tmp_path: Path, fault: str) -> None:
    damage, reason = BAD_FILES[fault]
    directory = write_tls_dir(tmp_path / "tls", trustme.CA())
    Tls(str(directory))
    damage(directory)
    with pytest.raises(ConfigError, match=reason):
        Tls(str(directory))
    cluster = Cluster.from_dict({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "worker", 0)
    with pytest.raises(ConfigError, match=reason):
        GrpcTransport(cluster, Options(tls_dir=str(directory)))


def test_an_intermediate_ca(tmp_path: Path) -> None:
    directory = write_tls_dir(tmp_path / "tls", trustme.CA().create_child_ca())
    assert Tls(str(directory)).fault(HOST) is None


# --- checksums --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "options", "expected"),
    [
        ("insecure", {"insecure": True}, True),
        ("token", {}, True),
        ("tls", {}, False),
        ("tls", {"checksum": True}, True),
    ],
)
def test_default_checksum(
    spawn_grpc: Spawn,
    monkeypatch: pytest.MonkeyPatch,
    certificates: Certificates,
    way: str,
    options: dict[str, Any],
    expected: bool,
) -> None:
    def named(addresses: list[str]) -> dict[str, list[str]]:
        """Uses the name of this machine, as on several machines; it may be a loopback address."""
        return jobs_of([address.replace(HOST, socket.gethostname()) for address in addresses])

    def work(communicator: Communicator) -> bool:
        assert communicator.all_reduce(np.ones(3))[0] == 2
        return bool(communicator.transport._streams.to(1 - communicator.rank)._writer._checksum)

    monkeypatch.setattr("rings.jobs_of", named)
    if way == "token":
        monkeypatch.setenv("HOSTOPT_TOKEN", TOKEN)
    if way == "tls":
        options = {**options, "tls_dir": certificates["of-this-host"]}
    result = spawn_grpc(2, work, **options)
    assert result == [expected, expected]
