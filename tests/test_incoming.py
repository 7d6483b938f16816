"""Data connections of a running ring: bad frames abort it, strangers do not affect it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import is_gone
from rings import NewRing, Spawn

from hostopt.communicator import Communicator
from hostopt.errors import CollectiveTimeoutError, HostOptError, PeerLostError, ProtocolError
from hostopt.transport import event_loop
from hostopt.transport.frame import WIRE_VERSION, FrameWriter, Origin
from hostopt.transport.message import Tag

BAD_FRAMES: dict[str, Callable[[bytes], bytes]] = {
    "http": lambda good: b"GET / HTTP/1.1\r\n" * 9,
    "magic": lambda good: b"HU" + good[2:],
    "flipped": lambda good: good[:-1] + bytes([good[-1] ^ 1]),
    "of-another-incarnation": lambda good: FrameWriter(Origin(0, 0), True).write(
        Tag(0, 5), b"flour"
    ),
    "too-large": lambda good: good[:36] + struct.pack("<Q", 2**63) + good[44:],
}


def write(communicator: Communicator, peer: int, data: bytes) -> None:
    """Writes bytes on the data connection to a peer, below all checks of the sender."""
    stream: Any = communicator.transport._streams.to(peer)
    event_loop.run(stream._socket.write([data]))


@pytest.mark.parametrize("kind", BAD_FRAMES)
def test_a_bad_frame_aborts_the_ring(spawn_tcp: Spawn, kind: str) -> None:
    def work(communicator: Communicator) -> Any:
        communicator.barrier()
        if communicator.rank == 1:
            stream: Any = communicator.transport._streams.to(0)
            good = stream._writer.write(Tag(0, 5), b"flour")
            write(communicator, 0, BAD_FRAMES[kind](good))
        with pytest.raises(ProtocolError, match="frame") as caught:
            for _ in range(2):  # rank 1 may have what it needs for the first
                communicator.all_reduce(np.ones(3))
        return caught.value

    for error in spawn_tcp(2, work, checksum=True):
        assert error.rank == 1
        assert "rank 1 (worker:0, " in str(error)
        assert error.root_cause in str(error)


def greeting(rank: int, from_: str, to: str) -> bytes:
    incarnations = int(from_, 16), int(to, 16)
    nonce = secrets.token_bytes(16)
    return struct.pack("<3sBIQQ16s", b"HOD", WIRE_VERSION, rank, *incarnations, nonce)


def test_strangers_do_not_affect_the_ring(spawn_tcp: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        communicator.barrier()
        peers = communicator.transport._peers
        if communicator.rank == 1:
            known = peers.incarnation, peers.incarnations[0]
            for data in (
                b"",
                b"garbage" * 100,
                greeting(1, "77", known[1]),
                greeting(1, known[0], "77"),
                greeting(7, *known),
                greeting(1, *known) + bytes(64),  # it has a stream already
                greeting(1, *known) + bytes(64) + b"junk" * 100,
            ):
                address = "127.0.0.1", peers.data_ports[0]
                # a refused connection may end before all of this is written
                with socket.create_connection(address) as connection, contextlib.suppress(OSError):
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass
        for _ in range(3):
            assert communicator.all_reduce(np.ones(100_000))[-1] == 2

    spawn_tcp(2, work)


def test_a_broken_data_connection_between_living_ranks_is_named(spawn_tcp: Spawn) -> None:
    def work(communicator: Communicator) -> HostOptError:
        communicator.barrier()
        if communicator.rank == 1:
            stream: Any = communicator.transport._streams.to(0)
            stream._socket._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerLostError) as caught:
            for _ in range(1000):
                communicator.all_reduce(np.ones(100_000))
        return caught.value

    for error in spawn_tcp(2, work):
        assert "broke" in str(error)
        assert "both are alive" in str(error)


def test_a_rank_that_reads_nothing_is_named(processes: NewRing) -> None:
    """Its process is stopped, so its buffers fill; pings find it after the collective has."""
    ring = processes(2)
    script = """
        import os, signal, sys
        import numpy as np
        import hostopt
        communicator = hostopt.connect()
        communicator.barrier()
        print("connected", flush=True)
        if communicator.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        communicator.all_reduce(np.ones(5_000_000))
    """
    started = ring.start_all(
        script, HOSTOPT_COMMUNICATION="grpc+tcp", HOSTOPT_COLLECTIVE_TIMEOUT_S="5"
    )
    started[0].expect("connected")
    assert started[0].exit_code() == CollectiveTimeoutError.exit_code, started[0].stderr
    assert ring.name(1) in started[0].stderr
    started[1].kill()
    assert started[1].exit_code() == -signal.SIGKILL


def test_a_forked_child_does_not_keep_the_data_connections_of_a_killed_rank(
    processes: NewRing,
) -> None:
    ring = processes(2)
    script = """
        import os, signal, sys, time
        import numpy as np
        import hostopt
        communicator = hostopt.connect()
        communicator.barrier()
        if communicator.rank == 1:
            child = os.fork()
            if not child:
                os.setsid()
                sys.stdin.read()
                os._exit(0)
            print(child, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            communicator.all_reduce(np.ones(1000))
    """
    started = ring.start_all(script, HOSTOPT_COMMUNICATION="grpc+tcp")
    child = int(started[1].line())
    try:
        assert started[0].exit_code() == PeerLostError.exit_code, started[0].stderr
        assert not is_gone(child)
    finally:
        os.kill(child, signal.SIGKILL)
    assert started[1].exit_code() == -signal.SIGKILL
