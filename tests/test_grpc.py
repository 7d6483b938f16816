"""Rings of real processes over gRPC: output and exit codes with and without faults."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from harness import deadline_s, jobs_of, reserved_addresses, task_of
from rings import NewRing, Spawn

from hostopt.cluster import Cluster
from hostopt.communicator import Communicator
from hostopt.errors import ConfigError, PeerLostError, ProtocolError
from hostopt.options import Options
from hostopt.transport import event_loop
from hostopt.transport.frame import FrameWriter, Origin
from hostopt.transport.grpc import client
from hostopt.transport.grpc.hello import HelloMessages
from hostopt.transport.grpc.transport import GrpcTransport
from hostopt.transport.message import Tag

# First lines of each script.
MEET = """
import dataclasses, logging, os, signal, sys
import numpy as np
import hostopt
from hostopt.transport.grpc import timing

logging.basicConfig(stream=sys.stdout, format="%(message)s")
if "PROGRESS_EVERY_S" in os.environ:
    interval_s = float(os.environ["PROGRESS_EVERY_S"])
    timing.DEFAULT = dataclasses.replace(timing.DEFAULT, progress_every_s=interval_s)
communicator = hostopt.connect()
rank, size = communicator.rank, communicator.size
def say(line):
    print(line, flush=True)
"""
SUM = """
assert communicator.all_reduce(np.ones(1000))[0] == size
"""


# --- runs without faults ----------------------------------------------------------------------


def test_a_run_without_faults(processes: NewRing) -> None:
    ring = processes(3)
    script = """
        for step in range(20):
            total = communicator.all_reduce(np.arange(50_000.0) + rank)
            assert total[-1] == 3 * 49_999 + 3, total
        communicator.finish()
        say("done")
    """
    for process in ring.start_all(MEET + unindent(script)):
        process.expect("done")
        assert process.exit_code() == 0, process.stderr
        assert not process.stderr


def test_a_rank_may_end_long_before_the_others(processes: NewRing) -> None:
    ring = processes(3)
    script = """
        weights = communicator.broadcast(np.full(100_000, rank + 7.0))
        assert weights[-1] == 7
        say("has them")
        if rank:
            sys.stdin.read()
        if rank == 1:
            say("and ends")
    """
    first, second, third = ring.start_all(MEET + unindent(script))
    first.expect("has them")
    assert first.exit_code() == 0, first.stderr
    for process in (second, third):
        process.expect("has them")
        process.close_stdin()
        assert process.exit_code() == 0, process.stderr
        assert "Traceback" not in process.stderr


def test_a_rank_may_end_right_after_the_rendezvous(processes: NewRing) -> None:
    ring = processes(2)
    script = MEET + "assert communicator.broadcast(np.full(3, rank + 7.0))[0] == 7"
    early = ring.start(1, script, PROGRESS_EVERY_S="0.1")
    assert "missing: chief:0" in early.line()  # it polls rank 0 at intervals
    late = ring.start(0, script)
    assert late.exit_code() == 0, late.stderr
    assert early.exit_code() == 0, early.stderr


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


def test_a_rank_may_restart_during_the_rendezvous(processes: NewRing) -> None:
    ring = processes(3)
    script = MEET + SUM + "say('done')"
    waiting = [ring.start(rank, script, PROGRESS_EVERY_S="0.1") for rank in (0, 2)]
    while f"missing: worker:0 ({ring.addresses[1]})" not in waiting[1].line():
        pass  # the two ranks have connected
    waiting[1].kill()
    while not waiting[0].line().endswith(f"worker:1 ({ring.addresses[2]})"):
        pass  # it is missing again
    again = [ring.start(rank, script) for rank in (1, 2)]
    for process in again:
        process.expect("done")
        assert process.exit_code() == 0, process.stderr
    assert waiting[0].exit_code() == 0, waiting[0].stderr


def test_a_stream_that_breaks_during_the_rendezvous_loses_no_message(
    monkeypatch: pytest.MonkeyPatch,
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
    def work(communicator: Communicator) -> None:
        communicator.barrier()
        if communicator.rank == 1:
            channel = communicator.transport._client.channels[0]
            leave = channel.unary_unary("/hostopt.Ring/Leave")
            for note in ({}, {"error": {"kind": "PeerLostError", "message": "m", "facts": {}}}):
                data = json.dumps({"sender": 1, "from": "x", "to": "former", **note}).encode()

                async def call(data: bytes = data) -> bytes:
                    return bytes(await leave(data, timeout=30))

                event_loop.run(call())
        assert communicator.all_reduce(np.ones(3))[0] == 2

    spawn_grpc(2, work)


def test_grpc_settings_stay_out_of_the_environment() -> None:
    script = """
        import os
        given = os.environ.get("GRPC_EXPERIMENTS")
        from hostopt.transport.grpc.transport import grpc
        assert os.environ.get("GRPC_EXPERIMENTS") == given
        grpc.insecure_channel("localhost:1").close()  # some releases look at it only now
    """
    for environ in ({}, {"GRPC_EXPERIMENTS": "no_such_experiment"}):
        run = subprocess.run(
            [sys.executable, "-c", unindent(script)],
            env={**os.environ, "GRPC_VERBOSITY": "error", **environ},
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            check=True,
        )
        # gRPC logs unknown variables: one of the user, and none of hostopt
        assert ("no_such_experiment" in run.stderr) == bool(environ)
        assert run.stderr.count("nknown experiment") == len(environ)


def test_host_names_as_addresses(spawn_grpc: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rings.jobs_of", lambda a: jobs_of([x.replace("127.0.0.1", "localhost") for x in a])
    )

    def work(communicator: Communicator) -> str:
        assert communicator.all_reduce(np.ones(3))[0] == 2
        return communicator.transport.cluster.ring[0].address.partition(":")[0]

    assert spawn_grpc(2, work) == ["localhost"] * 2


# --- rendezvous -------------------------------------------------------------------------------


def test_missing_ranks_are_logged_regularly(processes: NewRing) -> None:
    ring = processes(2)
    first = ring.start(0, MEET + SUM, PROGRESS_EVERY_S="0.1")
    for _ in range(2):
        line = first.line()
        assert line.startswith("rank 0 has waited ")
        assert line.endswith(f"missing: worker:0 ({ring.addresses[1]})")
    second = ring.start(1, MEET + SUM)
    for process in (first, second):
        assert process.exit_code() == 0, process.stderr


def test_an_address_in_use_leaves_no_thread(processes: NewRing) -> None:
    address = processes(2).addresses[0]
    host, _, port = address.rpartition(":")
    cluster = Cluster.from_dict({"worker": [address, "127.0.0.1:1"]}, "worker", 0)
    event_loop.run(asyncio.sleep(0))  # the thread of the event loop remains
    before = set(threading.enumerate())
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((host, int(port)))
        other.listen()
        with pytest.raises(ConfigError, match="in use"):
            GrpcTransport(cluster, Options())
    for thread in set(threading.enumerate()) - before:
        thread.join(deadline_s(10))
        assert not thread.is_alive(), thread


def test_a_forked_child_does_not_affect_the_ring(processes: NewRing) -> None:
    script = """
        child = os.fork()
        if not child:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert communicator.all_reduce(np.ones(1000))[0] == size
        say("done")
    """
    for process in processes(2).start_all(MEET + unindent(script)):
        process.expect("done")
        assert process.exit_code() == 0, process.stderr


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


def test_a_rank_may_start_other_programs(processes: NewRing) -> None:
    # preexec_fn asks for fork(), which Python 3.9 always uses and later ones seldom
    script = """
        import subprocess
        for _ in range(30):
            communicator.all_reduce(np.ones(9))
            child = subprocess.Popen([sys.executable, "-S", "-c", ""], preexec_fn=lambda: None)
            communicator.all_reduce(np.ones(9))
            assert child.wait() == 0, child.returncode
        say("done")
    """
    for process in processes(2).start_all(MEET + unindent(script)):
        process.expect("done")
        assert process.exit_code() == 0, process.stderr


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


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_with_different_rings(processes: NewRing, first: int) -> None:
    ring = processes(3)
    jobs = [jobs_of(ring.addresses[:2]), jobs_of(ring.addresses)]
    before = ring.start(first, MEET, jobs=jobs[first], PROGRESS_EVERY_S="0.1")
    assert "missing" in before.line()
    after = ring.start(1 - first, MEET, jobs=jobs[1 - first])
    for process in (before, after):
        assert process.exit_code() == 78, process.stderr
        assert "ConfigError" in process.stderr
        assert '"cluster" in TF_CONFIG' in process.stderr
        assert ring.addresses[2] in process.stderr


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("option", "values", "shown"),
    [
        ("compression", ["fp16", "none"], ["'fp16'", "None"]),
        ("communication", ["grpc", "auto"], ["'grpc'", "'auto'"]),
    ],
)
def test_ranks_with_different_options(
    processes: NewRing, first: int, option: str, values: list[str], shown: list[str]
) -> None:
    ring = processes(2)
    environ = [{f"HOSTOPT_{option.upper()}": value} for value in values]
    before = ring.start(first, MEET, PROGRESS_EVERY_S="0.1", **environ[first])
    assert "missing" in before.line()
    after = ring.start(1 - first, MEET, **environ[1 - first])
    names = [f"{ring.name(rank)} has {option} {shown[rank]}" for rank in range(2)]
    for process in (before, after):
        assert process.exit_code() == 78, process.stderr
        result = f"ConfigError: {names[0]}, {names[1]}. Give all ranks the same options\n"
        assert result in process.stderr


# --- a rank that dies -------------------------------------------------------------------------


@pytest.mark.parametrize("communication", ["grpc", "shm"])
@pytest.mark.parametrize(("size", "victim"), [(3, 0), (3, 2), (4, 1), (4, 2)])
def test_a_killed_rank_is_named_by_all_others(
    processes: NewRing, size: int, victim: int, communication: str
) -> None:
    ring = processes(size)
    script = f"say('ready')\nif rank == {victim}: sys.stdin.read()"
    started = ring.start_all(MEET + SUM + script + SUM, HOSTOPT_COMMUNICATION=communication)
    for process in started:
        process.expect("ready")
    started[victim].kill()
    for rank, process in enumerate(started):
        if rank == victim:
            assert process.exit_code() == -9
            continue
        assert process.exit_code() == 200, process.stderr
        assert f"\nhostopt.errors.PeerLostError: {ring.name(victim)} lost" in process.stderr


def test_a_rank_killed_before_its_first_message(processes: NewRing) -> None:
    ring = processes(3)
    script = """
        say("ready")
        if rank == 0:
            sys.stdin.read()
        communicator.broadcast(np.ones(10))
    """
    started = ring.start_all(MEET + unindent(script))
    for process in started:
        process.expect("ready")
    started[0].kill()
    for process in started[1:]:
        assert process.exit_code() == 200, process.stderr
        assert f"PeerLostError: {ring.name(0)} lost" in process.stderr


def test_a_user_exception_is_reported_by_all_ranks(processes: NewRing) -> None:
    ring = processes(4)
    script = """
        def bake():
            raise ValueError("no more flour")
        say("ready")
        sys.stdin.read()
        if rank == 1:
            bake()
    """
    started = ring.start_all(MEET + SUM + unindent(script) + SUM)
    for process in started:
        process.expect("ready")
    for process in started:
        process.close_stdin()
    assert [process.exit_code() for process in started] == [200, 1, 200, 200]
    own = started[1].stderr
    assert own.startswith("Traceback")
    assert "in bake" in own
    assert "\nValueError: no more flour\n" in own
    for rank in (0, 2, 3):
        (line,) = [text for text in started[rank].stderr.splitlines() if "PeerLostError:" in text]
        assert ring.name(1) in line
        assert "ValueError: no more flour" in line


def test_a_rank_with_fewer_calls_than_the_others(processes: NewRing) -> None:
    ring = processes(3)
    script = MEET + SUM + "communicator.finish() if rank == 2 else communicator.barrier()"
    for process in ring.start_all(script):
        assert process.exit_code() == 200, process.stderr
        assert ring.name(2) in process.stderr
        assert "finished" in process.stderr


# --- bad frames and strangers -----------------------------------------------------------------


def stream(address: str, *messages: bytes, **metadata: str) -> Any:
    """Sends messages like a peer; returns the error of the call."""
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.stream_unary("/hostopt.Ring/Stream").future(
            iter(messages), metadata=tuple(metadata.items()), timeout=30
        )
        return call.exception()


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
    def work(communicator: Communicator) -> Any:
        communicator.barrier()  # or rank 0 would receive the bad frame during the rendezvous

        async def send_bad_frame() -> None:
            peer = communicator.transport._streams.to(0)
            peer._frames.put_nowait(BAD_FRAMES[kind](peer._writer.write(Tag(0, 5), b"flour")))

        if communicator.rank == 1:
            event_loop.run(send_bad_frame())
        with pytest.raises(ProtocolError, match="frame") as caught:
            for _ in range(2):  # rank 1 may have what it needs for the first
                communicator.all_reduce(np.ones(3))
        return caught.value

    for error in spawn_grpc(2, work, checksum=True):
        assert error.rank == 1
        assert "rank 1 (worker:0, " in str(error)
        assert error.root_cause in str(error)


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
    def work(communicator: Communicator) -> Any:
        refused = None
        communicator.barrier()
        if communicator.rank == 1:
            transport = communicator.transport
            known = {
                "to": transport._peers.incarnations[0],
                "from": transport._peers.incarnation,
            }
            frame = FrameWriter(transport._peers.origin(1), True).write(Tag(0, 5), b"flour")
            address = transport.cluster.ring[0].address
            refused = stream(address, frame, b"garbage", **{**known, **metadata})
        assert communicator.all_reduce(np.ones(3))[0] == 2
        return refused

    _, refused = spawn_grpc(2, work)
    assert isinstance(refused, grpc.RpcError)


@pytest.mark.parametrize("method", ["Hello", "Leave", "Status"])
@pytest.mark.parametrize(
    "request_", [b"", b"{", b"[]", b"7", b'{"rank": 7}', b'{"rank": 1, "incarnation": "x"}']
)
def test_a_call_of_a_stranger_does_not_affect_the_ring(
    spawn_grpc: Spawn, method: str, request_: bytes
) -> None:
    def work(communicator: Communicator) -> None:
        communicator.barrier()
        if communicator.rank == 1:
            address = communicator.transport.cluster.ring[0].address
            with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
                call = channel.unary_unary(f"/hostopt.Ring/{method}").future(request_, timeout=30)
                assert (call.exception() is None) == (method == "Status")
        assert communicator.all_reduce(np.ones(3))[0] == 2

    spawn_grpc(2, work)


def test_another_process_of_the_same_task_does_not_affect_the_ring(spawn_grpc: Spawn) -> None:
    # as on another host, where it can listen; its incarnation is unknown
    def work(communicator: Communicator) -> None:
        communicator.barrier()
        if communicator.rank == 1:
            transport = communicator.transport
            hello = {**transport._rendezvous.messages.build(), "incarnation": "77"}
            with grpc.insecure_channel(transport.cluster.ring[0].address) as channel:
                call = channel.unary_unary("/hostopt.Ring/Hello")
                answer = json.loads(call(json.dumps(hello).encode(), timeout=30))
            assert answer["met"] == transport._peers.incarnation
        assert communicator.all_reduce(np.ones(3))[0] == 2

    spawn_grpc(2, work)


def test_a_restart_is_detected_before_the_connection_breaks(
    spawn_grpc: Spawn,
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


def test_a_long_idle_ring_stays_connected(
    spawn_grpc: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    # by default gRPC closes connections without calls after half an hour
    control_options = client.control_options
    idle = ("grpc.client_idle_timeout_ms", 1000)
    monkeypatch.setattr(client, "control_options", lambda *args: [idle, *control_options(*args)])

    def work(communicator: Communicator) -> None:
        for _ in range(30):
            assert communicator.all_reduce(np.ones(3))[0] == 3
            threading.Event().wait(0.1)

    spawn_grpc(3, work)


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
        return [communicator.all_reduce(np.arange(50_000.0) + step) for step in range(5)]

    for sums in spawn_grpc(3, work, segment_bytes=4096):
        for step, total in enumerate(sums):
            np.testing.assert_array_equal(total, 3 * (np.arange(50_000.0) + step))


def unindent(script: str) -> str:
    """Unindents a script to follow `MEET`."""
    return script.replace("\n        ", "\n")
