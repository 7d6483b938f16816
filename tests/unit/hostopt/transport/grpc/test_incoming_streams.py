"""Data connections of a running ring: bad frames abort it, strangers do not affect it."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from callers import check_a_bad_frame
from rings import Spawn

from hostopt.collectives.communicator import Communicator
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


@pytest.mark.parametrize("kind", BAD_FRAMES)
def test_a_bad_frame_aborts_the_ring(spawn_tcp: Spawn, kind: str) -> None:
    def send(communicator: Communicator) -> None:
        stream: Any = communicator.transport._streams.to(0)
        good = stream._writer.write(Tag(0, 5), b"flour")
        event_loop.run(stream._socket.write([BAD_FRAMES[kind](good)]))

    check_a_bad_frame(spawn_tcp, send)


def greeting(rank: int, from_: str, to: str, stream: int = 0) -> bytes:
    incarnations = int(from_, 16), int(to, 16)
    nonce = secrets.token_bytes(16)
    return struct.pack("<3sBIBQQ16s", b"HOD", WIRE_VERSION, rank, stream, *incarnations, nonce)


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
                greeting(1, *known, stream=1) + bytes(64),  # and no second one
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
