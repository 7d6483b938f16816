"""Streams on data sockets: whole frames or none, whatever happens to their senders."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Callable

import pytest
from sockets import data_sockets, run

from hostopt.transport.frame import HEADER_BYTES, FrameReader, FrameWriter, Header, Origin
from hostopt.transport.message import Tag
from hostopt.transport.tcp.data_socket import DataSocket
from hostopt.transport.tcp.socket_stream import RECEIVED_ALL, SocketStream

ORIGIN = Origin(8, 9)
LARGE = 20_000_000  # more than the buffers of the kernel hold


class Peer:
    """A stream, and the socket of the peer that it goes to."""

    def __init__(
        self,
        timeout_s: float = 30.0,
        connect: Callable[[DataSocket], Awaitable[DataSocket]] | None = None,
    ) -> None:
        self.local, self.remote = data_sockets()
        self.unreachable: list[str] = []
        self.broken: list[str] = []
        self._reader = FrameReader(ORIGIN)

        async def connect_now() -> DataSocket:
            return await connect(self.local) if connect else self.local

        async def note_broken(reason: str) -> None:
            self.broken.append(reason)

        self.stream = SocketStream(
            connect_now,
            FrameWriter(ORIGIN, True),
            timeout_s,
            self.unreachable.append,
            note_broken,
        )

    async def receive(self) -> tuple[Tag, bytes]:
        header = Header.parse(await self.remote.read_exactly(HEADER_BYTES))
        payload = await self.remote.read_exactly(header.length)
        header.check(payload)
        assert self._reader.admit(header)
        return header.tag, payload


def test_messages_arrive_in_order() -> None:
    async def work() -> list[tuple[Tag, bytes]]:
        peer = Peer()
        assert all([await peer.stream.put(Tag(0, step), bytes([step])) for step in range(3)])
        return [await peer.receive() for _ in range(3)]

    assert run(work()) == [(Tag(0, step), bytes([step])) for step in range(3)]


def test_concurrent_senders_do_not_mix_their_frames() -> None:
    async def work() -> set[int]:
        peer = Peer()
        sending = [peer.stream.put(Tag(0, step), bytes([step]) * LARGE) for step in range(3)]
        sent = asyncio.gather(*sending)
        received = [await peer.receive() for _ in range(3)]
        assert await sent == [True] * 3
        for tag, payload in received:
            assert payload == bytes([tag.step]) * LARGE
        return {tag.step for tag, _ in received}

    assert run(work()) == {0, 1, 2}


def test_a_stalled_frame_is_never_completed_with_another_one() -> None:
    async def work() -> None:
        peer = Peer(timeout_s=0.1)
        first = asyncio.ensure_future(peer.stream.put(Tag(0, 1), b"\x01" * LARGE))
        second = asyncio.ensure_future(peer.stream.put(Tag(0, 2), b"\x02" * LARGE))
        assert await first is False
        assert await second is False
        assert not peer.stream.ended  # the peer has not left
        header = Header.parse(await peer.remote.read_exactly(HEADER_BYTES))
        with pytest.raises(OSError, match="closed"):
            await peer.remote.read_exactly(header.length)

    run(work())


def test_a_cancelled_sender_does_not_cut_its_frame() -> None:
    async def work() -> None:
        peer = Peer()
        payload = bytearray(b"\x01" * LARGE)
        first = asyncio.ensure_future(peer.stream.put(Tag(0, 1), memoryview(payload)))
        second = asyncio.ensure_future(peer.stream.put(Tag(0, 2), b"second"))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait({first})
        assert first.cancelled()
        payload[:] = bytes(LARGE)  # the caller may change it now
        assert await peer.receive() == (Tag(0, 1), b"\x01" * LARGE)
        assert await peer.receive() == (Tag(0, 2), b"second")
        assert await second

    run(work())


def test_a_lazy_sender_continues_before_its_frames_are_written() -> None:
    async def work() -> None:
        peer = Peer()
        payloads = [bytes([step]) * LARGE for step in range(3)]
        for step, payload in enumerate(payloads):
            assert await peer.stream.put(Tag(0, step), payload, lazily=True)
        rest = asyncio.ensure_future(peer.stream.has_written())
        last = asyncio.ensure_future(peer.stream.put(Tag(0, 3), b"last"))
        await asyncio.sleep(0.01)
        assert not rest.done()
        assert [await peer.receive() for _ in range(4)] == [
            *((Tag(0, step), payload) for step, payload in enumerate(payloads)),
            (Tag(0, 3), b"last"),
        ]
        assert await rest
        assert await last
        assert await peer.stream.has_written()

    run(work())


def test_a_sender_waits_for_its_own_frame_and_not_for_later_ones() -> None:
    async def work() -> None:
        peer = Peer()
        assert await peer.stream.put(Tag(0, 0), bytes(LARGE), lazily=True)
        sending = asyncio.ensure_future(peer.stream.put(Tag(0, 1), b"small"))
        await asyncio.sleep(0)
        assert await peer.stream.put(Tag(0, 2), bytes(LARGE), lazily=True)
        assert not sending.done()
        assert [(await peer.receive())[0].step for _ in (0, 1)] == [0, 1]
        assert await sending
        assert peer.stream.writing_since_s is not None  # the last frame
        assert (await peer.receive())[0].step == 2
        assert await peer.stream.has_written()

    run(work())


def test_a_lazy_sender_waits_once_many_frames_are_unsent() -> None:
    async def work() -> int:
        peer, count = Peer(), 0
        first = peer.stream.put(Tag(0, count), bytes(LARGE), lazily=True)
        sending = asyncio.ensure_future(first)
        while sending.done() or not count:
            await sending
            count += 1
            sending = asyncio.ensure_future(peer.stream.put(Tag(0, count), b"", lazily=True))
            await asyncio.sleep(0)
        for _ in range(count + 1):
            await peer.receive()
        assert await sending
        return count

    assert 4 < run(work()) < 100


def test_payloads_that_are_not_sent_may_be_copied() -> None:
    async def work() -> None:
        peer = Peer()
        payloads = [bytearray(bytes([step]) * LARGE) for step in (1, 2)]
        for payload in payloads:
            assert await peer.stream.put(Tag(0, payload[0]), memoryview(payload), lazily=True)
        peer.stream.copy_rest()
        for payload in payloads:
            payload[:] = bytes(LARGE)
        assert [await peer.receive() for _ in (1, 2)] == [
            (Tag(0, step), bytes([step]) * LARGE) for step in (1, 2)
        ]

    run(work())


def test_a_lazy_sender_learns_of_a_stall_and_of_the_end() -> None:
    async def work(ends: bool) -> None:
        peer = Peer(timeout_s=0.1)
        assert await peer.stream.put(Tag(0, 1), bytes(LARGE), lazily=True)
        await asyncio.sleep(0)
        assert peer.stream.writing_since_s is not None
        if ends:
            peer.remote.close()
        assert not await peer.stream.has_written()
        assert not await peer.stream.put(Tag(0, 2), b"", lazily=True)
        assert not await peer.stream.has_written()
        assert peer.stream.ended is ends
        assert peer.stream.writing_since_s is None

    for ends in (False, True):
        run(work(ends))


def test_a_stream_that_is_cancelled_while_it_connects_leaves_no_connection() -> None:
    """Also if its connection succeeds at that moment, and swallows the cancellation."""

    async def connect(local: DataSocket) -> DataSocket:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        return local

    async def work() -> None:
        peer = Peer(connect=connect)
        assert not await peer.stream.wait_until_open(0.01)
        peer.stream.cancel()
        with pytest.raises(OSError, match="closed"):
            await peer.remote.read_exactly(1)
        assert not await peer.stream.put(Tag(0, 1), b"late")

    run(work())


@pytest.mark.parametrize("error", [ConnectionRefusedError("refused"), ValueError("of any kind")])
def test_a_peer_that_cannot_be_reached(error: Exception) -> None:
    async def connect(local: DataSocket) -> DataSocket:
        raise error

    async def work() -> list[str]:
        peer = Peer(connect=connect)
        assert not await peer.stream.put(Tag(0, 1), b"lost")
        assert not peer.broken
        return peer.unreachable

    assert run(work()) == [str(error)]


def test_a_broken_connection_is_reported_before_a_sender_sees_it() -> None:
    async def work() -> list[str]:
        peer = Peer()
        assert await peer.stream.put(Tag(0, 1), b"")
        peer.remote.close()
        while await peer.stream.put(Tag(0, 2), bytes(1000)):
            await asyncio.sleep(0)
        assert peer.stream.ended
        return peer.broken

    assert len(run(work())) == 1


def test_the_end_in_good_order() -> None:
    async def work() -> None:
        peer = Peer()
        assert await peer.stream.put(Tag(0, 1), b"last")
        flushing = asyncio.ensure_future(peer.stream.flush())
        await peer.receive()
        header = Header.parse(await peer.remote.read_exactly(HEADER_BYTES))
        assert header.is_last
        assert not flushing.done()
        await peer.remote.write([RECEIVED_ALL])
        await flushing
        assert peer.stream.ended
        assert not peer.broken
        assert not await peer.stream.put(Tag(0, 2), b"late")

    run(work())


def test_a_peer_that_does_not_confirm_the_end_is_waited_for_until_the_deadline() -> None:
    async def work() -> bool:
        peer = Peer(timeout_s=0.05)
        assert await peer.stream.put(Tag(0, 1), b"last")
        await peer.stream.flush()
        return peer.stream.ended

    assert not run(work())
