"""Limits of strangers: documented numbers, gRPC options, and the guard of connections."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator

import pytest
from clocks import Clock
from harness import ROOT

from hostopt.options import Options
from hostopt.process.descriptors import open_descriptors
from hostopt.transport.grpc import limits, strangers
from hostopt.transport.grpc import ring as grpc_ring
from hostopt.transport.grpc.server import server_options

SECURITY = ROOT / "docs" / "security.md"


def numbers(resource: str) -> list[int]:
    """Returns the numbers in the documented row of a resource."""
    (row,) = re.findall(rf"^\| {resource}.*? \| (.*?) \|", SECURITY.read_text(), re.MULTILINE)
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", row)]


def test_documented_limits_equal_the_code() -> None:
    kib = 1 << 10
    one, none = limits.most_strangers(1), limits.most_strangers(0)
    assert numbers("time for a handshake") == [limits.HANDSHAKE_S]
    assert numbers("time of a connection") == [limits.STRANGER_S]
    assert numbers("such connections")[:2] == [none, one - none]
    few = [limits.most_connections(size, 0) for size in (0, 1)]
    assert numbers("connections in all") == [few[0], few[1] - few[0]]
    assert limits.most_connections(1, 1000) == 500
    assert numbers("connections that count") == [limits.CONNECTIONS_OF_A_PEER]
    read = [limits.UNKNOWN_REQUESTS, limits.READ_S, limits.HEADROOM_BYTES // kib]
    assert numbers("memory of a request, without a token") == read
    note = [limits.most_note_bytes(0) // kib, 1, limits.NOTE_DEPTH]
    assert numbers("a note") == note
    assert limits.most_note_bytes(1) - limits.most_note_bytes(0) == kib
    assert numbers("metadata of a call") == [limits.MOST_HEADER_BYTES // kib]
    assert numbers("calls at the same time") == [limits.CALLS_OF_A_CONNECTION]
    assert limits.SHOWN_STRANGERS in numbers("lines of the log")


def test_server_options_have_the_limits() -> None:
    options = dict(server_options(Options(), grpc_ring.DEFAULT, 2))
    assert options["grpc.server_handshake_timeout_ms"] == 1000 * limits.HANDSHAKE_S
    assert options["grpc.max_concurrent_streams"] == limits.CALLS_OF_A_CONNECTION
    assert options["grpc.max_receive_message_length"] == limits.most_message_bytes(Options())
    assert options["grpc.max_allowed_incoming_connections"] >= limits.most_connections(2, 0)


@pytest.mark.parametrize(
    ("address", "caller"),
    [
        ("ipv4:10.0.0.1:4711", ("10.0.0.1", 4711)),
        ("ipv6:[::ffff:10.0.0.1]:4711", ("10.0.0.1", 4711)),
        ("ipv6:%5B::1%5D:4711", ("::1", 4711)),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", ("fe80::1", 4711)),
        ("unix:/tmp/socket", None),
        ("", None),
    ],
)
def test_parse_endpoint(address: str, caller: tuple[str, int] | None) -> None:
    assert strangers.parse_endpoint(address) == caller


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_probe_shuts_down_one_connection_only(
    family: socket.AddressFamily,
) -> None:
    with socket.socket(family) as server, socket.socket(socket.AF_INET) as caller:
        host = "127.0.0.1" if family == socket.AF_INET else "::"
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind((host, 0))
        server.listen()
        port = server.getsockname()[1]
        caller.connect(("127.0.0.1", port))
        accepted, _ = server.accept()
        with accepted, strangers._Probe(host, port) as probe:
            expected = ("127.0.0.1", caller.getsockname()[1])
            result = {fd: probe.endpoint(fd) for fd in open_descriptors()}
            assert {fd: each for fd, each in result.items() if each} == {
                accepted.fileno(): expected
            }
            probe.shut_down(accepted.fileno(), strangers.Endpoint("127.0.0.1", 1))
            caller.sendall(b"x")
            assert accepted.recv(9) == b"x"
            probe.shut_down(accepted.fileno(), strangers.Endpoint(*expected))
            assert caller.recv(9) == b""
            probe.release()


def test_probe_distinguishes_servers_with_the_same_port() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.2", server.getsockname()[1])) as other,
        socket.create_connection(other.getsockname()),
        other.accept()[0] as accepted,
    ):
        port = server.getsockname()[1]
        for host, is_found in (("127.0.0.1", False), ("127.0.0.2", True), ("0.0.0.0", True)):
            with strangers._Probe(host, port) as probe:
                assert (probe.endpoint(accepted.fileno()) is not None) == is_found, host


@contextlib.asynccontextmanager
async def running_guard(guard: strangers.Strangers) -> AsyncIterator[socket.socket]:
    """Runs a guard that has found one connection; yields the caller's end of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, port = server.getsockname()
        with socket.create_connection((address, port)) as caller, server.accept()[0]:
            watch = asyncio.ensure_future(guard.watch(f"{address}:{port}", port))
            while not guard._strangers and not watch.done():
                await asyncio.sleep(0.01)
            caller.setblocking(False)
            yield caller
            watch.cancel()
            await asyncio.wait([watch])


def nobody(_: strangers.Identity) -> bool:
    return False


@pytest.fixture
def quick_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SCAN_EVERY_S", 0.01)


def test_a_connection_does_not_age_while_the_process_is_frozen(
    clock: Clock, quick_scans: None
) -> None:
    clock.govern(strangers)
    guard = strangers.Strangers(2, nobody)

    async def scan() -> None:
        looked_s = guard._scanned_s
        while guard._scanned_s == looked_s:
            await asyncio.sleep(0)

    async def freeze() -> None:
        async with running_guard(guard) as caller:
            clock.advance(100 * limits.STRANGER_S)  # the fault: the loop stands still
            await scan()
            with pytest.raises(BlockingIOError):
                caller.recv(1)
            while not guard._shut_down:
                clock.advance(limits.STRANGER_S / 25)
                await scan()
            assert await asyncio.get_running_loop().sock_recv(caller, 1) == b""

    asyncio.run(asyncio.wait_for(freeze(), 30))


def test_a_stream_over_a_connection_that_was_shut_down_is_refused(
    monkeypatch: pytest.MonkeyPatch, quick_scans: None
) -> None:
    """The call may have arrived while the guard looked."""
    monkeypatch.setattr(limits, "STRANGER_S", 0.1)
    guard = strangers.Strangers(2, nobody)

    async def run() -> None:
        async with running_guard(guard) as caller:
            host, port = caller.getsockname()
            assert guard.add_stream(f"ipv4:{host}:{port - 1}", 1)
            while strangers.Endpoint(host, port) not in guard._shut_down:
                await asyncio.sleep(0)
            assert not guard.add_stream(f"ipv4:{host}:{port}", 1)
            assert strangers.Endpoint(host, port) not in guard._streams.values()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_failed_scan_is_repeated(monkeypatch: pytest.MonkeyPatch, quick_scans: None) -> None:
    monkeypatch.setattr(limits, "STRANGER_S", 0.1)
    guard, look, looks = strangers.Strangers(2, nobody), strangers.Strangers._scan, []

    def fails(*arguments: object) -> None:
        looks.append(arguments)
        if len(looks) == 1:
            raise OSError("no such luck")
        look(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(strangers.Strangers, "_scan", fails)

    async def run() -> None:
        async with running_guard(guard) as caller:
            assert await asyncio.get_running_loop().sock_recv(caller, 1) == b""

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_guard_that_fails_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, quick_scans: None
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("a bug")

    guard = strangers.Strangers(2, nobody)
    monkeypatch.setattr(guard, "_scan", fails)  # not those of other rings of this process
    asyncio.run(asyncio.wait_for(guard.watch("127.0.0.1:1", 1), 30))
    (record,) = [each for each in caplog.records if each.name == strangers.__name__]
    assert record.levelname == "WARNING"
    assert "connections of strangers are not closed any more: KeyError" in record.message
