"""The pieces of the gRPC transport that know no ring: options, one stream."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import Any, Callable

from hostopt.descriptors import limit
from hostopt.options import Options
from hostopt.transport import limits
from hostopt.transport.base import Payload, Tag
from hostopt.transport.frame import FrameWriter
from hostopt.transport.grpc_import import grpc

__all__: list[str] = []

GOODBYE_TIMEOUT_S = 2.0
# A peer that is silent for so long is asked whether it lives, and lost where it does not answer.
KEEPALIVE_S = 10.0
PING_TIMEOUT_S = 15.0
# Last message of a stream that ends in good order; gRPC does not always tell it from a break.
END_OF_STREAM = b"end"
# Frames that wait to be written. gRPC writes them one by one; more would only take fresh memory,
# whose page faults cost as much as the copying.
_QUEUED_FRAMES = 4
_MAX_HTTP2_FRAME_BYTES = (1 << 24) - 1
_NEVER_MS = (1 << 31) - 1


def message_options(options: Options) -> list[tuple[str, int]]:
    """gRPC arguments of servers and data channels: no proxy, no shared ports, small limits.

    No pings: one would wait behind the data of a slow link. See `control_options`.

    Args:
      options: `segment_bytes` bounds a message.

    Returns:
      Arguments for servers and channels.
    """
    message_bytes = limits.most_message_bytes(options)
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(1e3 * KEEPALIVE_S) // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.http2.max_frame_size", min(message_bytes, _MAX_HTTP2_FRAME_BYTES)),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
    ]


def server_options(options: Options, size: int) -> list[tuple[str, int]]:
    """`message_options`, and what bounds the callers of a server.

    Args:
      options: as for `message_options`.
      size: number of ranks.

    Returns:
      Arguments for a server.
    """
    return [
        *message_options(options),
        ("grpc.server_handshake_timeout_ms", int(1e3 * limits.HANDSHAKE_S)),
        ("grpc.max_allowed_incoming_connections", limits.most_connections(size, limit())),
        ("grpc.max_concurrent_streams", limits.CALLS_OF_A_CONNECTION),
        ("grpc.max_metadata_size", limits.HEADER_BYTES),
        ("grpc.absolute_max_metadata_size", limits.MOST_HEADER_BYTES),
    ]


def control_options(options: Options) -> list[tuple[str, int]]:
    """`message_options`, and pings that find a peer which is frozen or cannot be reached.

    Args:
      options: as for `message_options`.

    Returns:
      Arguments for a channel that has a connection of its own and carries little.
    """
    ping_timeout_ms = int(1e3 * PING_TIMEOUT_S)
    return [
        *message_options(options),
        ("grpc.keepalive_time_ms", int(1e3 * KEEPALIVE_S)),
        ("grpc.keepalive_timeout_ms", ping_timeout_ms),
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        ("grpc.client_idle_timeout_ms", _NEVER_MS),  # pings are no calls: it would be left
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


class Stream:
    """Frames to one peer, written one after the other from a short queue; lives on the loop.

    Args:
      channel: a connection to the peer for this stream alone.
      call: the call on that connection that takes the frames.
      writer: makes the frames.
      options: `collective_timeout_s` is how long a full queue may stand still.
      on_error: called with the reason where the stream ends before its time.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        call: Any,
        writer: FrameWriter,
        options: Options,
        on_error: Callable[[str], Awaitable[None]],
    ) -> None:
        self._writer = writer
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._room = asyncio.Semaphore(_QUEUED_FRAMES)
        self._timeout_s = options.collective_timeout_s
        self._channel = channel
        self._call = call
        self._greeting = asyncio.ensure_future(self._call.initial_metadata())
        self._writing = asyncio.ensure_future(self._write())
        self._watcher = asyncio.ensure_future(self._watch(on_error))
        self.writing_since_s: float | None = None  # the frame that the peer has yet to take
        self.written_s = 0.0  # time that all others took

    @property
    def ended(self) -> bool:
        """True once nothing can be sent any more, and the reason is known."""
        return self._watcher.done()

    async def opened(self, timeout_s: float) -> bool:
        """Wait until the peer reads; from then on each of the two sees the other die.

        Args:
          timeout_s: how long to wait at most.

        Returns:
          True once it does.
        """
        await self._first_of(self._greeting, timeout_s)
        return self._greeting.done() and not self._call.done()

    async def put(self, tag: Tag, payload: Payload) -> bool:
        """Queue a message.

        Args:
          tag: which message this is.
          payload: contiguous bytes; may be changed once this returns.

        Returns:
          False where the stream has `ended`, or stood still until the deadline.
        """
        if not await self._find_room():
            return False
        # nothing may come between the two: frames are numbered in the order of the queue
        self._frames.put_nowait(self._writer.write(tag, payload))
        return not self.ended

    async def flush(self) -> None:
        """Say that no frame follows, and return once the peer has them all."""
        if await self._find_room():
            self._frames.put_nowait(END_OF_STREAM)
            await asyncio.wait({self._watcher}, timeout=self._timeout_s)

    def cancel(self) -> None:
        """Drop the stream and what is queued."""
        self._call.cancel()

    async def close(self) -> None:
        """`cancel`, and close the connection."""
        self.cancel()
        await self._channel.close()

    async def _find_room(self) -> bool:
        if not self._room.locked():
            await self._room.acquire()
            return True
        room = asyncio.ensure_future(self._room.acquire())
        await self._first_of(room, self._timeout_s)
        if not room.done():
            room.cancel()
            return False
        return not self.ended

    async def _first_of(self, future: asyncio.Future[Any], timeout_s: float) -> None:
        """Wait for a future, the end of the stream or the deadline."""
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

    async def _watch(self, on_error: Callable[[str], Awaitable[None]]) -> None:
        try:
            await self._call
        except grpc.aio.AioRpcError as error:
            await on_error(
                error.details() or error.code().name
            )  # before a sender sees that it has ended
        except asyncio.CancelledError:
            pass
        finally:
            self._writing.cancel()
