"""Tokens and certificates, with ranks as real processes and with strangers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timezone
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import trustme
from certificates import HOST, OTHER_TOKEN, TOKEN, Certificates, environ_of, write_tls_dir
from cryptography import x509
from harness import jobs_of
from proxy import Proxy
from rings import NewRing, RankProcess, Spawn

from hostopt.cluster import Cluster
from hostopt.communicator import Communicator
from hostopt.errors import ConfigError
from hostopt.options import Options
from hostopt.transport.frame import FrameWriter
from hostopt.transport.grpc.transport import GrpcTransport
from hostopt.transport.message import Tag
from hostopt.transport.security import Security, check_tls_dir, read_token

WITHIN_S = 20.0  # an upper bound on a busy machine; a rendezvous has 300
SCRIPT = """
import dataclasses, logging, os, sys
import numpy as np
import hostopt
from hostopt.transport.grpc import server, timing

logging.basicConfig(stream=sys.stdout, format="%(message)s")
timing.DEFAULT = dataclasses.replace(timing.DEFAULT, progress_every_s=0.1)
if sys.argv[1:]:  # a proxy has the address that all ranks know
    server.listen_address = lambda _: sys.argv[1]
communicator = hostopt.connect()
for step in range(20):
    total = communicator.all_reduce(np.arange(50_000.0) + communicator.rank)
    assert total[1] == sum(range(communicator.size)) + communicator.size, total
communicator.finish()
print("done", flush=True)
"""


# --- runs without faults ----------------------------------------------------------------------


@pytest.mark.parametrize("way", ["nothing", "token", "token-file", "good", "token+good"])
def test_a_run_without_faults(processes: NewRing, certificates: Certificates, way: str) -> None:
    started = processes(3).start_all(SCRIPT, **environ_of(certificates, way))
    for process in started:
        assert process.exit_code() == 0, process.stderr
        assert not process.stderr


def test_a_killed_rank_of_a_ring_with_token_and_tls_is_named_by_all_others(
    processes: NewRing, certificates: Certificates
) -> None:
    ring = processes(3)
    script = SCRIPT + "sys.stdin.read()\ncommunicator.all_reduce(np.ones(9))"
    started = ring.start_all(script, **environ_of(certificates, "token+good"))
    for process in started:
        wait_for(process, "done")
    started[1].kill()
    for rank in (0, 2):
        started[rank].close_stdin()
        assert started[rank].exit_code() == 200, started[rank].stderr
        assert f"{ring.name(1)} lost" in started[rank].stderr


def test_a_rank_may_restart_during_the_rendezvous(
    processes: NewRing, certificates: Certificates
) -> None:
    ring, environ = processes(3), environ_of(certificates, "token+good")
    waiting = [ring.start(rank, SCRIPT, **environ) for rank in (0, 2)]
    wait_for(waiting[1], f"missing: worker:0 ({ring.addresses[1]})")  # the two have met
    waiting[1].kill()
    wait_for(waiting[0], f"worker:1 ({ring.addresses[2]})")
    again = [ring.start(rank, SCRIPT, **environ) for rank in (1, 2)]
    for process in (waiting[0], *again):
        assert process.exit_code() == 0, process.stderr


def wait_for(process: RankProcess, text: str) -> None:
    while text not in (line := process.line()):
        assert line, process.stderr


def test_ranks_with_the_same_token_and_different_rings(
    processes: NewRing, certificates: Certificates
) -> None:
    ring, environ = processes(3), environ_of(certificates, "token+good")
    jobs = [jobs_of(ring.addresses[:2]), jobs_of(ring.addresses)]
    for process in [ring.start(rank, SCRIPT, jobs=jobs[rank], **environ) for rank in range(2)]:
        assert process.exit_code() == 78, process.stderr
        assert '"cluster" in TF_CONFIG' in process.stderr


# --- unauthorized ranks -----------------------------------------------------------------------

# The security of each rank, and the error of each.
FAULTS = {
    "wrong token": (
        ["token", "other-token"],
        ["refuses this rank: the caller has another token"] * 2,
    ),
    "no token": (
        ["token", "nothing"],
        [
            "refuses this rank: the caller has a token, and this rank has none",
            "refuses this rank: the caller has no token, and this rank has one",
        ],
    ),
    "another CA": (
        ["good", "of-another-ca"],
        ["has a certificate that is not accepted: unable to get local issuer certificate"] * 2,
    ),
    "a CA that the others do not accept": (
        ["good", "refused"],
        [
            "has a certificate that is not accepted: unable to get local issuer certificate",
            "is refused by others: cert.pem",
        ],
    ),
    "expired certificate": (
        ["good", "expired"],
        [
            "has a certificate that is not accepted: certificate has expired",
            "is not accepted: certificate has expired",
        ],
    ),
    "certificate of another host": (
        ["good", "of-another-host"],
        [
            f"certificate is not valid for '{HOST}'",
            f"certificate is not valid for '{HOST}'",
        ],
    ),
    "plaintext to TLS": (
        ["good", "nothing"],
        ["answers without TLS, which this rank wants", "wants TLS, and this rank has no tls_dir"],
    ),
    "token to TLS": (
        ["good", "token"],
        ["answers without TLS, which this rank wants", "wants TLS, and this rank has no tls_dir"],
    ),
    "wrong token over TLS": (
        ["token+good", "other-token+good"],
        ["refuses this rank: the caller has another token"] * 2,
    ),
    "no token over TLS": (
        ["token+good", "good"],
        [
            "refuses this rank: the caller has a token, and this rank has none",
            "refuses this rank: the caller has no token, and this rank has one",
        ],
    ),
}


@pytest.mark.faults
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_unauthorized_rank_is_an_error_on_both_sides(
    processes: NewRing, certificates: Certificates, fault: str, first: int, tmp_path: Path
) -> None:
    ways, message = FAULTS[fault]
    ring, records = processes(2), tmp_path / "records"
    environ = [
        {"HOSTOPT_DEBUG_DIR": str(records), **environ_of(certificates, way)} for way in ways
    ]
    before = ring.start(first, SCRIPT, **environ[first])
    wait_for(before, "missing")
    after = ring.start(1 - first, SCRIPT, **environ[1 - first])
    started = [before, after] if first == 0 else [after, before]
    for process, expected in zip(started, message):
        assert process.exit_code(WITHIN_S) == 77, process.stderr
        assert "hostopt.errors.AuthError: rank " in process.stderr
        assert expected in process.stderr
        assert_no_token_shown(process)
    written = [path.read_text() for path in records.iterdir()]
    assert any("AuthError" in text for text in written)
    assert not any(TOKEN in text or OTHER_TOKEN in text for text in written)


@pytest.mark.faults
@pytest.mark.parametrize("way", ["other-token", "expired", "of-another-host"])
def test_an_unauthorized_rank_is_an_error_on_all_ranks(
    processes: NewRing, certificates: Certificates, way: str
) -> None:
    good = "token" if way == "other-token" else "good"
    ring = processes(4)
    started = [
        ring.start(rank, SCRIPT, **environ_of(certificates, way if rank == 2 else good))
        for rank in range(4)
    ]
    for process in started:
        assert process.exit_code(WITHIN_S) == 77, process.stderr
        assert ring.name(2) in process.stderr


def assert_no_token_shown(process: RankProcess) -> None:
    rest = process.process.stdout
    assert rest is not None
    shown = rest.read() + process.stderr
    assert TOKEN not in shown
    assert OTHER_TOKEN not in shown


# --- strangers --------------------------------------------------------------------------------


def test_strangers_do_not_affect_the_rendezvous(
    processes: NewRing, certificates: Certificates
) -> None:
    ring, environ = processes(2), environ_of(certificates, "token")
    waiting = ring.start(0, SCRIPT, **environ)
    wait_for(waiting, "missing")
    hello = json.dumps({"rank": 1, "incarnation": "77"}).encode()
    for proof in ({}, {"proof": "0" * 64, "to": ""}, {"proof": "flour"}):
        metadata = {"rank": "1", "from": "77", **proof}
        refused = call(ring.addresses[0], "Hello", hello, **metadata)
        assert refused.code() in (
            grpc.StatusCode.PERMISSION_DENIED,
            grpc.StatusCode.UNAUTHENTICATED,
        )
    late = ring.start(1, SCRIPT, **environ)
    for process in (waiting, late):
        assert process.exit_code() == 0, process.stderr


def test_a_stranger_with_another_token_is_logged(
    processes: NewRing, certificates: Certificates
) -> None:
    ring, environ = processes(2), environ_of(certificates, "token")
    waiting = ring.start(0, SCRIPT, **environ)
    wait_for(waiting, "missing")
    incarnation = call(ring.addresses[0], "Hello", b"", rank="1", proof="0" * 64).details()
    attributes = {"rank": "1", "from": "77", "to": incarnation, "proof": "0" * 64}
    refused = call(ring.addresses[0], "Hello", b"", **attributes)
    assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
    wait_for(waiting, "which claims to be rank '1': the caller has another token")
    late = ring.start(1, SCRIPT, **environ)
    for process in (waiting, late):
        assert process.exit_code() == 0, process.stderr


@pytest.mark.parametrize("method", ["Hello", "Status", "Details", "Observe", "Leave", "Stream"])
def test_a_recorded_call_of_another_incarnation_is_refused(
    spawn_grpc: Spawn, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setenv("HOSTOPT_TOKEN", TOKEN)

    def work(communicator: Communicator) -> Any:
        communicator.barrier()
        refused = None
        if communicator.rank == 1:
            transport = communicator.transport
            address = transport.cluster.ring[0].address
            former = dict(transport._authenticator.call_metadata(0, "77", method, b"{}"))
            incarnation = transport._peers.incarnations[0]
            # unchanged, with the present incarnation, and as another call of that incarnation
            other = dict(transport._authenticator.call_metadata(0, incarnation, "Other", b"{}"))
            replays = [former, {**former, "to": incarnation}, other]
            refused = [call(address, method, b"{}", **replay).code() for replay in replays]
        assert communicator.all_reduce(np.ones(3))[0] == 2
        return refused

    code = grpc.StatusCode
    _, refused = spawn_grpc(2, work)
    assert refused == [code.UNAUTHENTICATED, code.PERMISSION_DENIED, code.PERMISSION_DENIED]


def test_a_call_cannot_be_changed_or_reflected(
    spawn_grpc: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTOPT_TOKEN", TOKEN)

    def work(communicator: Communicator) -> Any:
        communicator.barrier()
        refused = None
        if communicator.rank == 1:
            transport = communicator.transport
            incarnation = transport._peers.incarnations[0]
            own = transport.cluster.ring[1].address
            message = dict(transport._authenticator.call_metadata(0, incarnation, "Status", b"{}"))
            back = {
                **message,
                "rank": "0",
                "from": incarnation,
                "to": transport._peers.incarnation,
            }
            refused = [
                call(transport.cluster.ring[0].address, "Status", b"{ }", **message).code(),
                call(own, "Status", b"{}", **back).code(),
            ]
        assert communicator.all_reduce(np.ones(3))[0] == 2
        return refused

    _, refused = spawn_grpc(2, work)
    assert refused == [grpc.StatusCode.PERMISSION_DENIED] * 2


def test_frames_of_a_stranger_are_refused(
    spawn_grpc: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTOPT_TOKEN", TOKEN)

    def work(communicator: Communicator) -> Any:
        communicator.barrier()
        refused = None
        if communicator.rank == 1:
            transport = communicator.transport
            incarnation = transport._peers.incarnations[2]
            writer = FrameWriter(transport._peers.origin(1), True)
            known = {"rank": "1", "from": transport._peers.incarnation, "to": incarnation}
            address = transport.cluster.ring[2].address
            refused = call(address, "Stream", writer.write(Tag(0, 9), b"flour"), **known).code()
        assert communicator.all_reduce(np.ones(3))[0] == 3
        return refused

    _, refused, _ = spawn_grpc(3, work)
    assert refused is grpc.StatusCode.PERMISSION_DENIED


def test_a_listener_without_the_token_is_refused(
    processes: NewRing, certificates: Certificates
) -> None:
    # answers every call, like a rank without token
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    server = grpc.server(ThreadPoolExecutor(), options=[("grpc.so_reuseport", 0)])
    handlers = dict.fromkeys(("Hello", "Status", "Leave"), handler)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("hostopt.Ring", handlers)]
    )
    ring = processes(2)
    server.add_insecure_port(ring.addresses[1])
    server.start()
    try:
        process = ring.start(0, SCRIPT, **environ_of(certificates, "token"))
        assert process.exit_code(WITHIN_S) == 77, process.stderr
        assert "answers without knowing the token" in process.stderr
    finally:
        server.stop(0).wait()


def test_a_client_without_certificate_cannot_connect(
    spawn_grpc: Spawn, certificates: Certificates
) -> None:
    ca = Path(certificates["good"], "ca.pem").read_bytes()

    def work(communicator: Communicator) -> Any:
        communicator.barrier()
        codes = []
        if communicator.rank == 1:
            address = communicator.transport.cluster.ring[0].address
            for channel in (
                grpc.secure_channel(address, grpc.ssl_channel_credentials(ca)),
                grpc.insecure_channel(address),
            ):
                with channel:
                    status = channel.unary_unary("/hostopt.Ring/Status").future(b"", timeout=30)
                    codes.append(status.exception().code())
        assert communicator.all_reduce(np.ones(3))[0] == 2
        return codes

    _, codes = spawn_grpc(2, work, tls_dir=certificates["good"])
    assert codes == [grpc.StatusCode.UNAVAILABLE] * 2


class Recorder(Proxy):
    """A proxy that records all data and causes no fault."""

    def __init__(self, target: str) -> None:
        super().__init__(target, "delay")
        self.passed = b""

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ends: list[asyncio.StreamWriter],
    ) -> None:
        while block := await reader.read(1 << 16):
            self.passed += block
            writer.write(block)


@pytest.mark.parametrize(("way", "shown"), [("token", True), ("token+good", False)])
def test_tls_encrypts_and_a_token_does_not(
    processes: NewRing, certificates: Certificates, way: str, shown: bool
) -> None:
    ring = processes(2)
    listen = ring.addresses[1]
    with Recorder(listen) as link:
        ring.addresses[1] = link.address
        environ = environ_of(certificates, way)
        started = [ring.start(0, SCRIPT, **environ), ring.start(1, SCRIPT, listen, **environ)]
        for process in started:
            assert process.exit_code() == 0, process.stderr
    gradients = np.arange(40_000.0, 40_010.0).tobytes()
    assert (gradients in link.passed) == shown
    assert (b"hostopt.Ring" in link.passed) == shown
    assert TOKEN.encode() not in link.passed


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


def test_expiry_of_a_certificate(certificates: Certificates) -> None:
    text = Path(certificates["good"], "cert.pem").read_bytes()
    expected = x509.load_pem_x509_certificate(text).not_valid_after_utc
    assert check_tls_dir(certificates["good"], HOST) == expected
    assert check_tls_dir(certificates["good"]).tzinfo is timezone.utc


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
    with pytest.raises(ConfigError, match=result):
        check_tls_dir(certificates[kind], HOST)


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
    check_tls_dir(str(directory))
    damage(directory)
    with pytest.raises(ConfigError, match=reason):
        check_tls_dir(str(directory))
    cluster = Cluster.from_dict({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "worker", 0)
    with pytest.raises(ConfigError, match=reason):
        GrpcTransport(cluster, Options(tls_dir=str(directory)))


def test_an_intermediate_ca(tmp_path: Path) -> None:
    directory = write_tls_dir(tmp_path / "tls", trustme.CA().create_child_ca())
    check_tls_dir(str(directory), HOST)


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


def call(address: str, method: str, request: bytes, **metadata: str) -> Any:
    """Calls a rank like a stranger; returns the error."""
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        path = f"/hostopt.Ring/{method}"
        given = {"metadata": tuple(metadata.items()), "timeout": 30}
        if method == "Stream":
            return channel.stream_unary(path).future(iter([request]), **given).exception()
        return channel.unary_unary(path).future(request, **given).exception()
