"""A stream of frames on a data socket: its sender, and the function of its receiver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Callable

from hostopt.transport.frame import HEADER_BYTES, FrameReader, FrameWriter, Header, Stream
from hostopt.transport.mailbox import Destination, Mailbox
from hostopt.transport.message import FINISH_CHANNEL, Payload, Tag
from hostopt.transport.tcp.data_socket import DataSocket, StalledError

# What the receiver writes once it has read the last frame.
RECEIVED_ALL = b"\x02"
_LAST_TAG = Tag(FINISH_CHANNEL, 0)


class SocketStream(Stream):
    """Frames to one peer. A payload is written from the memory of the caller, without a copy."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[DataSocket]],
        writer: FrameWriter,
        timeout_s: float,
        on_unreachable: Callable[[str], None],
        on_broken: Callable[[str], Awaitable[None]],
    ) -> None:
        super().__init__(writer, timeout_s)
        self._turn = asyncio.Lock()  # held while a frame is written
        self._socket: DataSocket | None = None
        self._completing: asyncio.Future[None] | None = None
        self._is_stalled = self._is_cancelled = False
        self._opened = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.ensure_future(self._run(connect, on_unreachable, on_broken))

    @property
    def ended(self) -> bool:
        """See `Stream.ended`. A stream that stalled has not ended: its peer is still there."""
        return self._watcher.done() and not self._is_stalled

    async def wait_until_open(self, timeout_s: float) -> bool:
        """See `Stream.wait_until_open`."""
        await self._wait_for(self._opened, timeout_s)
        return self._socket is not None and not self._watcher.done()

    async def put(self, tag: Tag, payload: Payload) -> bool:
        """Writes a message; see `Stream.put`."""
        if self._socket is None and not await self.wait_until_open(self._timeout_s):
            return False
        return await self._write(tag, payload)

    async def flush(self) -> None:
        """See `Stream.flush`."""
        if self._socket is not None and await self._write(_LAST_TAG, b"", is_last=True):
            await asyncio.wait({self._watcher}, timeout=self._timeout_s)

    async def _write(self, tag: Tag, payload: Payload, is_last: bool = False) -> bool:
        await self._turn.acquire()
        assert self._socket is not None
        holds_turn = True
        self.writing_since_s = begin_s = time.monotonic()
        try:
            if self._watcher.done():
                return False
            header = self._writer.header(tag, payload, is_last)
            await self._socket.write((header, payload), self._timeout_s)
        except StalledError:
            self._is_stalled = True
            self.cancel()  # the rest of the frame will not follow
            return False
        except OSError:
            await asyncio.wait({self._watcher}, timeout=self._timeout_s)  # it finds the reason
            return False
        except asyncio.CancelledError:  # other senders continue behind the rest of the frame
            if self._socket.unsent:
                holds_turn = False
                self._completing = asyncio.ensure_future(self._complete())
            raise
        finally:
            self.writing_since_s = None
            if holds_turn:
                self._turn.release()
        self.written_s += time.monotonic() - begin_s
        return True

    async def _complete(self) -> None:
        """Writes the rest of a frame whose sender was cancelled."""
        assert self._socket is not None
        unsent, self._socket.unsent = self._socket.unsent, []
        try:
            await self._socket.write(unsent, self._timeout_s)
        except (OSError, StalledError):
            self.cancel()
        finally:
            self._turn.release()

    def cancel(self) -> None:
        """See `Stream.cancel`."""
        self._is_cancelled = True
        self._watcher.cancel()
        if self._socket is not None:
            self._socket.close()

    async def _run(
        self,
        connect: Callable[[], Awaitable[DataSocket]],
        on_unreachable: Callable[[str], None],
        on_broken: Callable[[str], Awaitable[None]],
    ) -> None:
        """Connects, then waits for the end of the connection."""
        try:
            self._socket = await connect()
        except Exception as error:
            on_unreachable(str(error) or "it does not answer in time")
            return
        if self._is_cancelled:  # before Python 3.12, wait_for may ignore a cancellation
            self._socket.close()
            return
        self._opened.set_result(None)
        reason = "connection reset"
        try:
            if await self._socket.read_exactly(len(RECEIVED_ALL)) == RECEIVED_ALL:
                return
        except OSError as error:
            reason = str(error)
        finally:
            self._socket.close()
        # completes before a sender can see that the stream has ended
        await on_broken(reason)


async def receive_frames(
    connection: DataSocket, reader: FrameReader, mailbox: Mailbox, peer: int, most_bytes: int
) -> bool:
    """Receives the frames of a peer into memory that is meant for them, and returns True.

    Returns False if the ring is aborted. Raises ProtocolError for a frame that cannot be used; if
    its header shows that, no byte of the payload is read.
    """
    data = memoryview(bytearray(HEADER_BYTES))
    while await _fill(Destination(data), connection, mailbox):
        header = Header.parse(data)
        if header.length > most_bytes:
            raise header.error(f"expected up to {most_bytes} bytes, got {header.length}")
        is_new = reader.admit(header)
        if header.is_last:
            header.check(b"")
            return True
        if is_new:
            destination = mailbox.destination(peer, header.tag, header.length)
        else:
            destination = Destination(memoryview(bytearray(header.length)))
        if not await _fill(destination, connection, mailbox):
            break
        header.check(destination.view)
        if is_new:
            mailbox.put(peer, header.tag, destination.view)
        # The waiting call continues now, so that it can offer memory for the next payload.
        await asyncio.sleep(0)
    return False


async def _fill(destination: Destination, connection: DataSocket, mailbox: Mailbox) -> bool:
    """Reads until a destination is full; returns False if the ring is aborted."""
    filled, length = 0, len(destination.view)
    while filled < length and mailbox.error is None:
        count = connection.read_into(destination.view[filled:])
        filled += count
        if not count:  # the destination may be another one afterwards
            await connection.wait_for(length - filled)
    return mailbox.error is None
