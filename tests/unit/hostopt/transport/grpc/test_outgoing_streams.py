"""Streams to peers: on data sockets if their port can be reached, else in gRPC messages."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.transport.frame import Stream
from hostopt.transport.grpc.grpc_stream import GrpcStream
from hostopt.transport.grpc.ring import Peers
from hostopt.transport.tcp.data_server import DataServer
from hostopt.transport.tcp.socket_stream import SocketStream


def stream_kind(communicator: Communicator) -> type[Stream]:
    total = communicator.all_reduce(np.arange(100_000.0) + communicator.rank)
    assert total[-1] == communicator.size * 99_999 + sum(range(communicator.size))
    (stream,) = communicator.transport._streams.all()
    return type(stream)


@pytest.mark.parametrize(
    ("communication", "kind"),
    [("auto", SocketStream), ("grpc+tcp", SocketStream), ("grpc", GrpcStream)],
)
@pytest.mark.parametrize("size", [2, 3])
def test_the_option_chooses_the_kind(
    communication: str, kind: type[Stream], size: int, spawn_grpc: Spawn
) -> None:
    assert spawn_grpc(size, stream_kind, communication=communication) == [kind] * size


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("size", [2, 3])
def test_a_port_that_cannot_be_reached_is_replaced_by_grpc(
    size: int,
    spawn_tcp: Spawn,
    closed_port: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rank 0 has a port that others cannot reach, as behind a firewall."""
    add = Peers.add

    def add_with_closed_port(self: Peers, peer: int, hello: dict[str, Any]) -> None:
        add(self, peer, {**hello, "data_port": closed_port} if peer == 0 else hello)

    monkeypatch.setattr(Peers, "add", add_with_closed_port)
    kinds = spawn_tcp(size, stream_kind)
    assert kinds == [SocketStream] * (size - 1) + [GrpcStream]
    (message,) = [each for each in caplog.messages if "data port" in each]
    assert f"rank {size - 1} cannot reach the data port of rank 0" in message
    assert f"127.0.0.1:{closed_port}" in message


def test_a_port_where_another_program_answers_is_replaced_by_grpc(
    spawn_tcp: Spawn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def answer_once(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" * 9)

    add = Peers.add
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def add_with_other_port(self: Peers, peer: int, hello: dict[str, Any]) -> None:
            add(self, peer, {**hello, "data_port": port} if peer == 0 else hello)

        monkeypatch.setattr(Peers, "add", add_with_other_port)
        thread = threading.Thread(target=answer_once, args=(listener,), daemon=True)
        thread.start()
        assert spawn_tcp(2, stream_kind) == [SocketStream, GrpcStream]
        thread.join()
    assert "rank 1 cannot reach the data port of rank 0" in caplog.text


def test_a_rank_without_a_data_port_gets_grpc(
    spawn_tcp: Spawn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = DataServer.start

    def start_on_rank_1(self: DataServer, address: str) -> None:
        if self._identity.rank == 0:
            raise OSError("no port is free")
        start(self, address)

    monkeypatch.setattr(DataServer, "start", start_on_rank_1)
    assert spawn_tcp(2, stream_kind) == [SocketStream, GrpcStream]
    assert "rank 0 has no data port (no port is free)" in caplog.text


def test_a_stream_that_is_opened_after_the_rendezvous_falls_back_as_well(
    spawn_tcp: Spawn, closed_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    def work(communicator: Communicator) -> Any:
        communicator.barrier()
        if communicator.rank == 3:  # the barrier does not connect it to rank 0
            communicator.transport._peers.data_ports[0] = closed_port
        gathered = communicator.gather_bytes(bytes([communicator.rank]) * 1000)
        if communicator.rank == 0:
            assert gathered == [bytes([rank]) * 1000 for rank in range(7)]
        return {
            peer: type(stream)
            for (peer, _), stream in communicator.transport._streams._streams.items()
        }

    kinds = spawn_tcp(7, work)
    assert kinds[3] == {4: SocketStream, 2: SocketStream, 0: GrpcStream}
    assert kinds[5] == {6: SocketStream, 4: SocketStream, 0: SocketStream}
    assert "rank 3 cannot reach the data port of rank 0" in caplog.text
