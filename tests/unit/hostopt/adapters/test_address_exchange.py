"""Ranks that exchange their addresses, over real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from clocks import Clock
from harness import deadline_s, reserved_addresses, split_address, until

from hostopt.adapters import rendezvous
from hostopt.adapters.launchers import Place
from hostopt.adapters.rendezvous import exchange
from hostopt.errors import AuthError, ConfigError, RendezvousTimeoutError

Rendezvous = str
TIMEOUT_S = 300.0  # of the exchange


@pytest.fixture(params=["unix", "tcp"])
def at(request: pytest.FixtureRequest) -> Iterator[Rendezvous]:
    if request.param == "unix":
        yield f"@{uuid.uuid4()}"
        return
    with reserved_addresses(1) as (address,):
        yield address


@pytest.fixture(autouse=True)
def clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all ranks, which try again at once."""
    clock.govern(rendezvous)
    monkeypatch.setattr(rendezvous, "RETRY_S", 0.01)
    return clock


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[rendezvous.Peer]:
    """A list that gets an entry when a peer is about to connect."""
    noted: list[rendezvous.Peer] = []
    connect = rendezvous.Peer._connect

    def note(peer: rendezvous.Peer) -> socket.socket:
        noted.append(peer)
        return connect(peer)

    monkeypatch.setattr(rendezvous.Peer, "_connect", note)
    return noted


@pytest.fixture
def rank_0_gives_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets peers wait for the last message of rank 0, however far the clock is advanced."""
    for name in ("_SILENCE_S", "_GRACE_S"):
        monkeypatch.setattr(rendezvous, name, 1e6)


def place(at: Rendezvous, rank: int, size: int, host: str | None = None) -> Place:
    return Place("test", rank, size, rendezvous=at, host=host)


def started(
    at: Rendezvous, ranks: list[int], size: int, tokens: Any = None
) -> list[Future[list[str]]]:
    pool = ThreadPoolExecutor(len(ranks))
    tokens = tokens if isinstance(tokens, list) else [tokens] * len(ranks)
    results = [
        pool.submit(exchange, place(at, rank, size), 1000 + rank, token, TIMEOUT_S)
        for rank, token in zip(ranks, tokens)
    ]
    pool.shutdown(wait=False)
    return results


def result(future: Future[list[str]]) -> list[str]:
    return future.result(deadline_s(60.0))


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("token", [None, b"secret"])
def test_all_ranks_learn_all_addresses(at: Rendezvous, size: int, token: bytes | None) -> None:
    # rank 0 comes last
    futures = started(at, list(reversed(range(size))), size, token)
    wanted = [f"127.0.0.1:{1000 + rank}" for rank in range(size)]
    assert [result(each) for each in futures] == [wanted] * size


def test_names_of_machines_are_announced() -> None:
    with reserved_addresses(1) as (at,), ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(exchange, place(at, i, 2, f"node{i}"), 7, None, TIMEOUT_S)
            for i in range(2)
        ]
        assert [result(each) for each in futures] == [["node0:7", "node1:7"]] * 2


@pytest.mark.parametrize("tokens", [[b"a", b"b"], [b"a", None], [None, b"b"]])
def test_another_token_is_refused(
    at: Rendezvous, clock: Clock, attempts: list[rendezvous.Peer], tokens: list[bytes | None]
) -> None:
    first, second = started(at, [0, 1], 2, tokens)
    until(lambda: second.done() or any(peer._refusal for peer in attempts), "refusal")
    clock.advance(TIMEOUT_S)
    with pytest.raises(AuthError, match="rank 1 has another token"):
        result(first)
    # without a token, rank 1 believes what it is told
    kind: Any = AuthError if tokens[1] is None else RendezvousTimeoutError
    with pytest.raises(kind, match="another token"):
        result(second)


def test_missing_ranks_are_named(
    at: Rendezvous, clock: Clock, attempts: list[rendezvous.Peer], rank_0_gives_up_first: None
) -> None:
    first, third = started(at, [0, 2], 4)
    until(lambda: attempts and attempts[0]._missing == [1, 3], "registration")
    clock.advance(TIMEOUT_S)
    with pytest.raises(RendezvousTimeoutError, match=r"for rank 1, 3\."):
        result(first)
    with pytest.raises(RendezvousTimeoutError, match=r"for rank 1, 3\."):
        result(third)


def test_a_peer_without_rank_0_names_it(
    at: Rendezvous, clock: Clock, attempts: list[rendezvous.Peer]
) -> None:
    (third,) = started(at, [2], 4)
    until(lambda: len(attempts) > 1, "second attempt")
    clock.advance(TIMEOUT_S)
    with pytest.raises(RendezvousTimeoutError, match=r"rank 2 of 4 .* for rank 0\."):
        result(third)


def test_a_rank_of_another_ring_is_refused(at: Rendezvous, clock: Clock) -> None:
    (first,) = started(at, [0], 2)
    (other,) = started(at, [2], 3)
    with pytest.raises(ConfigError, match="rank 2 of 3 has connected to rank 0 of 2"):
        result(other)
    clock.advance(TIMEOUT_S)
    with pytest.raises(RendezvousTimeoutError, match="for rank 1"):
        result(first)


def test_the_same_rank_twice_is_refused(at: Rendezvous) -> None:
    (first,) = started(at, [0], 3)
    both = [
        ThreadPoolExecutor(1).submit(exchange, place(at, 1, 3), port, None, TIMEOUT_S)
        for port in (1001, 1002)
    ]
    until(lambda: any(each.done() for each in both), "refusal")
    with pytest.raises(ConfigError, match="two processes have rank 1"):
        result(next(each for each in both if each.done()))
    (last,) = started(at, [2], 3)
    assert result(last) == result(first)


def test_rank_0_cannot_listen() -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        at = f"127.0.0.1:{occupied.getsockname()[1]}"
        with pytest.raises(ConfigError, match="HOSTOPT_RENDEZVOUS"):
            exchange(place(at, 0, 2), 1, None, TIMEOUT_S)


def connected(at: Rendezvous) -> socket.socket:
    if at.startswith("@"):
        stranger = socket.socket(socket.AF_UNIX)
        address: Any = f"\0hostopt-{os.getuid()}-{at[1:]}"
    else:
        stranger, address = socket.socket(), split_address(at)
    stranger.settimeout(deadline_s(10.0))

    def connects() -> bool:
        return stranger.connect_ex(address) == 0

    until(connects, "rank 0")
    return stranger


# The calls of strangers, or what they send.
STRANGERS: dict[str, Callable[[socket.socket], None] | bytes] = {
    "silent": lambda stranger: None,
    "leaves": lambda stranger: stranger.close(),
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "json": b'{"fields": 1}\n',
    "huge number": b'{"fields": ["", 1e99, 2, "a:1", ""], "proof": ""}\n',
    "half a rank": b'{"fields": ["", 0.5, 2, "a:1", ""], "proof": ""}\n',
    "lists": b'{"fields": ["", [], 2, "a:1", ""], "proof": ""}\n',
    "no address": b'{"fields": ["", 1, 2, "a", ""], "proof": ""}\n',
    "no nonce": b'{"fields": ["", 1, 2, "a:1", 7], "proof": ""}\n',
    "deep": b"[" * 100_000 + b"\n",
    "half a line": b'{"fields": [',
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_do_not_disturb(at: Rendezvous, name: str) -> None:
    (first,) = started(at, [0], 2)
    strangers = [connected(at) for _ in range(3)]
    for stranger in strangers:
        action = STRANGERS[name]
        stranger.sendall(action) if isinstance(action, bytes) else action(stranger)
    (second,) = started(at, [1], 2)
    assert result(first) == result(second)
    for stranger in strangers:
        stranger.close()


def test_idle_strangers_leave_room(at: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_REGISTER_TIMEOUT_S", 1e6)  # none of them is late
    (first,) = started(at, [0], 2)
    with contextlib.ExitStack() as stack:
        for _ in range(2 * rendezvous._SPARE_CONNECTIONS):
            stack.enter_context(connected(at))
        (second,) = started(at, [1], 2)
        assert result(first) == result(second)


def test_a_line_without_end_is_cut_off(at: Rendezvous) -> None:
    (first,) = started(at, [0], 2)
    stranger = connected(at)
    sent = threading.Event()

    def send() -> None:
        try:
            for _ in range(64):
                stranger.sendall(b"x" * (1 << 20))
        except OSError:
            sent.set()

    threading.Thread(target=send, daemon=True).start()
    assert sent.wait(deadline_s(20.0))
    (second,) = started(at, [1], 2)
    assert result(first) == result(second)
    stranger.close()


def test_rank_0_that_ends_and_starts_again_is_found(at: Rendezvous) -> None:
    (second,) = started(at, [1], 2)
    if at.startswith("@"):
        host, address = socket.socket(socket.AF_UNIX), None
        host.bind(f"\0hostopt-{os.getuid()}-{at[1:]}")
    else:
        host, address = socket.socket(), split_address(at)
        host.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        host.bind(address)
    host.listen()
    connection, _ = host.accept()  # a first rank 0, which dies
    connection.close()
    host.close()
    (first,) = started(at, [0], 2)
    assert result(first) == result(second)


def test_runs_at_the_same_rendezvous_do_not_mix(
    at: Rendezvous, clock: Clock, attempts: list[rendezvous.Peer]
) -> None:
    places = [replace(place(at, rank, 2), run_id=run) for rank, run in [(0, "a"), (1, "b")]]
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(exchange, places[0], 1, None, 2 * TIMEOUT_S)
        connected(at).close()  # rank 0 listens
        other = pool.submit(exchange, places[1], 1, None, TIMEOUT_S)
        until(lambda: len(attempts) > 1, "refusal")
        clock.advance(TIMEOUT_S)
        with pytest.raises(RendezvousTimeoutError, match="for rank 0"):
            result(other)
        second = replace(places[1], run_id="a")
        assert exchange(second, 2, None, TIMEOUT_S) == result(first)


def registered(at: Rendezvous, rank: int, size: int, port: int) -> socket.socket:
    """Connects to rank 0, and registers a rank."""
    peer = connected(at)
    with peer.makefile("rb") as lines:
        assert "nonce" in json.loads(lines.readline())
        fields = ["", rank, size, f"127.0.0.1:{port}", "nonce"]
        peer.sendall(rendezvous.line(fields=fields, proof=""))
        assert json.loads(lines.readline())["kind"] == "missing"
    return peer


def test_a_rank_that_dies_before_the_end_may_be_replaced(at: Rendezvous) -> None:
    (first,) = started(at, [0], 3)
    with registered(at, 1, 3, port=7):
        pass
    second, third = started(at, [1, 2], 3)
    assert result(first) == result(second) == result(third)
    assert result(first)[1] == "127.0.0.1:1001"


@pytest.mark.parametrize(
    ("address", "announced"),
    [("127.0.1.1", "node1:7"), ("::1", "node1:7"), ("10.0.0.2", "10.0.0.2:7")],
)
def test_a_rank_beside_rank_0_announces_its_host(address: str, announced: str) -> None:
    class Connection:
        def getsockname(self) -> tuple[str, int]:
            return address, 1

    beside: Any = Connection()
    assert rendezvous.announced_address(place("node1:99", 1, 2), beside, 7) == announced


@contextmanager
def answering(answers: Callable[[socket.socket], object]) -> Iterator[Rendezvous]:
    """Listens in place of rank 0, and answers to each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                    with connection:
                        answers(connection)
                except OSError:
                    if server.fileno() < 0:
                        return

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("dribbles", [True, False])
def test_a_deadline_is_kept(clock: Clock, monkeypatch: pytest.MonkeyPatch, dribbles: bool) -> None:
    monkeypatch.setattr(rendezvous, "MAX_LINE_BYTES", sys.maxsize)
    most_s = clock.monotonic() + 100_000.0

    def answers(connection: socket.socket) -> None:
        """Sends a line without an end; or nothing, and ends the connection after a while."""
        while dribbles and clock.monotonic() < most_s:
            connection.sendall(b" ")
            clock.advance(0.1)
        clock.advance(TIMEOUT_S / 5)

    with answering(answers) as at, pytest.raises(RendezvousTimeoutError, match="for rank 0"):
        result(started(at, [1], 2)[0])
    assert clock.monotonic() < most_s


def impostor(answer: dict[str, object]) -> Callable[[socket.socket], object]:
    def answers(connection: socket.socket) -> None:
        connection.sendall(rendezvous.line(nonce="x"))
        connection.recv(1 << 16)
        connection.sendall(rendezvous.line(**answer))

    return answers


@pytest.mark.parametrize("proof", [None, "", "\N{SNOWMAN}", "\ud800", 7])
@pytest.mark.parametrize("kind", ["ConfigError", "AuthError", "addresses", "missing"])
def test_answers_without_a_proof_end_no_rank(
    clock: Clock, attempts: list[rendezvous.Peer], kind: str, proof: object
) -> None:
    answer = {"kind": kind, "value": "evil\x1b[2J", "proof": proof}
    refusal = pytest.raises(RendezvousTimeoutError, match=r"'evil\\x1b\[2J'")
    with answering(impostor(answer)) as at, refusal:
        (peer,) = started(at, [1], 2, b"secret")
        until(lambda: any(each._refusal for each in attempts), "refusal")
        clock.advance(TIMEOUT_S)
        result(peer)


@pytest.mark.parametrize(
    "value",
    ["a:1", ["a:1"], ["a:1", "b:2", "c:3"], ["a:1", "b"], ["a:1", 2], {"a:1": 1, "b:2": 2}],
)
def test_answers_without_all_addresses_end_no_rank(
    clock: Clock, attempts: list[rendezvous.Peer], value: object
) -> None:
    answer = {"kind": "addresses", "value": value}
    with answering(impostor(answer)) as at, pytest.raises(RendezvousTimeoutError):
        (peer,) = started(at, [1], 2)
        until(lambda: len(attempts) > 1, "next attempt")
        clock.advance(TIMEOUT_S)
        result(peer)


def test_missing_ranks_are_logged(
    at: Rendezvous,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank_0_gives_up_first: None,
) -> None:
    monkeypatch.setattr(rendezvous, "PROGRESS_S", 0.01)
    futures = started(at, [0, 2], 4)
    lines = [f"rank {rank} of 4 waits at {at} for rank 1, 3" for rank in (0, 2)]
    until(lambda: all(line in caplog.text for line in lines), "lines")
    clock.advance(TIMEOUT_S)
    for each in futures:
        with pytest.raises(RendezvousTimeoutError, match="for rank 1, 3"):
            result(each)
