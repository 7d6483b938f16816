"""The bounds of what a stranger can take are those of SECURITY.md, and of gRPC's server."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from hostopt.options import Options
from hostopt.transport import limits, strangers
from hostopt.transport.grpc_parts import server_options

SECURITY = Path(__file__).resolve().parents[1] / "SECURITY.md"


def numbers(resource: str) -> list[int]:
    """The numbers in the row of the table that begins so."""
    (row,) = re.findall(rf"^\| {resource}.*? \| (.*?) \|", SECURITY.read_text(), re.MULTILINE)
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", row)]


def test_the_table_has_the_numbers_of_the_code() -> None:
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


def test_the_server_has_them() -> None:
    options = dict(server_options(Options(), 2))
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
def test_who_calls_as_grpc_says_it(address: str, caller: tuple[str, int] | None) -> None:
    assert strangers._caller(address) == caller


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_connection_is_found_among_descriptors_and_no_other_is_touched(
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
        with accepted, strangers._Probe(port) as probe:
            wanted = ("127.0.0.1", caller.getsockname()[1])
            found = {fd: probe.caller(fd) for fd in strangers._open_descriptors()}
            assert {fd: each for fd, each in found.items() if each} == {accepted.fileno(): wanted}
            probe.shut_down(accepted.fileno(), strangers.Caller("127.0.0.1", 1))
            caller.sendall(b"x")
            assert accepted.recv(9) == b"x"
            probe.shut_down(accepted.fileno(), strangers.Caller(*wanted))
            assert caller.recv(9) == b""
            probe.look_away()
