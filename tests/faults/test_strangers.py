"""Descriptors, memory and time that a stranger can take from a rank, with real processes."""

from __future__ import annotations

import contextlib
import json
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest
from certificates import Certificates, environ_of
from harness import split_address
from rings import NewRing, RankProcess

from hostopt.transport.grpc import limits

FEW = 1024
FLOOD = 1100
MIB = 1 << 20
# A ring that reduces and opens files on request; the limits are those of each process.
RING = """
import contextlib, logging, os, resource, sys
import numpy as np
import hostopt

logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(message)s")
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
communicator = hostopt.connect()
print("met", flush=True)
step = 0
for line in sys.stdin:
    with contextlib.ExitStack() as files:
        for _ in range(int(line)):
            files.enter_context(open(os.devnull))
        for _ in range(20):
            step += 1
            total = communicator.all_reduce(np.arange(50_000.0) + step * communicator.rank)
            assert (total == np.arange(50_000.0) * 2 + step).all()
    print("exact", flush=True)
communicator.finish()
"""
WAYS = ["token", "token+good"]


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """Lets this process hold the other ends of all connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * FLOOD)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def idle_connections(address: str, count: int) -> Iterator[list[socket.socket]]:
    with many_descriptors(), contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(split_address(address), 30))
            for _ in range(count)
        ]


def wait_until_ended(callers: list[socket.socket], but: int = 0) -> None:
    """Waits until the other side has closed all but so many connections."""
    left, poll = {each.fileno(): each for each in callers}, select.poll()
    for fd in left:
        poll.register(fd, select.POLLIN)
    while len(left) > but:
        ready = poll.poll(60_000)
        assert ready, f"{len(left)} connections are left"
        for fd, _ in ready:
            with contextlib.suppress(ConnectionError):
                if left[fd].recv(1 << 16):
                    continue  # what gRPC says first
            poll.unregister(fd)
            del left[fd]


def met(ring: Any, soft: int, hard: int, environ: dict[str, str]) -> list[RankProcess]:
    started = ring.start_all(RING, soft, hard, **environ)
    for process in started:
        process.expect("met")
    return started


def reduce_on(started: list[RankProcess], files: int = 300) -> None:
    for process in started:
        process.write_line(str(files))
    for process in started:
        process.expect("exact")


def end_well(started: list[RankProcess]) -> None:
    for process in started:
        process.close_stdin()
    for process in started:
        assert process.exit_code() == 0, process.stderr


def descriptors(process: RankProcess) -> int:
    return psutil.Process(process.process.pid).num_fds()


def resident(process: RankProcess) -> int:
    return int(psutil.Process(process.process.pid).memory_info().rss)


# --- descriptors ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hard", [FEW, 4 * FEW])
def test_idle_connections_take_few_descriptors_for_a_short_time(
    processes: NewRing, certificates: Certificates, way: str, hard: int
) -> None:
    ring = processes(2)
    started = met(ring, FEW, hard, environ_of(certificates, way))
    before = descriptors(started[0])
    with idle_connections(ring.addresses[0], FLOOD) as strangers:
        reduce_on(started, files=0)
        wait_until_ended(strangers, but=limits.most_strangers(2))
        reduce_on(started)
        assert descriptors(started[0]) < before + limits.most_strangers(2) + 20
        wait_until_ended(strangers)  # each of them has its time
        reduce_on(started)
    assert "no rank has called over them" in started[0].stderr
    assert not started[1].stderr
    end_well(started)


def test_http2_connections_without_calls_are_closed_too(
    processes: NewRing, certificates: Certificates
) -> None:
    ring = processes(2)
    started = met(ring, FEW, FEW, environ_of(certificates, "token"))
    with idle_connections(ring.addresses[0], FLOOD) as strangers:
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        wait_until_ended(strangers)
        reduce_on(started)
    end_well(started)


def test_ended_connections_hold_no_descriptors(
    processes: NewRing, certificates: Certificates
) -> None:
    ring = processes(2)
    started = met(ring, FEW, FEW, environ_of(certificates, "token"))
    before = descriptors(started[0])
    for _ in range(1000):
        with socket.create_connection(split_address(ring.addresses[0])) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: ring\r\n\r\n")
    deadline = time.monotonic() + 60
    while descriptors(started[0]) > before + 5:
        assert time.monotonic() < deadline, descriptors(started[0]) - before
        time.sleep(0.05)
    reduce_on(started)
    end_well(started)


def test_rendezvous_under_a_flood_of_connections(
    processes: NewRing, certificates: Certificates
) -> None:
    ring, environ = processes(2), environ_of(certificates, "token+good")
    first = ring.start(0, RING, FEW, 4 * FEW, **environ)
    ended = threading.Event()

    def come_again() -> None:
        while not ended.is_set():
            with (
                contextlib.suppress(OSError),
                idle_connections(ring.addresses[0], FLOOD) as strangers,
            ):
                wait_until_ended(strangers, but=FLOOD // 2)

    with ThreadPoolExecutor() as threads:
        flood = threads.submit(come_again)
        try:
            second = ring.start(1, RING, FEW, 4 * FEW, **environ)
            for process in (first, second):
                process.expect("met")
            reduce_on([first, second], files=0)
        finally:
            ended.set()
        flood.result()
    end_well([first, second])


def test_an_idle_ring_keeps_its_connections(
    processes: NewRing, certificates: Certificates
) -> None:
    script = RING.replace("import hostopt\n", "import hostopt\n" + QUICK)
    ring = processes(3)
    started = ring.start_all(
        script.replace("* 2 + step", "* 3 + 3 * step"),
        FEW,
        FEW,
        **environ_of(certificates, "token"),
    )
    for process in started:
        process.expect("met")
    with idle_connections(ring.addresses[0], 1) as strangers:
        for _ in range(3):
            wait_until_ended(strangers)
            strangers[:] = [socket.create_connection(split_address(ring.addresses[0]))]
    reduce_on(started)
    for process in started[1:]:
        assert not process.stderr
    end_well(started)


def test_early_claims_of_a_rank_do_not_block_that_rank(processes: NewRing) -> None:
    script = RING.replace("import hostopt\n", "import hostopt\n" + QUICK)
    ring, metadata = processes(2), (("rank", "1"), ("from", "7"), ("to", ""))
    first = ring.start(0, script, FEW, FEW)
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    with contextlib.ExitStack() as stack:
        for _ in range(limits.CONNECTIONS_OF_A_PEER):
            channel = stack.enter_context(grpc.insecure_channel(ring.addresses[0], options))
            status = channel.unary_unary("/hostopt.Ring/Status")
            status(b"{}", metadata=metadata, timeout=30, wait_for_ready=True)
        started = [first, ring.start(1, script, FEW, FEW)]
        for process in started:
            process.expect("met")
        for _ in range(3):  # until what is not a peer's has been ended, and longer
            with idle_connections(ring.addresses[0], 1) as strangers:
                wait_until_ended(strangers)
        reduce_on(started)
    assert not started[1].stderr
    end_well(started)


QUICK = """
from hostopt.transport.grpc import limits
limits.STRANGER_S = 0.5
"""


# --- memory -----------------------------------------------------------------------------------


def junk(address: str, count: int, **metadata: str) -> list[grpc.StatusCode]:
    """Sends Hello messages of 2 MB, all at the same time."""
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    with contextlib.ExitStack() as stack:
        calls = []
        for number in range(count):
            if number % 10 == 0:
                channel = stack.enter_context(grpc.insecure_channel(address, options))
            hello = channel.unary_unary("/hostopt.Ring/Hello")
            data = json.dumps({"rank": 1, "x": "x" * (2 * MIB - 100)}).encode()
            calls.append(hello.future(data, metadata=tuple(metadata.items()), timeout=60))
        return [call.exception().code() for call in calls]


@pytest.mark.parametrize(
    ("way", "metadata", "most_mib"),
    [
        ("token", {}, 128),
        ("token", {"rank": "1", "from": "7", "to": "7", "proof": "0" * 64}, 128),
        ("nothing", {"rank": "1", "from": "7"}, 256),
    ],
)
def test_large_requests_of_a_stranger_do_not_stay_in_memory(
    processes: NewRing,
    certificates: Certificates,
    way: str,
    metadata: dict[str, str],
    most_mib: int,
) -> None:
    ring = processes(2)
    started = met(ring, FEW, FEW, environ_of(certificates, way))
    reduce_on(started)
    before = resident(started[0])
    for _ in range(3):
        codes = junk(ring.addresses[0], 100, **metadata)
        assert grpc.StatusCode.OK not in codes
    grown = resident(started[0]) - before
    reduce_on(started)
    assert grown < most_mib * MIB
    end_well(started)
