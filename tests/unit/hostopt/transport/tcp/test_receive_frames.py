"""Frames from a socket: into the right memory, and into none if they are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sockets import data_sockets, run

from hostopt.cluster.cluster import Cluster
from hostopt.errors import PeerLostError, ProtocolError
from hostopt.options import Options
from hostopt.transport.frame import FrameReader, FrameWriter, Origin
from hostopt.transport.mailbox import Mailbox
from hostopt.transport.message import Tag
from hostopt.transport.tcp.socket_stream import receive_frames

PEER, ORIGIN = 1, Origin(8, 9)
MOST_BYTES = 10_000_000
TAG = Tag(0, 5)


def new_mailbox() -> Mailbox:
    cluster = Cluster.from_dict({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "worker", 0)
    return Mailbox(cluster, Options(), lambda *_: None, lambda _: None)


class Peer:
    """The sending side; the receiving side runs until the end of the scope."""

    def __init__(self, checksum: bool = True) -> None:
        self.mailbox = new_mailbox()
        self.socket, receiving = data_sockets()
        self.writer = FrameWriter(ORIGIN, checksum)
        self.receiving: asyncio.Future[bool] = asyncio.ensure_future(
            receive_frames(receiving, FrameReader(ORIGIN), self.mailbox, PEER, MOST_BYTES)
        )

    async def send(self, tag: Tag, payload: Any) -> None:
        await self.socket.write([self.writer.header(tag, payload), payload])

    async def end(self) -> bool:
        await self.socket.write([self.writer.header(TAG, b"", is_last=True)])
        return await self.receiving


@pytest.mark.parametrize("size", [0, 1, 1000, 5_000_000])
@pytest.mark.parametrize("checksum", [True, False])
def test_a_payload_goes_into_the_offered_memory(size: int, checksum: bool) -> None:
    values = np.random.default_rng(size).integers(0, 256, size, np.uint8)

    async def receive() -> Any:
        peer, into = Peer(checksum), np.zeros(size, np.uint8)
        offered = into.data
        taking = asyncio.ensure_future(peer.mailbox.take(PEER, TAG, "values", offered))
        await asyncio.sleep(0)
        await peer.send(TAG, values.data)
        tag, payload = await taking
        assert await peer.end()
        assert payload is offered
        return tag, into

    tag, into = run(receive())
    assert tag == TAG
    np.testing.assert_array_equal(into, values)


def test_messages_that_are_not_awaited_are_stored() -> None:
    async def receive() -> list[bytes]:
        peer = Peer()
        for step in range(5):
            await peer.send(Tag(0, step), bytes([step]) * step)
        assert await peer.end()
        taken = [await peer.mailbox.take(PEER, Tag(0, step), "") for step in reversed(range(5))]
        return [bytes(payload) for _, payload in taken]

    assert run(receive()) == [bytes([step]) * step for step in reversed(range(5))]


def test_a_rank_that_awaits_each_payload_in_turn_gets_all_in_its_own_memory() -> None:
    async def receive() -> int:
        peer, count = Peer(), 20
        into = np.zeros((count, 100_000), np.uint8)
        offered = [row.data for row in into]

        async def take_all() -> int:
            taken = [
                (await peer.mailbox.take(PEER, Tag(0, step), "", offered[step]))[1]
                for step in range(count)
            ]
            return sum(payload is each for payload, each in zip(taken, offered))

        taking = asyncio.ensure_future(take_all())
        await asyncio.sleep(0)
        for step in range(count):
            await peer.send(Tag(0, step), bytes([step]) * 100_000)
        in_place = await taking
        np.testing.assert_array_equal(into, np.arange(count, dtype=np.uint8)[:, None] + 0 * into)
        return in_place

    assert run(receive()) == 20


def test_an_abandoned_receive_leaves_its_memory_alone() -> None:
    """Also if half of the payload is there."""

    async def receive() -> None:
        peer, into = Peer(), np.zeros(1_000_000, np.uint8)
        taking = asyncio.ensure_future(peer.mailbox.take(PEER, TAG, "", into.data))
        await asyncio.sleep(0)
        payload = b"\x01" * into.size
        frame = peer.writer.header(TAG, payload) + payload
        await peer.socket.write([frame[:500_000]])
        while not into.any():
            await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait({taking})
        before = into.copy()
        await peer.socket.write([frame[500_000:]])
        await peer.send(Tag(0, 6), b"next")
        assert bytes((await peer.mailbox.take(PEER, Tag(0, 6), ""))[1]) == b"next"
        np.testing.assert_array_equal(into, before)

    run(receive())


@pytest.mark.parametrize(("tag", "size"), [(TAG, 11), (TAG._replace(signature=7), 10)])
def test_a_payload_of_another_call_or_length_is_not_written_into_the_offered_memory(
    tag: Tag, size: int
) -> None:
    async def receive() -> None:
        peer, into = Peer(), np.zeros(10, np.uint8)
        taking = asyncio.ensure_future(peer.mailbox.take(PEER, TAG, "", into.data))
        await asyncio.sleep(0)
        await peer.send(tag, b"\x01" * size)
        assert bytes((await taking)[1]) == b"\x01" * size
        assert not into.any()

    run(receive())


def flip(frame: bytes, position: int) -> bytes:
    return frame[:position] + bytes([frame[position] ^ 1]) + frame[position + 1 :]


# Faults that the header shows, so that no byte of the payload may be used.
BAD_HEADERS: dict[str, Callable[[FrameWriter, bytes], bytes]] = {
    "magic": lambda writer, good: b"HU" + good[2:],
    "http": lambda writer, good: b"GET / HTTP/1.1\r\n" * 9,
    "flipped": lambda writer, good: flip(good, 5),
    "too-large": lambda writer, good: writer.header(TAG, bytes(MOST_BYTES + 1)) + good[64:],
    "of-another-job": lambda writer, good: FrameWriter(Origin(7, 9), False).write(TAG, good[64:]),
    "of-another-incarnation": lambda writer, good: FrameWriter(Origin(8, 7), False).write(
        TAG, good[64:]
    ),
    "from-later": lambda writer, good: writer.write(TAG, good[64:]),
}


@pytest.mark.parametrize("kind", BAD_HEADERS)
def test_a_bad_header_touches_no_memory(kind: str) -> None:
    async def receive() -> None:
        peer, into = Peer(checksum=False), np.zeros(100, np.uint8)
        taking = asyncio.ensure_future(peer.mailbox.take(PEER, TAG, "", into.data))
        await asyncio.sleep(0)
        bad = BAD_HEADERS[kind](peer.writer, peer.writer.write(TAG, b"\x01" * into.size))
        await peer.socket.write([bad])
        with pytest.raises(ProtocolError):
            await peer.receiving
        assert not into.any()
        assert not taking.done()
        taking.cancel()

    run(receive())


def test_a_flipped_payload_is_refused_before_the_message_is_delivered() -> None:
    async def receive() -> None:
        peer = Peer()
        taking = asyncio.ensure_future(peer.mailbox.take(PEER, TAG, "", np.zeros(100, "u1").data))
        await asyncio.sleep(0)
        await peer.socket.write([flip(peer.writer.write(TAG, bytes(100)), 120)])
        with pytest.raises(ProtocolError, match="checksum"):
            await peer.receiving
        assert not taking.done()
        taking.cancel()

    run(receive())


def test_a_repeated_frame_is_ignored() -> None:
    async def receive() -> None:
        peer = Peer()
        frame = peer.writer.write(TAG, b"once")
        await peer.socket.write([frame, frame])
        await peer.send(Tag(0, 6), b"next")
        assert await peer.end()
        assert bytes((await peer.mailbox.take(PEER, TAG, ""))[1]) == b"once"
        assert bytes((await peer.mailbox.take(PEER, Tag(0, 6), ""))[1]) == b"next"
        assert not peer.mailbox._messages

    run(receive())


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 100])
def test_a_connection_that_ends_within_a_frame_is_broken(nbytes: int) -> None:
    async def receive() -> None:
        peer = Peer()
        await peer.socket.write([peer.writer.write(TAG, bytes(100))[:nbytes]])
        peer.socket.close()
        with pytest.raises(OSError, match="closed"):
            await peer.receiving

    run(receive())


def test_nothing_is_received_after_an_abort() -> None:
    async def receive() -> None:
        peer, into = Peer(), np.zeros(100, np.uint8)
        taking = asyncio.ensure_future(peer.mailbox.take(PEER, TAG, "", into.data))
        await asyncio.sleep(0)
        peer.mailbox.fail(PeerLostError("rank 1 lost"))
        with pytest.raises(PeerLostError):
            await taking
        await peer.send(TAG, b"\x01" * 100)
        assert await peer.receiving is False
        assert not into.any()

    run(receive())


def test_random_bytes_never_reach_the_mailbox() -> None:
    generator = np.random.default_rng(0)

    async def receive(data: bytes) -> None:
        peer = Peer()
        await peer.socket.write([data])
        peer.socket.close()
        with pytest.raises((ProtocolError, OSError)):
            await peer.receiving
        assert not peer.mailbox._messages

    for _ in range(200):
        run(receive(generator.bytes(int(generator.integers(0, 300)))))
