"""Buffers that change as soon as a collective returns, over sockets that take little at a time."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives.call import Array
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.messages import CallMessages
from hostopt.collectives.ring import RingGroup
from hostopt.collectives.ring_schedule import chunk_slices
from hostopt.collectives.wire_format import new_wire_format
from hostopt.transport import event_loop
from hostopt.transport.tcp.data_socket import DataSocket

LENGTH = 200_000  # of float32: much more than the sockets hold
SEGMENT_BYTES = 64 << 10


@pytest.fixture(autouse=True)
def small_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DataSocket.__init__

    def init(self: DataSocket, connected: socket.socket) -> None:
        original(self, connected)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, 64 << 10)

    monkeypatch.setattr(DataSocket, "__init__", init)


def values(rank: int, seed: int) -> Array:
    """Returns values whose sums are exact in every format of the wire."""
    return np.random.default_rng([rank, seed]).integers(-8, 9, LENGTH).astype(np.float32)


def call_of(communicator: Communicator, kind: str, seed: int) -> Any:
    return communicator.begin_call(kind, f"number {seed}", np.zeros(LENGTH, np.float32))


@pytest.mark.parametrize("compression", [None, "fp16"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_buffer_may_change_once_a_collective_has_ended(
    spawn_tcp: Spawn, size: int, compression: str | None
) -> None:
    def reduce(communicator: Communicator) -> None:
        ring = RingGroup(communicator.transport, wire_format=new_wire_format(compression))
        chunk = chunk_slices(LENGTH, size)[communicator.rank]
        for seed in range(6):
            total = sum(values(rank, seed) for rank in range(size))
            buffer = values(communicator.rank, seed)
            ring.all_reduce(call_of(communicator, "sum", seed), buffer)
            np.testing.assert_array_equal(buffer, total)
            buffer[:] = values(communicator.rank, seed)
            kept = ring.reduce_scatter(call_of(communicator, "scatter", seed), buffer)
            buffer[:] = 99
            np.testing.assert_array_equal(kept, total[chunk])
            gathered = ring.all_gather(call_of(communicator, "gather", seed), kept[:1000])
            kept[:] = 99
            expected = [total[part][:1000] for part in chunk_slices(LENGTH, size)]
            np.testing.assert_array_equal(gathered, expected)

    spawn_tcp(size, reduce, segment_bytes=SEGMENT_BYTES)


def test_a_buffer_may_change_after_halving_and_doubling(spawn_tcp: Spawn) -> None:
    def reduce(communicator: Communicator) -> None:
        for seed in range(4):
            buffer = values(communicator.rank, seed)
            RingGroup(communicator.transport).all_reduce(
                call_of(communicator, "sum", seed), buffer
            )
            expected = sum(values(rank, seed) for rank in range(4))
            np.testing.assert_array_equal(buffer, expected)
            buffer[:] = 99

    spawn_tcp(4, reduce, segment_bytes=SEGMENT_BYTES)


def test_what_was_sent_before_an_error_arrives_as_it_was(spawn_tcp: Spawn) -> None:
    """The receiver must not take a buffer that is used again for a fault of the network."""

    def send_or_receive(communicator: Communicator) -> None:
        call = call_of(communicator, "sum", 0)
        messages = CallMessages(communicator.transport, call)
        buffer = values(0, 0)

        async def send() -> None:
            async with messages.sending(1, "phase"):
                await messages.send_array(1, call.tag(), buffer, "phase", lazily=True)
                raise KeyError("mine")

        async def receive() -> Array:
            return await messages.receive_array(0, call.tag(), LENGTH, buffer.dtype, "phase")

        if communicator.rank == 0:
            with pytest.raises(KeyError, match="mine"):
                event_loop.run(send())
            buffer[:] = 99
            communicator.barrier("both")
        else:
            communicator.barrier("both")
            np.testing.assert_array_equal(event_loop.run(receive()), values(0, 0))

    spawn_tcp(2, send_or_receive)
