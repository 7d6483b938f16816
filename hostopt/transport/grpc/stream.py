"""Streams of frames from this rank to its peers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import Any, Callable

from hostopt.transport import event_loop
from hostopt.transport.grpc.frame import FrameWriter
from hostopt.transport.grpc.runtime import grpc
from hostopt.transport.message import Payload, Tag

__all__: list[str] = []

# Last message of a stream that ends in good order. gRPC alone does not always tell the end of a
# stream from a broken connection.
END_OF_STREAM = b"end"
# Frames that wait to be written. gRPC writes them one by one, so more frames would only take fresh
# memory, whose page faults cost as much as copying.
_QUEUED_FRAMES = 4


class Stream:
    """Frames to one peer, written one by one from a short queue; used on the event loop.

    Args:
      channel: connection to the peer for this stream alone.
      call: the call on that connection that takes the frames.
      writer: builds the frames.
      timeout_s: time that a full queue may make no progress.
      on_broken: called with the reason when the stream ends unexpectedly.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        call: Any,
        writer: FrameWriter,
        timeout_s: float,
        on_broken: Callable[[str], Awaitable[None]],
    ) -> None:
        self._writer = writer
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._room = asyncio.Semaphore(_QUEUED_FRAMES)
        self._timeout_s = timeout_s
        self._channel = channel
        self._call = call
        self._initial_metadata = asyncio.ensure_future(self._call.initial_metadata())
        self._writing = asyncio.ensure_future(self._write())
        self._watcher = asyncio.ensure_future(self._watch(on_broken))
        self.writing_since_s: float | None = None  # start of the write in progress
        self.written_s = 0.0  # duration of all completed writes

    @property
    def ended(self) -> bool:
        """True once nothing can be sent any more, and the reason is known."""
        return self._watcher.done()

    async def wait_until_open(self, timeout_s: float) -> bool:
        """Waits until the peer reads the stream; then each side detects the end of the other.

        Args:
          timeout_s: time to wait.

        Returns:
          True if the peer reads the stream.
        """
        await self._wait_for(self._initial_metadata, timeout_s)
        return self._initial_metadata.done() and not self._call.done()

    async def put(self, tag: Tag, payload: Payload) -> bool:
        """Queues a message.

        Args:
          tag: which message this is.
          payload: contiguous bytes; may be changed once this returns.

        Returns:
          False if the stream has `ended`, or made no progress before the deadline.
        """
        if not await self._acquire_room():
            return False
        # no await between the two: frames are numbered in the order of the queue
        self._frames.put_nowait(self._writer.write(tag, payload))
        return not self.ended

    async def flush(self) -> None:
        """Ends the stream in good order, and returns once the peer has all frames."""
        if await self._acquire_room():
            self._frames.put_nowait(END_OF_STREAM)
            await asyncio.wait({self._watcher}, timeout=self._timeout_s)

    def cancel(self) -> None:
        """Ends the stream at once and drops the queued frames."""
        self._call.cancel()

    async def close(self) -> None:
        """Cancels the stream and closes its connection."""
        self.cancel()
        await self._channel.close()

    async def _acquire_room(self) -> bool:
        if not self._room.locked():
            await self._room.acquire()
            return True
        room = asyncio.ensure_future(self._room.acquire())
        await self._wait_for(room, self._timeout_s)
        if not room.done():
            room.cancel()
            return False
        return not self.ended

    async def _wait_for(self, future: asyncio.Future[Any], timeout_s: float) -> None:
        """Waits for a future, the end of the stream or the deadline."""
        await asyncio.wait(
            {future, self._watcher}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )

    async def _write(self) -> None:
        message = b""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # see _watch
            while message != END_OF_STREAM:
                message = await self._frames.get()
                self.writing_since_s = begin_s = time.monotonic()
                await self._call.write(message)
                self.writing_since_s = None
                self.written_s += time.monotonic() - begin_s
                self._room.release()
            await self._call.done_writing()

    async def _watch(self, on_broken: Callable[[str], Awaitable[None]]) -> None:
        try:
            await self._call
        except grpc.aio.AioRpcError as error:
            # completes before a sender can see that the stream has ended
            await on_broken(error.details() or error.code().name)
        except asyncio.CancelledError:
            pass
        finally:
            self._writing.cancel()


class Streams:
    """The streams of one rank, each opened by the first message to its peer.

    Args:
      open_stream: opens the stream to a peer.
    """

    def __init__(self, open_stream: Callable[[int], Stream]) -> None:
        self._open_stream = open_stream
        self._streams: dict[int, Stream] = {}

    def to(self, peer: int) -> Stream:
        """Returns the stream to a peer; opens it if there is none."""
        if peer not in self._streams:
            self._streams[peer] = self._open_stream(peer)
        return self._streams[peer]

    def all(self) -> list[Stream]:
        """Returns the open streams; may be called from any thread."""
        return list(self._streams.values())

    def cancel(self, peer: int) -> None:
        """Cancels the stream to a peer, if there is one."""
        if peer in self._streams:
            self._streams[peer].cancel()

    def forget(self, peer: int) -> None:
        """Closes and removes the stream to a peer, if there is one."""
        stream = self._streams.pop(peer, None)
        if stream is not None:
            event_loop.start(stream.close())

    def blocked(self) -> dict[int, float]:
        """Returns the start time of each write in progress; may be called from any thread.

        Returns:
          Seconds on the monotonic clock, by peer.
        """
        since = {peer: stream.writing_since_s for peer, stream in list(self._streams.items())}
        return {peer: since_s for peer, since_s in since.items() if since_s is not None}
