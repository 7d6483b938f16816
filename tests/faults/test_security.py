"""Tokens and certificates, with ranks as real processes and with strangers."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from callers import call
from certificates import HOST, OTHER_TOKEN, TOKEN, Certificates, environ_of
from harness import jobs_of
from proxy import Proxy
from rings import NewRing, RankProcess

WITHIN_S = 20.0  # an upper bound on a busy machine; a rendezvous has 300
SCRIPT = """
import dataclasses, logging, os, sys
import numpy as np
import hostopt
from hostopt.transport.grpc import server
from hostopt.transport.grpc import ring as grpc_ring

logging.basicConfig(stream=sys.stdout, format="%(message)s")
grpc_ring.DEFAULT = dataclasses.replace(grpc_ring.DEFAULT, progress_every_s=0.1)
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


# --- checksums --------------------------------------------------------------------------------
