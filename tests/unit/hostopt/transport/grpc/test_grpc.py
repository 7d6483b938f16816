"""Rings of real processes over gRPC: output and exit codes with and without faults."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from callers import beside_a_ring, call, check_a_bad_frame
from harness import deadline_s, jobs_of, reserved_addresses, task_of
from ring_scripts import MEET
from rings import NewRing, Spawn

from hostopt.cluster.cluster import Cluster
from hostopt.collectives.communicator import Communicator
from hostopt.errors import CheckpointError, ConfigError, PeerLostError
from hostopt.options import Options
from hostopt.transport import event_loop
from hostopt.transport.frame import FrameWriter, Origin
from hostopt.transport.grpc import client
from hostopt.transport.grpc import ring as grpc_ring
from hostopt.transport.grpc.liveness import Departure
from hostopt.transport.grpc.rendezvous import HelloMessages, Rendezvous
from hostopt.transport.grpc.ring import Peers
from hostopt.transport.grpc.transport import GrpcTransport
from hostopt.transport.message import Tag


@pytest.fixture
def no_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits only for a moment for a Leave message after a broken stream, as none comes."""
    monkeypatch.setattr(grpc_ring, "DEFAULT", replace(grpc_ring.DEFAULT, last_message_s=0.02))


# --- runs without faults ----------------------------------------------------------------------


def test_a_restarted_rank_waits_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = threading.Event()
    build, others = HelloMessages.build, Options(compression="fp16")

    def build_hello(messages: HelloMessages, to: int | None = None) -> dict[str, Any]:
        if to is not None and messages is old[1]._rendezvous.messages:
            answered.set()
        return build(messages, to)

    with reserved_addresses(2) as addresses, ThreadPoolExecutor() as threads:
        clusters = [Cluster.from_dict(jobs_of(addresses), *task_of(rank)) for rank in range(2)]
        old = list(threads.map(lambda cluster: GrpcTransport(cluster, Options()), clusters))
        monkeypatch.setattr(HelloMessages, "build", build_hello)
        old[0].close()
        again = threads.submit(GrpcTransport, clusters[0], others)
        assert answered.wait(30)  # from the old rank 1, which has not left yet
        assert not again.done()
        old[1].close()
        other = threads.submit(GrpcTransport, clusters[1], others)
        ring = [Communicator(again.result(30)), Communicator(other.result(30))]
        sums = threads.map(lambda communicator: communicator.all_reduce(np.ones(3)), ring)
        np.testing.assert_array_equal(list(sums), np.full((2, 3), 2.0))
        list(threads.map(Communicator.close, ring))


def test_a_failed_rank_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has failed in its rendezvous, as a message of its peer says, and is about to end."""
    answers: queue.Queue[tuple[str, str]] = queue.Queue()
    may_end = threading.Event()
    greet, answer_hello = Rendezvous._greet, Rendezvous.on_hello
    wait_until_sent = Departure.wait_until_sent
    old: list[Peers] = []

    async def never_meet(self: Rendezvous, peer: int) -> None:
        if self._peers.rank == 1 and not old:
            old.append(self._peers)
        await (asyncio.sleep(0.01) if self._peers in old else greet(self, peer))

    async def on_hello(self: Rendezvous, request: bytes, context: Any) -> bytes:
        answer = await answer_hello(self, request, context)
        if self._ring.mailbox.error is not None:
            answers.put((json.loads(request)["incarnation"], json.loads(answer)["met"]))
        return answer

    async def end_late(self: Departure) -> None:
        while self._peers in old and not may_end.is_set():
            await asyncio.sleep(0.01)
        await wait_until_sent(self)

    monkeypatch.setattr(Rendezvous, "_greet", never_meet)
    monkeypatch.setattr(Rendezvous, "on_hello", on_hello)
    monkeypatch.setattr(Departure, "wait_until_sent", end_late)
    with reserved_addresses(2) as addresses, ThreadPoolExecutor() as threads:
        clusters = [Cluster.from_dict(jobs_of(addresses), *task_of(rank)) for rank in range(2)]
        options = Options(rendezvous_timeout_s=30)
        failing = threads.submit(GrpcTransport, clusters[1], options)
        first = GrpcTransport(clusters[0], options)
        first.abort(CheckpointError("no room"))
        first.close()
        again = threads.submit(GrpcTransport, clusters[0], options)
        caller, met = answers.get(timeout=30)
        may_end.set()
        assert met != caller
        assert str(failing.exception(30)) == "no room"
        other = threads.submit(GrpcTransport, clusters[1], options)
        ring = [Communicator(again.result(30)), Communicator(other.result(30))]
        sums = threads.map(lambda communicator: communicator.all_reduce(np.ones(3)), ring)
        np.testing.assert_array_equal(list(sums), np.full((2, 3), 2.0))
        list(threads.map(Communicator.close, ring))


def test_a_stream_that_breaks_during_the_rendezvous_loses_no_message(
    monkeypatch: pytest.MonkeyPatch, no_last_words: None
) -> None:
    """The peer is alive, and has sent its first message when this rank opens a new stream."""
    open_stream, broken = client.RpcClient.open_stream, threading.Event()

    def open_first_to_nobody(self: client.RpcClient, peer: int) -> Any:
        service = self._service
        if self._peers.rank == 1 and not broken.is_set():
            broken.set()
            self._service = "nobody"
        try:
            return open_stream(self, peer)
        finally:
            self._service = service

    monkeypatch.setattr(client.RpcClient, "open_stream", open_first_to_nobody)

    def work(communicator: Communicator) -> None:
        assert communicator.all_reduce(np.ones(3)).tolist() == [2.0] * 3

    Spawn("grpc")(2, work)
    assert broken.is_set()


def test_a_late_leave_message_does_not_affect_the_next_ring(spawn_grpc: Spawn) -> None:
    def leave(communicator: Communicator) -> None:
        channel = communicator.transport._client.channels[0]
        method = channel.unary_unary("/hostopt.Ring/Leave")

        async def send(data: bytes) -> None:
            await method(data, timeout=30)

        for note in ({}, {"error": {"kind": "PeerLostError", "message": "m", "facts": {}}}):
            data = json.dumps({"sender": 1, "from": "x", "to": "former", **note}).encode()
            event_loop.run(send(data))

    beside_a_ring(spawn_grpc, leave)


def test_host_names_as_addresses(spawn_grpc: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rings.jobs_of", lambda a: jobs_of([x.replace("127.0.0.1", "localhost") for x in a])
    )

    def work(communicator: Communicator) -> str:
        assert communicator.all_reduce(np.ones(3))[0] == 2
        return communicator.transport.cluster.ring[0].address.partition(":")[0]

    assert spawn_grpc(2, work) == ["localhost"] * 2


# --- rendezvous -------------------------------------------------------------------------------


def listening() -> set[Any]:
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr for each in connections if each.status == psutil.CONN_LISTEN}


def test_an_address_in_use_leaves_no_thread_and_no_port(processes: NewRing) -> None:
    address = processes(2).addresses[0]
    host, _, port = address.rpartition(":")
    cluster = Cluster.from_dict({"worker": [address, "127.0.0.1:1"]}, "worker", 0)
    event_loop.run(asyncio.sleep(0))  # the thread of the event loop remains
    before = set(threading.enumerate())
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((host, int(port)))
        other.listen()
        ports = listening()
        with pytest.raises(ConfigError, match="in use"):
            GrpcTransport(cluster, Options())
        assert listening() == ports
    for thread in set(threading.enumerate()) - before:
        thread.join(deadline_s(10))
        assert not thread.is_alive(), thread


@pytest.mark.parametrize("end", ["close", "abort"])
def test_end_of_a_program_that_cannot_start_threads(
    spawn_grpc: Spawn, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    # like Python 3.12.0 and 3.12.1 after the end of the main program
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    met = threading.Barrier(3)

    def work(communicator: Communicator) -> Any:
        communicator.barrier()
        met.wait(30)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        if communicator.rank == 0:
            if end == "abort":
                communicator.abort(ValueError("no more flour"))
            communicator.close()
            return None
        with pytest.raises(PeerLostError) as caught:
            communicator.broadcast(np.ones(3))
        communicator.close()
        return str(caught.value)

    expected = {"close": "has closed its communicator", "abort": "no more flour"}[end]
    for message in spawn_grpc(3, work)[1:]:
        assert expected in message


def test_a_port_in_use(processes: NewRing) -> None:
    ring = processes(2)
    host, _, port = ring.addresses[0].rpartition(":")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((host, int(port)))
        other.listen()
        process = ring.start(0, MEET)
        assert process.exit_code() == 78
    assert "ConfigError" in process.stderr
    assert f"{ring.addresses[0]} of this task (chief:0) is in use" in process.stderr


def test_an_unusable_tf_config(processes: NewRing) -> None:
    process = processes(1).start(0, MEET, jobs={"worker": ["127.0.0.1:2222"]})
    assert process.exit_code() == 78
    assert "ConfigError: TF_CONFIG" in process.stderr


@pytest.mark.parametrize("token", [None, "secret"])
def test_a_rank_whose_name_leads_to_another_one_is_called_again(
    monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    """As DNS does for a while when machines have changed."""
    late = []  # ranks that have called the other one instead
    with reserved_addresses(3) as addresses, ThreadPoolExecutor() as threads:
        names = [address.replace("127.0.0.1", "LOCALHOST") for address in addresses]
        open_channel = client.RpcClient._open_channel

        def open_late(self: client.RpcClient, peer: int, options: Any) -> Any:
            rank = self._peers.rank
            if peer != 1 or rank in late:
                return open_channel(self, peer, options)
            late.append(rank)
            return client.open_channel(addresses[2], options, None)

        def connect(rank: int) -> Communicator:
            cluster = Cluster.from_dict(jobs_of(names), *task_of(rank))
            return Communicator(GrpcTransport(cluster, Options(insecure=True)))

        monkeypatch.setattr(client.RpcClient, "_open_channel", open_late)
        if token is not None:
            monkeypatch.setenv("HOSTOPT_TOKEN", token)
        ring = list(threads.map(connect, range(3)))
        sums = threads.map(lambda communicator: communicator.all_reduce(np.ones(3)), ring)
        np.testing.assert_array_equal(list(sums), np.full((3, 3), 3.0))
        list(threads.map(Communicator.close, ring))
    assert sorted(late) == [0, 2]


@pytest.mark.parametrize("token", [None, "secret"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_rank_that_answers_at_the_address_of_another_one_is_named(
    monkeypatch: pytest.MonkeyPatch, host: str, token: str | None
) -> None:
    if token is not None:
        monkeypatch.setenv("HOSTOPT_TOKEN", token)
    with reserved_addresses(3) as numeric, ThreadPoolExecutor() as threads:
        addresses = [each.replace("127.0.0.1", host) for each in numeric]
        first = Cluster.from_dict(jobs_of([*addresses[:1], *addresses[:0:-1]]), *task_of(0))
        last = Cluster.from_dict(jobs_of(addresses), *task_of(2))
        starts = [threads.submit(GrpcTransport, cluster, Options()) for cluster in (first, last)]
        errors = [start.exception(30) for start in starts]
    assert all(isinstance(error, ConfigError) for error in errors), errors
    assert 'Give all ranks the same "cluster" in TF_CONFIG' in str(errors[0])


# --- bad frames and strangers -----------------------------------------------------------------


BAD_FRAMES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda good: b"",
    "short": lambda good: b"garbage",
    "http": lambda good: b"GET / HTTP/1.1\r\n" * 9,
    "truncated": lambda good: good[:-1],
    "too-long": lambda good: good + b"x",
    "magic": lambda good: b"HU" + good[2:],
    "flipped": lambda good: good[:-1] + bytes([good[-1] ^ 1]),
    "of-another-incarnation": lambda good: FrameWriter(Origin(0, 0), True).write(
        Tag(0, 5), b"flour"
    ),
}


@pytest.mark.parametrize("kind", BAD_FRAMES)
def test_a_bad_frame_aborts_the_ring(spawn_grpc: Spawn, kind: str) -> None:
    async def put(peer: Any) -> None:
        peer._frames.put_nowait(BAD_FRAMES[kind](peer._writer.write(Tag(0, 5), b"flour")))

    check_a_bad_frame(spawn_grpc, lambda ring: event_loop.run(put(ring.transport._streams.to(0))))


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"rank": "one"},
        {"rank": "7"},
        {"rank": "-1"},
        {"rank": "1" * 5000},
        {"rank": "1", "to": "former"},
        {"rank": "1", "from": "former"},
        {"rank": "1"},  # it has a stream already
    ],
)
def test_a_stream_of_a_stranger_does_not_affect_the_ring(
    spawn_grpc: Spawn, metadata: dict[str, str]
) -> None:
    def refused(communicator: Communicator) -> Any:
        transport = communicator.transport
        known = {"to": transport._peers.incarnations[0], "from": transport._peers.incarnation}
        frame = FrameWriter(transport._peers.origin(1), True).write(Tag(0, 5), b"flour")
        address = transport.cluster.ring[0].address
        return call(address, "Stream", frame, b"garbage", **{**known, **metadata})

    assert isinstance(beside_a_ring(spawn_grpc, refused), grpc.RpcError)


@pytest.mark.parametrize("method", ["Hello", "Leave", "Status"])
@pytest.mark.parametrize(
    "request_", [b"", b"{", b"[]", b"7", b'{"rank": 7}', b'{"rank": 1, "incarnation": "x"}']
)
def test_a_call_of_a_stranger_does_not_affect_the_ring(
    spawn_grpc: Spawn, method: str, request_: bytes
) -> None:
    def refused(communicator: Communicator) -> Any:
        return call(communicator.transport.cluster.ring[0].address, method, request_)

    assert (beside_a_ring(spawn_grpc, refused) is None) == (method == "Status")


def test_another_process_of_the_same_task_does_not_affect_the_ring(spawn_grpc: Spawn) -> None:
    # as on another host, where it can listen; its incarnation is unknown
    def greet(communicator: Communicator) -> None:
        transport = communicator.transport
        hello = {**transport._rendezvous.messages.build(), "incarnation": "77"}
        with grpc.insecure_channel(transport.cluster.ring[0].address) as channel:
            call = channel.unary_unary("/hostopt.Ring/Hello")
            answer = json.loads(call(json.dumps(hello).encode(), timeout=30))
        assert answer["met"] == transport._peers.incarnation

    beside_a_ring(spawn_grpc, greet)


def test_a_restart_is_detected_before_the_connection_breaks(
    spawn_grpc: Spawn, no_last_words: None
) -> None:
    # as after a crash of its host, which the others have not detected
    def work(communicator: Communicator) -> Any:
        transport = communicator.transport
        communicator.barrier()
        if communicator.rank == 1:
            transport._peers.incarnation = "77"
            hello = json.dumps(transport._rendezvous.messages.build()).encode()
            with grpc.insecure_channel(transport.cluster.ring[0].address) as channel:
                channel.unary_unary("/hostopt.Ring/Hello")(hello, timeout=30)
        with pytest.raises(PeerLostError) as caught:
            communicator.broadcast(np.ones(3), root=1 - communicator.rank)
        return caught.value

    error, _ = spawn_grpc(2, work)
    assert error.rank == 1
    assert "incarnation changed" in str(error)


def test_repeated_frames_are_received_once(spawn_grpc: Spawn) -> None:
    def work(communicator: Communicator) -> Any:
        communicator.barrier()
        transport = communicator.transport
        peer = transport._streams.to((communicator.rank + 1) % 3)
        write, sent = peer._writer.write, []

        def write_again(tag: Tag, payload: Any) -> bytes:
            sent.append(write(tag, payload))
            peer._frames.put_nowait(sent[-1])
            peer._frames.put_nowait(sent[0])
            return sent[-1]

        peer._writer.write = write_again  # type: ignore[method-assign]
        return [communicator.all_reduce(np.arange(10_000.0) + step) for step in range(3)]

    for sums in spawn_grpc(3, work, segment_bytes=4096):
        for step, total in enumerate(sums):
            np.testing.assert_array_equal(total, 3 * (np.arange(10_000.0) + step))
