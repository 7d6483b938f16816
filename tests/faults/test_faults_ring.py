"""Faults in a ring of processes with short deadlines: the named rank, the time, the sums."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable

import grpc
import psutil
import pytest
from fault_ring import (
    END_S,
    PING_S,
    VICTIM,
    FaultRing,
    assert_all_blame,
    assert_exact,
    connect_all,
    end,
    others,
    report,
)
from faults import FaultPlan
from harness import is_gone, listens, reserved_addresses, split_address, until
from proxy import Proxy
from rings import NewRing, RankProcess, RankProcesses

from hostopt.transport.frame import FrameWriter, Origin
from hostopt.transport.message import Tag

pytestmark = pytest.mark.usefixtures("no_thread_left")

GRPC = {"HOSTOPT_COMMUNICATION": "grpc"}
DATA_SOCKETS = {"HOSTOPT_COMMUNICATION": "grpc+tcp"}
STREAMS = {**DATA_SOCKETS, "HOSTOPT_STREAMS": "3"}
SHARED_MEMORY = {"HOSTOPT_COMMUNICATION": "shm"}
over_each = pytest.mark.parametrize(
    "environ", [GRPC, DATA_SOCKETS, STREAMS, SHARED_MEMORY], ids=["grpc", "tcp", "streams", "shm"]
)

# --- without a fault --------------------------------------------------------------------------


@over_each
def test_a_healthy_ring_raises_no_error(processes: NewRing, environ: dict[str, str]) -> None:
    ring = FaultRing(processes(3), **environ)
    for process in ring.start_all("--pause-s", 0.3):
        assert_exact(process)
        assert not process.stderr


@over_each
def test_a_slow_rank_raises_no_error(processes: NewRing, environ: dict[str, str]) -> None:
    ring = FaultRing(processes(3), **environ)
    for process in ring.start_all("--pause-s", 0.03, rank_arguments={VICTIM: ("--pause-s", 0.3)}):
        assert_exact(process)
        assert not process.stderr


def test_proxies_of_the_environment_are_ignored(processes: NewRing) -> None:
    with reserved_addresses(1) as dead:  # no server listens there
        environ = {f"{name}_proxy": f"http://{dead[0]}" for name in ("http", "https", "grpc")}
        environ |= {name.upper(): value for name, value in environ.items()}
        ring = FaultRing(processes(3), **environ, no_proxy="", NO_PROXY="")
        for process in ring.start_all():
            assert_exact(process)
            assert not process.stderr


# --- a rank that is gone ----------------------------------------------------------------------


@over_each
@pytest.mark.parametrize("point", ["before-send", "mid-chunk", "after-reduce"])
def test_a_rank_killed_in_a_step(processes: NewRing, environ: dict[str, str], point: str) -> None:
    plan = FaultPlan(VICTIM, step=3, point=point, action="kill")
    ring = processes(3)
    started = FaultRing(ring, plan, **environ).start_all()
    assert started[VICTIM].exit_code() == -9
    for result in assert_all_blame(ring, others(started), "PeerLostError", within_s=2.0):
        assert result["steps"] <= 3  # messages of the victim in step 2 may be lost as well
        attributes = result["error"]["facts"]
        assert attributes["step"] in (2, 3), attributes  # step of the rank that detected it
        assert attributes["bucket"] in (0, 1), attributes


@over_each
def test_a_killed_rank_with_a_live_forked_child(
    processes: NewRing, environ: dict[str, str]
) -> None:
    plan = FaultPlan(VICTIM, step=3, point="mid-chunk", action="kill-parent")
    ring = processes(3)
    # pings do not detect it
    started = FaultRing(ring, plan, **environ).start_all("--ping-s", 1000)
    assert started[VICTIM].exit_code() == -9
    for result in assert_all_blame(ring, others(started), "PeerLostError", within_s=2.0):
        assert "connection reset, process gone" in result["error"]["message"]
    assert not listens(ring.addresses[VICTIM])
    child = int(started[VICTIM].line())
    assert not is_gone(child)
    started[VICTIM].close_stdin()
    until(lambda: is_gone(child), "end of the child")


@over_each
@pytest.mark.parametrize(("action", "code"), [("raise", 1), ("exit", 0)])
def test_a_rank_that_stops_with_an_error(
    processes: NewRing, environ: dict[str, str], action: str, code: int
) -> None:
    plan = FaultPlan(VICTIM, step=3, point="between-steps", action=action)
    ring = processes(3)
    started = FaultRing(ring, plan, **environ).start_all()
    assert started[VICTIM].exit_code() == code
    for result in assert_all_blame(ring, others(started), "PeerLostError", within_s=2.0):
        assert ("no more flour" in result["error"]["message"]) == (action == "raise")


# --- a rank that makes no progress ------------------------------------------------------------


@over_each
def test_a_frozen_rank_is_detected_by_ping(processes: NewRing, environ: dict[str, str]) -> None:
    plan = FaultPlan(VICTIM, step=3, point="mid-chunk", action="stop")
    ring = processes(3)
    # the collective times out long after the ping, as by default
    started = FaultRing(ring, plan, **environ, HOSTOPT_COLLECTIVE_TIMEOUT_S="20").start_all()
    for result in assert_all_blame(ring, others(started), "PeerLostError", within_s=5.0):
        assert result["waited_s"] >= PING_S
        assert "no answer to ping, its process is frozen" in result["error"]["message"]
    end(started[VICTIM])


@over_each
def test_a_rank_frozen_for_a_second(processes: NewRing, environ: dict[str, str]) -> None:
    plan = FaultPlan(VICTIM, step=3, point="mid-chunk", action="stop-1s")
    ring = processes(3)
    started = FaultRing(ring, plan, **environ, HOSTOPT_STALL_WARNING_S="0.5").start_all()
    for process in started:
        assert_exact(process)
    warnings = "".join(process.stderr for process in others(started))
    assert warnings.startswith("WARNING "), warnings
    assert f"from {ring.name(VICTIM)}" in warnings


@over_each
def test_a_rank_stuck_in_user_code_is_named_by_all(
    processes: NewRing, environ: dict[str, str]
) -> None:
    plan = FaultPlan(VICTIM, step=3, point="between-steps", action="sleep")
    ring = processes(3)
    started = FaultRing(ring, plan, **environ).start_all()
    survivors = others(started)
    for result in assert_all_blame(ring, survivors, "CollectiveTimeoutError", within_s=5.0):
        assert result["steps"] == 3
        attributes = result["error"]["facts"]
        assert (attributes["step"], attributes["bucket"]) == (3, 0), attributes
    for process in survivors:
        assert process.stderr.startswith("WARNING "), process.stderr
        assert ring.name(VICTIM) in process.stderr.splitlines()[0]
    end(started[VICTIM])


@over_each
def test_a_rank_that_holds_the_gil(processes: NewRing, environ: dict[str, str]) -> None:
    plan = FaultPlan(VICTIM, step=3, point="between-steps", action="hold-gil")
    ring = processes(3)
    started = FaultRing(ring, plan, **environ).start_all()
    survivors = others(started)
    assert {process.exit_code(8.0) for process in survivors} <= {200, 201}
    errors = [report(process)["error"] for process in survivors]
    assert [error["facts"]["rank"] for error in errors] == [VICTIM, VICTIM], errors
    assert errors[0]["kind"] == errors[1]["kind"]
    end(started[VICTIM])


# --- faulty connections -----------------------------------------------------------------------


def start_behind(ring: RankProcesses, proxy: Proxy, **environ: str) -> list[RankProcess]:
    """Starts all ranks; they know the proxy's address as that of the victim."""
    listen, ring.addresses[VICTIM] = ring.addresses[VICTIM], proxy.address
    return FaultRing(ring, **environ).start_all(rank_arguments={VICTIM: ("--listen", listen)})


@pytest.mark.parametrize("action", ["reset", "truncate"])
def test_a_connection_that_breaks_in_the_middle_of_a_message(
    processes: NewRing, action: str
) -> None:
    ring = processes(3)
    with Proxy(ring.addresses[VICTIM], action) as proxy:
        started = start_behind(ring, proxy)
        assert [process.exit_code() for process in started] == [200, 200, 200]
        assert proxy.acted
    reports = [report(process) for process in started]
    for result in reports:
        assert result["exact"] and result["only_sums"], result
    if action == "truncate":  # the victim cannot be reached any more
        del reports[VICTIM]
    # each end could blame the other, but all ranks must name the same rank
    assert {result["error"]["facts"]["rank"] for result in reports} == {VICTIM}, reports
    assert len({result["error"]["facts"]["root_cause"] for result in reports}) == 1, reports


@pytest.mark.parametrize("action", ["delay", "pause"])
def test_a_temporarily_slow_connection(processes: NewRing, action: str) -> None:
    ring = processes(3)
    with Proxy(ring.addresses[VICTIM], action) as proxy:
        for process in start_behind(ring, proxy):
            assert_exact(process)
        assert proxy.acted


def test_without_checksums_a_flipped_bit_changes_the_sum(processes: NewRing) -> None:
    ring = processes(3)
    with Proxy(ring.addresses[VICTIM], "flip") as proxy:
        started = start_behind(ring, proxy, HOSTOPT_CHECKSUM="false")
        assert [process.exit_code() for process in started] == [0, 0, 0]
        assert proxy.acted
    assert [report(process)["exact"] for process in started] == [False, False, False]


def test_checksums_detect_a_flipped_bit(processes: NewRing) -> None:
    ring = processes(3)
    with Proxy(ring.addresses[VICTIM], "flip") as proxy:
        started = start_behind(ring, proxy, HOSTOPT_CHECKSUM="true")
        # the sender is named
        result = assert_all_blame(ring, started, "ProtocolError", 10.0, blamed=VICTIM - 1)
        assert proxy.acted
    for each in result:
        assert "checksum" in each["error"]["message"]


@pytest.mark.parametrize("when", ["at-once", "later"])
def test_repeated_frames(processes: NewRing, when: str) -> None:
    ring = FaultRing(processes(3))
    for process in ring.start_all(rank_arguments={VICTIM: ("--send-again", when)}):
        assert_exact(process)
        assert not process.stderr


# --- strangers --------------------------------------------------------------------------------

FLOOD_FRAMES = 10_000


def flood_of_frames(address: str) -> None:
    """Sends frames of all kinds in many streams."""
    chance = random.Random(7)
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        stream = channel.stream_unary("/hostopt.Ring/Stream")
        calls = []
        for number in range(100):
            to = chance.choice(["", "former", f"{chance.getrandbits(128):032x}"])
            metadata = (("rank", str(number % 4)), ("to", to))
            frames = iter([random_frame(chance) for _ in range(FLOOD_FRAMES // 100)])
            calls.append(stream.future(frames, metadata=metadata, timeout=30))
        assert all(isinstance(call.exception(), grpc.RpcError) for call in calls)


def random_frame(chance: random.Random) -> bytes:
    """Returns a frame, a truncated frame, or random bytes."""
    step, channel = chance.randrange(100), chance.randrange(4)
    writer = FrameWriter(Origin(chance.getrandbits(32), chance.getrandbits(64)), True)
    good = writer.write(Tag(channel, step), chance.randbytes(chance.randrange(2000)))
    return chance.choice([good, good[: chance.randrange(64)], chance.randbytes(len(good))])


def flood_of_calls(address: str) -> None:
    """Sends malformed messages to all methods, and to methods that do not exist."""
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        for method in ("Hello", "Leave", "Other"):
            call = channel.unary_unary(f"/hostopt.Ring/{method}")
            for note in (b"", b"\xff" * 99, b"[]", b"{}", b'{"rank": "x"}', b'{"to": 7}'):
                call.future(note, timeout=30).exception()


def stream_in_the_name_of_a_rank(address: str) -> None:
    """Sends frames with the incarnation that a peer would know."""
    chance = random.Random(7)
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        status = channel.unary_unary("/hostopt.Ring/Status")(b"", timeout=30)
        metadata = (("rank", "0"), ("from", "7"), ("to", json.loads(status)["incarnation"]))
        stream = channel.stream_unary("/hostopt.Ring/Stream")
        frames = iter([random_frame(chance) for _ in range(100)])
        call = stream.future(frames, metadata=metadata, timeout=30)
        assert isinstance(call.exception(), grpc.RpcError)


def goodbye_of_a_stranger(address: str) -> None:
    """Sends a Leave message that names no incarnation."""
    error = {"kind": "PeerLostError", "message": "no more flour", "facts": {}}
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        leave = channel.unary_unary("/hostopt.Ring/Leave")
        note = {"sender": 0, "from": "7", "to": None, "error": error}
        leave(json.dumps(note).encode(), timeout=30)


def flood_of_bytes(address: str) -> None:
    """Sends bytes that are not HTTP/2."""
    chance = random.Random(7)
    for _ in range(100):
        with socket.create_connection(split_address(address)) as garbage:
            garbage.sendall(chance.randbytes(chance.randrange(1, 100_000)))


def message_that_is_too_long(address: str) -> None:
    """Sends a message of 128 MiB."""
    limits = [("grpc.enable_http_proxy", 0), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address, limits) as channel:
        call = channel.stream_unary("/hostopt.Ring/Stream")
        metadata = (("rank", "0"), ("to", ""))
        error = call.future(iter([bytes(128 << 20)]), metadata=metadata, timeout=30)
        assert isinstance(error.exception(), grpc.RpcError)


def length_that_is_a_lie(address: str) -> None:
    """Sends a message whose length field says 4 GiB - 1, followed by little data."""

    def field(name: bytes, value: bytes) -> bytes:
        return bytes([0, len(name)]) + name + bytes([len(value)]) + value

    def http2(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags, 0, 0, 0, stream]) + payload

    headers = b"".join(
        [
            field(b":method", b"POST"),
            field(b":scheme", b"http"),
            field(b":path", b"/hostopt.Ring/Stream"),
            field(b":authority", b"ring"),
            field(b"content-type", b"application/grpc"),
            field(b"te", b"trailers"),
        ]
    )
    with socket.create_connection(split_address(address)) as caller:
        caller.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2(4, 0, 0, b""))
        caller.sendall(http2(1, 4, 1, headers))
        caller.sendall(http2(0, 0, 1, b"\0\xff\xff\xff\xff" + bytes(10_000)))
        caller.shutdown(socket.SHUT_WR)
        caller.settimeout(30)
        while caller.recv(65536):
            pass


@pytest.mark.parametrize(
    "disturb",
    [
        flood_of_frames,
        flood_of_calls,
        stream_in_the_name_of_a_rank,
        goodbye_of_a_stranger,
        flood_of_bytes,
        message_that_is_too_long,
        length_that_is_a_lie,
    ],
)
def test_strangers_do_not_affect_the_ring(
    processes: NewRing, disturb: Callable[[str], None]
) -> None:
    ring = processes(3)
    started = FaultRing(ring).start_all("--steps", 20, "--ask-after", 10)
    for process in started:
        process.expect("continue?")
    memory = psutil.Process(started[VICTIM].process.pid)
    before = memory.memory_info().rss
    disturb(ring.addresses[VICTIM])
    grown = memory.memory_info().rss - before
    for process in started:
        process.write_line("continue")
    for process in started:
        assert_exact(process, steps=20)
    assert grown < 10 << 20


# --- membership -------------------------------------------------------------------------------


@pytest.mark.parametrize("present", [(0, 2), (1,)])
def test_missing_ranks_are_named(processes: NewRing, present: tuple[int, ...]) -> None:
    ring = processes(3)
    runner = FaultRing(ring)
    started = [runner.start(rank) for rank in present]
    connect_all(started)
    names = ["chief:0", "worker:0", "worker:1"]
    missing = [f"{names[i]} ({ring.addresses[i]})" for i in range(3) if i not in present]
    for process in started:
        assert process.exit_code(3.0 + END_S) == 202, process.stderr
        error = report(process)["error"]
        assert error["kind"] == "RendezvousTimeoutError"
        assert f"missing: {', '.join(missing)}" in error["message"]


def test_the_same_task_twice(processes: NewRing) -> None:
    ring = processes(3)
    runner = FaultRing(ring)
    started = runner.start_all("--ask-after", 3)
    for process in started:
        process.expect("continue?")
    again = runner.start(VICTIM)
    connect_all([again])
    assert again.exit_code(2.0 + END_S) == 78
    assert f"{ring.addresses[VICTIM]} of this task (worker:0) is in use" in again.stderr
    for process in started:  # the other ranks are not affected
        process.write_line("continue")
    for process in started:
        assert_exact(process)
        assert not process.stderr


@over_each
def test_a_restarted_rank_cannot_join_the_old_ring(
    processes: NewRing, environ: dict[str, str]
) -> None:
    ring = processes(3)
    runner = FaultRing(ring, **environ)
    started = runner.start_all("--ask-after", 3)
    for process in started:
        process.expect("continue?")
    end(started[VICTIM])
    again = runner.start(VICTIM)
    connect_all([again])
    assert again.exit_code(3.0 + END_S) == 202, again.stderr
    for process in others(started):  # in the meantime they were in their programs
        process.write_line("continue")
    for result in assert_all_blame(ring, others(started), "PeerLostError", within_s=2.0):
        assert result["steps"] == 3
    for process in runner.start_all():  # all ranks together can
        assert_exact(process)


# --- gradients that are not finite ---------------------------------------------------------------

NAN_IN_STEP_3 = """
    import numpy as np
    import hostopt
    from hostopt.gradients.bucket import TensorSpec, plan_buckets
    from hostopt.gradients.reducer import Reducer
    from hostopt.gradients.reducer import open_reducer

    communicator = hostopt.connect()
    buckets = plan_buckets([TensorSpec("v0", (300_000,), np.dtype("f4"))], 1 << 20)
    reducer = open_reducer(communicator, buckets)
    for step in range(5):
        gradient = np.full(300_000, step, np.float32)
        if step == 3 and communicator.rank == 1:
            gradient[7] = np.nan
        if isinstance(reducer, Reducer):
            reducer.launch(0, [gradient])
            (total,) = reducer.wait(0)
        else:
            (total,) = reducer.reduce(0, [gradient])
        assert (total == step * communicator.size).all()
        print("step", step, flush=True)
"""


@pytest.mark.parametrize("environ", [GRPC, SHARED_MEMORY], ids=["grpc", "shm"])
def test_every_process_exits_with_the_code_and_the_cause(
    processes: Callable[[int], RankProcesses], environ: dict[str, str]
) -> None:
    ring = processes(3)
    started = ring.start_all(NAN_IN_STEP_3, **environ)
    for process in started:
        for step in range(3):
            process.expect(f"step {step}")
        process.expect("")
    assert [process.exit_code() for process in started] == [79] * 3
    cause = f"{ring.name(1)} has NaN for 'v0'. "
    for process in started:
        assert "NonFiniteGradientError: not finite in step 3" in process.stderr
        assert cause in process.stderr
