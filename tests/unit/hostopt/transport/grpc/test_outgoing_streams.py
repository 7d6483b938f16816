"""Streams to peers: on data sockets if their port can be reached, else in gRPC messages."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import numpy as np
import pytest
from rings import Spawn, failure

from hostopt.cluster.cluster import Cluster
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.collectives.wire_format import new_wire_format
from hostopt.errors import HostOptError, PeerLostError
from hostopt.options import Options
from hostopt.transport import event_loop
from hostopt.transport.frame import Stream
from hostopt.transport.grpc.data_streams import GrpcStream, OutgoingStreams
from hostopt.transport.grpc.ring import Peers, stream_count
from hostopt.transport.tcp.data_server import DataServer
from hostopt.transport.tcp.data_socket import DataSocket
from hostopt.transport.tcp.socket_stream import SocketStream

STREAMS = {"streams": 3, "segment_bytes": 1000}


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


# --- several streams --------------------------------------------------------------------------


def streams_of(communicator: Communicator) -> dict[tuple[int, int], type[Stream]]:
    """Returns the streams by peer and number."""
    streams: Any = communicator.transport
    return {key: type(each) for key, each in streams._streams._streams.items()}


@pytest.mark.parametrize("compression", [None, "fp16", "bf16"])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_do_not_depend_on_the_number_of_streams(
    spawn_tcp: Spawn, size: int, compression: str | None
) -> None:
    def work(communicator: Communicator) -> bytes:
        values = np.random.default_rng(communicator.rank).standard_normal(10_007)
        flat, call = values.astype(np.float32), communicator.next_call()
        wire_format = new_wire_format(compression)
        communicator.all_reduce_in_place(flat, ReduceOp.SUM, call, wire_format)
        numbers = sorted(number for _, number in streams_of(communicator))
        assert numbers == list(range(communicator.transport.streams))
        return flat.tobytes()

    one, three = (spawn_tcp(size, work, segment_bytes=1000, streams=streams) for streams in (1, 3))
    assert len({*one, *three}) == 1


def test_a_stream_that_cannot_be_opened_leaves_its_data_to_the_first(
    spawn_tcp: Spawn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect = OutgoingStreams._connect

    async def connect_once(self: OutgoingStreams, peer: int, address: str) -> DataSocket:
        if event_loop.current() > 0:
            raise ConnectionRefusedError("the firewall allows one connection")
        return await connect(self, peer, address)

    monkeypatch.setattr(OutgoingStreams, "_connect", connect_once)

    def work(communicator: Communicator) -> Any:
        for _ in range(3):
            total = communicator.all_reduce(np.arange(10_007.0))
            np.testing.assert_array_equal(total, 2 * np.arange(10_007.0))
        return streams_of(communicator)

    for rank, streams in enumerate(spawn_tcp(2, work, **STREAMS)):
        assert streams == {(1 - rank, 0): SocketStream}
        (warning,) = [each for each in caplog.messages if f"rank {rank} cannot reach" in each]
        assert "allows one connection. Data goes over fewer streams" in warning


def test_a_stream_that_breaks_names_its_ends(spawn_tcp: Spawn) -> None:
    def work(communicator: Communicator) -> HostOptError:
        communicator.all_reduce(np.ones(10_007))
        if communicator.rank == 1:
            stream: Any = communicator.transport._streams._streams[2, 2]
            stream._socket._socket.shutdown(socket.SHUT_RDWR)
        return failure(
            communicator,
            lambda: [communicator.all_reduce(np.ones(10_007)) for _ in range(1_000_000)],
        )

    for error in spawn_tcp(3, work, **STREAMS):
        assert isinstance(error, PeerLostError)
        assert error.rank == 2
        assert "the connection between rank 1" in str(error)


@pytest.mark.parametrize(
    ("options", "cores", "hosts", "expected"),
    [
        (Options(), 2, ["127.0.0.1", "b"], 1),
        (Options(), 16, ["127.0.0.1", "b"], 4),
        (Options(), 16, ["127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1", "b"], 2),
        (Options(), 4, ["127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1"], 2),
        (Options(), 1, ["127.0.0.1", "127.0.0.1"], 1),
        (Options(interfaces="ib0,ib1,ib2"), 2, ["127.0.0.1", "b"], 3),
        (Options(interfaces="ib0,ib1"), 16, ["127.0.0.1", "b"], 4),
        (Options(interfaces="ib0,ib1,ib2", streams=2), 16, ["127.0.0.1", "b"], 2),
        (Options(streams=7), 1, ["127.0.0.1", "127.0.0.1"], 7),
        (Options(streams=7, communication="grpc"), 16, ["127.0.0.1", "b"], 1),
    ],
)
def test_the_number_of_streams(
    options: Options,
    cores: int,
    hosts: list[str],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    addresses = [f"{host}:{2222 + place}" for place, host in enumerate(hosts)]
    cluster = Cluster.from_dict({"worker": addresses}, "worker", 0)
    assert stream_count(cluster, options) == expected


def test_the_rank_with_the_fewest_streams_decides() -> None:
    cluster = Cluster.from_dict({"worker": ["127.0.0.1:1", "b:1", "c:1"]}, "worker", 0)
    peers = Peers(cluster, streams=4)
    hello = {"incarnation": "9", "data_port": 1, "data_hosts": []}
    for peer, streams in ((1, 3), (2, 2)):
        peers.add(peer, {**hello, "data_streams": streams})
    assert peers.streams == 2
    peers.forget(2)  # it has been started again
    assert peers.streams == 3
    peers.add(2, {**hello, "data_streams": 7})
    assert peers.streams == 3
