"""The contract of the transports: gRPC, data sockets, shared memory, and hosts of two ranks.

In tests/unit the algorithms run on threads without a transport of their own. Here each transport
delivers values and keeps their order, and ends with an error that names rank and call.
"""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from clocks import Clock, until_blocked
from harness import jobs_of, reserved_addresses, task_of, until
from rings import NewRing, Spawn

from hostopt.cluster.cluster import Cluster
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigError,
    PeerLostError,
    ProtocolError,
)
from hostopt.options import Options
from hostopt.transport.grpc.data_streams import GrpcStream
from hostopt.transport.grpc.transport import GrpcTransport
from hostopt.transport.message import Payload, Tag
from hostopt.transport.tcp.socket_stream import SocketStream

TINY_SEGMENT_BYTES = 16
LARGE = 700_001  # floats: more than one segment of the default size in an array
# each pair of a dtype and an operator, of a dtype and a length, and of an operator and a length
CASES = [
    (np.dtype(dtype), op, length)
    for dtype, op, length in [
        ("f4", ReduceOp.SUM, 0),
        ("f4", ReduceOp.AVERAGE, 1),
        ("f4", ReduceOp.MIN, 21),
        ("f4", ReduceOp.MAX, 3),
        ("f8", ReduceOp.SUM, 1),
        ("f8", ReduceOp.AVERAGE, 3),
        ("f8", ReduceOp.MIN, 0),
        ("f8", ReduceOp.MAX, 21),
        ("i8", ReduceOp.SUM, 21),
        ("i8", ReduceOp.MIN, 1),
        ("i8", ReduceOp.MAX, 0),
        ("i8", ReduceOp.SUM, 3),
        ("u1", ReduceOp.SUM, 3),
        ("u1", ReduceOp.MIN, 21),
        ("u1", ReduceOp.MAX, 1),
        ("u1", ReduceOp.SUM, 0),
        (ml_dtypes.bfloat16, ReduceOp.SUM, 21),
        (ml_dtypes.bfloat16, ReduceOp.AVERAGE, 0),
        (ml_dtypes.bfloat16, ReduceOp.MIN, 3),
        (ml_dtypes.bfloat16, ReduceOp.MAX, 1),
        ("f2", ReduceOp.SUM, 3),
        ("f2", ReduceOp.AVERAGE, 21),
        ("f2", ReduceOp.MAX, 1),
        ("f2", ReduceOp.MIN, 0),
    ]
]
REFERENCE = {
    ReduceOp.SUM: lambda stack: stack.sum(axis=0),
    ReduceOp.AVERAGE: lambda stack: stack.sum(axis=0) / len(stack),
    ReduceOp.MIN: lambda stack: stack.min(axis=0),
    ReduceOp.MAX: lambda stack: stack.max(axis=0),
}
STREAMS = [("grpc", GrpcStream), ("grpc+tcp", SocketStream)]


@pytest.fixture(params=["grpc", "grpc+tcp", "streams", "shm", "hosts"])
def spawn_over(request: pytest.FixtureRequest) -> Spawn:
    return Spawn(request.param)


def local(rank: int, length: int, dtype: Any = np.float32) -> Any:
    """Returns small whole numbers, whose sums are exact in every dtype."""
    return np.random.default_rng([rank, length]).integers(0, 9, length).astype(dtype)


def all_of(size: int, length: int, dtype: Any = np.float32) -> Any:
    """Returns the data of all ranks, in float64."""
    return np.stack([local(rank, length, dtype) for rank in range(size)]).astype(np.float64)


def check(result: Any, expected: Any) -> None:
    np.testing.assert_array_equal(result.astype(np.float64), expected.astype(result.dtype))


def stream_of(communicator: Communicator) -> Any:
    """Returns the stream to the next rank of the ring."""
    transport: Any = communicator.transport
    return transport._streams.to((communicator.rank + 1) % communicator.size)


# --- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reductions(spawn_over: Spawn, size: int) -> None:
    def work(communicator: Communicator) -> None:
        for dtype, op, length in CASES:
            expected = REFERENCE[op](all_of(size, length, dtype))
            data = local(communicator.rank, length, dtype)
            check(communicator.all_reduce(data, op), expected)
            part = np.array_split(expected, size)[communicator.rank]
            check(communicator.reduce_scatter(data, op), part)

    spawn_over(size, work, segment_bytes=TINY_SEGMENT_BYTES)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_copies(spawn_over: Spawn, size: int) -> None:
    def work(communicator: Communicator) -> None:
        for length in (0, 1, 21):
            data, expected = local(communicator.rank, length), all_of(size, length)
            check(communicator.all_gather(data), expected)
            for root in range(size):
                check(communicator.broadcast(data, root), expected[root])
        texts = [b"x" * rank for rank in range(size)]
        assert communicator.all_gather_bytes(texts[communicator.rank]) == texts
        gathered = communicator.gather_bytes(texts[communicator.rank])
        assert gathered == (texts if communicator.rank == 0 else [])
        assert communicator.scatter_bytes(texts) == texts[communicator.rank]

    spawn_over(size, work, segment_bytes=TINY_SEGMENT_BYTES)


@pytest.mark.parametrize("options", [{}, {"segment_bytes": 1 << 16}], ids=["default", "segments"])
def test_large_arrays(spawn_over: Spawn, options: dict[str, Any]) -> None:
    expected = all_of(3, LARGE)
    texts = [bytes([rank]) * (LARGE + rank) for rank in range(3)]

    def work(communicator: Communicator) -> None:
        data = local(communicator.rank, LARGE)
        check(communicator.all_reduce(data), expected.sum(axis=0))
        part = np.array_split(expected.sum(axis=0), 3)[communicator.rank]
        check(communicator.reduce_scatter(data), part)
        check(communicator.broadcast(data, 1), expected[1])
        check(communicator.all_gather(data), expected)
        assert communicator.all_gather_bytes(texts[communicator.rank]) == texts

    spawn_over(3, work, **options)


@pytest.mark.parametrize(("transport", "kind"), STREAMS)
def test_bytes_on_the_wire(transport: str, kind: type[Any]) -> None:
    size, length = 3, 360  # chunks of 480 bytes: four segments of 25 floats and one of 20

    def work(communicator: Communicator) -> tuple[int, int]:
        traffic = communicator.transport.traffic
        before = (traffic.messages, traffic.payload_bytes)
        communicator.all_reduce(np.ones(length, np.float32))
        after = (traffic.messages, traffic.payload_bytes)
        messages, payload_bytes = (b - a for a, b in zip(before, after))
        assert isinstance(stream_of(communicator), kind)
        return messages, payload_bytes

    messages = 2 * (size - 1) * 5
    expected = (messages, 2 * (size - 1) * length * 4 // size)
    assert Spawn(transport)(size, work, segment_bytes=100) == [expected] * size


# --- order ------------------------------------------------------------------------------------


def test_channels_do_not_mix(spawn_over: Spawn) -> None:
    names = ["one", "two", "three"]

    def work(communicator: Communicator) -> list[list[float]]:
        order = names[communicator.rank :] + names[: communicator.rank]
        channels = {name: communicator.duplicate(name) for name in order}
        sums: dict[str, list[float]] = {}

        def reduce(name: str) -> None:
            values = [10.0 ** names.index(name) + step for step in range(10)]
            sums[name] = [float(channels[name].all_reduce(np.full(7, v))[3]) for v in values]

        threads = [threading.Thread(target=reduce, args=(name,)) for name in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [sums[name] for name in names]

    expected = [[3 * (10.0**index + step) for step in range(10)] for index in range(3)]
    assert spawn_over(3, work, segment_bytes=TINY_SEGMENT_BYTES) == [expected] * 3


def test_steps_keep_their_order(spawn_over: Spawn) -> None:
    def work(communicator: Communicator) -> list[float]:
        return [float(communicator.broadcast(np.full(9, float(step)))[0]) for step in range(100)]

    assert spawn_over(3, work) == [[float(step) for step in range(100)]] * 3


def test_a_rank_may_be_many_calls_ahead(spawn_over: Spawn) -> None:
    count, is_ahead = 16, threading.Event()

    def begun(communicator: Communicator) -> set[int]:
        return {wait.tag.channel for wait in communicator.transport.mailbox.waits()}

    def work(communicator: Communicator) -> list[float]:
        channels = [communicator.duplicate(str(index)) for index in range(count)]
        data = [np.full(9, float(index)) for index in range(count)]
        if communicator.rank != 0:
            assert is_ahead.wait(30)
            sums = [channels[i].all_reduce(data[i]) for i in reversed(range(count))]
            return [float(each[8]) for each in reversed(sums)]
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            results = [pool.submit(each.all_reduce, data[i]) for i, each in enumerate(channels)]
            until(lambda: len(begun(communicator)) == count, "wait in every call")
            is_ahead.set()
            return [float(each.result()[8]) for each in results]

    expected = [3.0 * index for index in range(count)]
    assert spawn_over(3, work, segment_bytes=TINY_SEGMENT_BYTES) == [expected] * 3


def test_no_rank_passes_a_barrier_before_all_arrive(spawn_over: Spawn) -> None:
    size, come = 4, [0] * 4

    def work(communicator: Communicator) -> None:
        for number in range(1, 21):
            come[communicator.rank] = number
            communicator.barrier()
            assert min(come) >= number

    spawn_over(size, work)


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "texts"),
    [
        (
            [lambda c: c.all_reduce(np.ones(2), name="a"), lambda c: c.all_reduce(np.ones(3))],
            ["all_reduce(sum) of 'a' float64[2]", "all_reduce(sum) float64[3]"],
        ),
        (
            [lambda c: c.all_reduce(np.ones(2)), lambda c: c.broadcast(np.ones(2))],
            ["all_reduce(sum) float64[2]", "broadcast from rank 0 float64[2]"],
        ),
        (
            [
                lambda c: c.all_reduce(np.ones(2), name="a"),
                lambda c: c.all_reduce(np.ones(2), name="b"),
            ],
            ["all_reduce(sum) of 'a' float64[2]", "all_reduce(sum) of 'b' float64[2]"],
        ),
        (
            [lambda c: c.all_reduce(np.ones(2)), lambda c: c.all_reduce(np.ones(2, np.int64))],
            ["all_reduce(sum) float64[2]", "all_reduce(sum) int64[2]"],
        ),
        (
            [lambda c: c.all_reduce(np.ones(2)), lambda c: c.all_reduce(np.ones(2), ReduceOp.MAX)],
            ["all_reduce(sum) float64[2]", "all_reduce(max) float64[2]"],
        ),
    ],
    ids=["shapes", "kinds", "names", "dtypes", "operators"],
)
def test_different_calls_are_named_by_all(spawn_over: Spawn, calls: Any, texts: Any) -> None:
    met = threading.Barrier(3)

    def work(communicator: Communicator) -> str:
        communicator.barrier()
        met.wait(30)
        with pytest.raises(CollectiveMismatchError) as caught:
            calls[communicator.rank % 2](communicator)
        met.wait(30)
        return str(caught.value)

    (text,) = {*spawn_over(3, work)}
    assert all(f"calls {each}" in text for each in texts)


def test_a_rank_that_does_not_come_is_named_at_the_deadline(
    spawn_over: Spawn, clock: Clock
) -> None:
    clock.govern_waits()
    ring: list[Communicator] = []
    done = threading.Barrier(4)

    def work(communicator: Communicator) -> CollectiveTimeoutError | None:
        ring.append(communicator)
        communicator.all_reduce(np.ones(9), name="the first")
        if communicator.rank == 1:
            clock.advance(301.0, *until_blocked(ring, communicator))
            done.wait(30)
            return None
        with pytest.raises(CollectiveTimeoutError) as caught:
            communicator.all_reduce(np.ones(9), name="the second")
        done.wait(30)
        return caught.value

    options = {"stall_warning_s": 30.0, "collective_timeout_s": 300.0}
    errors = [error for error in spawn_over(4, work, **options) if error is not None]
    assert len(errors) == 3
    for error in errors:
        assert (error.rank, error.step) == (1, 1)
        assert "the second (" in str(error)


def test_an_error_of_one_rank_is_the_root_cause_of_all(spawn_over: Spawn) -> None:
    met = threading.Barrier(4)

    def work(communicator: Communicator) -> BaseException:
        met.wait(30)
        with pytest.raises(BaseException) as caught, communicator:
            if communicator.rank == 2:
                raise KeyError("flour")
            communicator.all_reduce(np.ones(9))
        return caught.value

    errors = spawn_over(4, work)
    assert isinstance(errors.pop(2), KeyError)
    for error in errors:
        assert isinstance(error, PeerLostError)
        assert (error.rank, error.root_cause) == (2, "KeyError: 'flour'")


@pytest.mark.parametrize("call", [Communicator.broadcast, Communicator.all_reduce])
def test_a_rank_that_has_left_is_named(spawn_over: Spawn, call: Any) -> None:
    def work(communicator: Communicator) -> None:
        communicator.barrier()
        if communicator.rank == 0:
            return
        with pytest.raises(PeerLostError) as caught:
            call(communicator, np.ones(3), name="weights")
        communicator.abort(caught.value)
        assert caught.value.rank == 0

    spawn_over(3, work)


def sign_other_bytes(writer: Any) -> None:
    """Lets frames arrive with another bit than those that their checksums were computed of."""
    header = writer.header

    def header_of_other(tag: Tag, payload: Payload, is_last: bool = False) -> bytes:
        return header(tag, bytes([byte ^ 1 for byte in payload[:1]]) + payload[1:], is_last)

    writer.header = header_of_other


@pytest.mark.parametrize(("transport", "kind"), STREAMS)
def test_a_damaged_payload_is_refused(transport: str, kind: type[Any]) -> None:
    met, data = threading.Barrier(3), np.ones(99_000)  # large enough for the ring of all ranks

    def work(communicator: Communicator) -> str:
        check(communicator.all_reduce(data), 3 * data)
        met.wait(30)
        stream = stream_of(communicator)
        assert isinstance(stream, kind)
        if communicator.rank == 1:
            sign_other_bytes(stream._writer)
        with pytest.raises(ProtocolError) as caught:
            communicator.all_reduce(data)
        met.wait(30)
        assert (caught.value.rank, caught.value.step) == (1, 1)
        return str(caught.value)

    (text,) = {*Spawn(transport)(3, work, checksum=True)}
    assert "expected the checksum" in text


# --- processes --------------------------------------------------------------------------------

PROGRAM = """
    import sys
    import numpy as np
    import hostopt

    with hostopt.connect() as communicator:
        for step in range(5):
            total = communicator.all_reduce(np.full(50_000, communicator.rank + step))
            assert (total == 3 + 3 * step).all(), total
        print("summed", flush=True)
        if communicator.rank == 1:
            sys.stdin.read()
        communicator.barrier()
"""


@pytest.mark.parametrize("communication", ["grpc", "grpc+tcp", "shm"])
def test_processes_name_one_that_is_killed(processes: NewRing, communication: str) -> None:
    ring = processes(3)
    started = ring.start_all(PROGRAM, HOSTOPT_COMMUNICATION=communication)
    for process in started:
        process.expect("summed")
    started.pop(1).kill()
    for process in started:
        assert process.exit_code() == 200, process.stderr
        assert f"PeerLostError: {ring.name(1)} lost" in process.stderr


def test_ranks_with_other_options_do_not_meet() -> None:
    results: list[Any] = [None, None]

    def connect(rank: int, jobs: dict[str, list[str]]) -> None:
        cluster = Cluster.from_dict(jobs, *task_of(rank))
        options = Options(compression="fp16" if rank else None, rendezvous_timeout_s=30.0)
        with pytest.raises(ConfigError) as caught:
            GrpcTransport(cluster, options)
        results[rank] = str(caught.value)

    with reserved_addresses(2) as addresses:
        ranks = [
            threading.Thread(target=connect, args=(rank, jobs_of(addresses))) for rank in range(2)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
    assert all("compression" in text for text in results), results
