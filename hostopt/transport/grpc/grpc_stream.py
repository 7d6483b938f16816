"""A stream of frames in gRPC messages."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import Any, Callable

from hostopt.transport.frame import FrameWriter, Stream
from hostopt.transport.grpc.runtime import grpc
from hostopt.transport.message import Payload, Tag

# Last message of a stream that ends in good order. gRPC alone does not always tell the end of a
# stream from a broken connection.
END_OF_STREAM = b"end"
# Initial metadata with which a peer accepts a stream. A refused stream has empty initial metadata,
# which may arrive before the refusal.
ACCEPTED = ("stream", "accepted")
# Time in which a peer that can be reached accepts a stream. A first attempt to connect may fail on
# a busy machine, and gRPC then waits before the next one.
_ACCEPTED_WITHIN_S = 20.0
# Frames that wait to be written. gRPC writes them one by one, so more frames would only take fresh
# memory, whose page faults cost as much as copying.
_QUEUED_FRAMES = 4


class GrpcStream(Stream):
    """Frames to one peer, written one by one from a short queue, on a `channel` of their own."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        call: Any,
        writer: FrameWriter,
        timeout_s: float,
        on_broken: Callable[[str], Awaitable[None]],
    ) -> None:
        super().__init__(writer, timeout_s)
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._room = asyncio.Semaphore(_QUEUED_FRAMES)
        self._channel = channel
        self._call = call
        self._accepted = asyncio.ensure_future(self._is_accepted())
        self._writing = asyncio.ensure_future(self._write())
        self._watcher = asyncio.ensure_future(self._watch(on_broken))

    @property
    def ended(self) -> bool:
        """See `Stream.ended`."""
        return self._watcher.done()

    async def wait_until_open(self, timeout_s: float) -> bool:
        """See `Stream.wait_until_open`."""
        await self._wait_for(self._accepted, timeout_s)
        return self._accepted.done() and self._accepted.result() and not self._call.done()

    async def put(self, tag: Tag, payload: Payload) -> bool:
        """Queues a message; see `Stream.put`."""
        if not await self._acquire_room():
            return False
        # no await between the two: frames are numbered in the order of the queue
        self._frames.put_nowait(self._writer.write(tag, payload))
        return not self.ended

    async def flush(self) -> None:
        """See `Stream.flush`."""
        if await self._acquire_room():
            self._frames.put_nowait(END_OF_STREAM)
            await asyncio.wait({self._watcher}, timeout=self._timeout_s)

    def cancel(self) -> None:
        """See `Stream.cancel`."""
        self._call.cancel()

    async def close(self) -> None:
        """See `Stream.close`."""
        await super().close()
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

    async def _is_accepted(self) -> bool:
        try:
            return ACCEPTED in tuple(await self._call.initial_metadata())
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            return False

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
            await asyncio.wait({self._accepted}, timeout=_ACCEPTED_WITHIN_S)
            if not self._accepted.done():
                await on_broken(f"it has not accepted a stream for {_ACCEPTED_WITHIN_S:g} s")
                self.cancel()
            await self._call
        except grpc.aio.AioRpcError as error:
            # completes before a sender can see that the stream has ended
            await on_broken(error.details() or error.code().name)
        except asyncio.CancelledError:
            pass
        finally:
            self._writing.cancel()
