"""A stream of frames on a data socket: its sender, and the function of its receiver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator
from typing import Callable

from hostopt.transport.event_loop import settle
from hostopt.transport.frame import HEADER_BYTES, FrameReader, FrameWriter, Header, Stream
from hostopt.transport.mailbox import Destination, Mailbox
from hostopt.transport.message import FINISH_CHANNEL, Payload, Tag
from hostopt.transport.tcp.data_socket import DataSocket, StalledError

# What the receiver writes once it has read the last frame.
RECEIVED_ALL = b"\x02"
_IN_A_ROW = 16  # frames until other work on the event loop has its turn
# Headers and payloads that may wait. More would delay the messages of other calls.
_MOST_UNSENT = 16
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
        self._socket: DataSocket | None = None
        self._unsent: list[memoryview] = []  # parts of frames, in order
        self._parts = 0  # of all frames so far
        self._writing: asyncio.Future[None] | None = None  # writes what is unsent
        # those who wait until this number of parts is written, in that order
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._is_stalled = self._is_cancelled = False
        self._opened = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.ensure_future(self._run(connect, on_unreachable, on_broken))

    @property
    def ended(self) -> bool:
        """See `Stream.ended`. A stream that stalled has not ended: its peer is still there."""
        return self._watcher.done() and not self._is_stalled

    @property
    def writing_since_s(self) -> float | None:
        """See `Stream.writing_since_s`."""
        return None if self._socket is None else self._socket.writing_since_s

    async def wait_until_open(self, timeout_s: float) -> bool:
        """See `Stream.wait_until_open`."""
        await self._wait_for(self._opened, timeout_s)
        return self._socket is not None and not self._watcher.done()

    async def put(self, tag: Tag, payload: Payload, lazily: bool = False) -> bool:
        """Writes a message; see `Stream.put`."""
        if self._socket is None and not await self.wait_until_open(self._timeout_s):
            return False
        if not self._append(tag, payload):
            return False
        is_short = len(self._unsent) <= _MOST_UNSENT
        return (lazily and is_short) or await self.has_written()

    async def has_written(self) -> bool:
        """See `Stream.has_written`."""
        parts = self._parts
        if self._writing is not None:
            written = asyncio.get_running_loop().create_future()
            self._waiting.append((parts, written))
            try:
                await written
            except asyncio.CancelledError:  # other senders continue behind the rest of this frame
                self.copy_rest()
                raise
        return self._parts - len(self._unsent) >= parts

    def copy_rest(self) -> None:
        """See `Stream.copy_rest`."""
        self._unsent[:] = [memoryview(bytes(part)) for part in self._unsent]

    async def flush(self) -> None:
        """See `Stream.flush`."""
        if self._socket is None or not self._append(_LAST_TAG, b"", is_last=True):
            return
        if await self.has_written():
            await asyncio.wait({self._watcher}, timeout=self._timeout_s)

    def _append(self, tag: Tag, payload: Payload, is_last: bool = False) -> bool:
        """Writes a frame behind those before it, now or in the background."""
        if self._watcher.done():
            return False
        header = self._writer.header(tag, payload, is_last)
        self._unsent += memoryview(header), memoryview(payload)
        self._parts += 2
        if self._writing is None and not self._write_now():
            self._writing = asyncio.ensure_future(self._write_rest())
        return True

    def _write_now(self) -> bool:
        assert self._socket is not None
        begin_s = time.monotonic()
        try:
            return self._socket.write_now(self._unsent)
        except OSError:
            return False  # `_write_rest` has it again
        finally:
            self.written_s += time.monotonic() - begin_s

    async def _write_rest(self) -> None:
        assert self._socket is not None
        begin_s = time.monotonic()

        def note_progress() -> None:
            nonlocal begin_s
            now_s = time.monotonic()
            self.written_s += now_s - begin_s
            begin_s = now_s
            written = self._parts - len(self._unsent)
            while self._waiting and self._waiting[0][0] <= written:
                settle(self._waiting.pop(0)[1])

        try:
            while self._unsent:  # frames may be appended before this coroutine continues
                await self._socket.write_rest(self._unsent, self._timeout_s, note_progress)
        except StalledError:
            self._is_stalled = True
            self.cancel()  # the rest of the frame will not follow
        except OSError:
            await asyncio.wait({self._watcher}, timeout=self._timeout_s)  # it finds the reason
        finally:
            self._writing = None
            while self._waiting:  # in vain
                settle(self._waiting.pop(0)[1])

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
    has_ended = False

    def wanted() -> Iterator[Destination | None]:
        nonlocal has_ended
        frame_header = Destination(memoryview(bytearray(HEADER_BYTES)))
        while mailbox.error is None:
            yield frame_header
            header = Header.parse(frame_header.view)
            if header.length > most_bytes:
                raise header.error(f"expected up to {most_bytes} bytes, got {header.length}")
            is_new = reader.admit(header)
            if header.is_last:
                header.check(b"")
                has_ended = True
                return
            if is_new:
                destination = mailbox.destination(peer, header.tag, header.length)
            else:
                destination = Destination(memoryview(bytearray(header.length)))
            yield destination
            header.check(destination.view)
            has_continued = mailbox.put(peer, header.tag, destination.view) if is_new else True
            if not has_continued or header.number % _IN_A_ROW == 0:
                yield None  # what waits continues, and offers memory for the next payload

    await connection.fill(wanted())
    return has_ended
