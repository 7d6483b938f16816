"""A stream of frames on a data socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Callable

from hostopt.transport.frame import FrameWriter
from hostopt.transport.message import FINISH_CHANNEL, Payload, Tag
from hostopt.transport.stream import Stream
from hostopt.transport.tcp.data_socket import DataSocket

__all__: list[str] = []

# What the receiver writes once it has read the last frame.
RECEIVED_ALL = b"\x02"
_LAST_TAG = Tag(FINISH_CHANNEL, 0)


class SocketStream(Stream):
    """Frames to one peer. A payload is written from the memory of the caller, without a copy.

    Args:
      connect: connects to the peer; raises OSError or asyncio.TimeoutError if it cannot be
        reached.
      writer: builds the headers of the frames.
      timeout_s: time that the peer may take no bytes.
      on_unreachable: called with the reason if `connect` fails.
      on_broken: called with the reason when the stream ends unexpectedly.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[DataSocket]],
        writer: FrameWriter,
        timeout_s: float,
        on_unreachable: Callable[[str], None],
        on_broken: Callable[[str], Awaitable[None]],
    ) -> None:
        super().__init__()
        self._writer = writer
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()  # held while a frame is written
        self._socket: DataSocket | None = None
        self._opened = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.ensure_future(self._run(connect, on_unreachable, on_broken))

    @property
    def ended(self) -> bool:
        """See `Stream.ended`."""
        return self._watcher.done()

    async def wait_until_open(self, timeout_s: float) -> bool:
        """See `Stream.wait_until_open`."""
        await asyncio.wait(
            {self._opened, self._watcher},
            timeout=timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        return self._socket is not None and not self.ended

    async def put(self, tag: Tag, payload: Payload) -> bool:
        """Writes a message; see `Stream.put`."""
        if self._socket is None and not await self.wait_until_open(self._timeout_s):
            return False
        async with self._turn:
            return await self._write(tag, payload)

    async def flush(self) -> None:
        """See `Stream.flush`."""
        if self._socket is None:
            return
        async with self._turn:
            if await self._write(_LAST_TAG, b"", is_last=True):
                await asyncio.wait({self._watcher}, timeout=self._timeout_s)

    async def _write(self, tag: Tag, payload: Payload, is_last: bool = False) -> bool:
        assert self._socket is not None
        if self.ended:
            return False
        self.writing_since_s = begin_s = time.monotonic()
        try:
            header = self._writer.header(tag, payload, is_last)
            await self._socket.write((header, payload), self._timeout_s)
        except asyncio.TimeoutError:
            return False
        except OSError:
            await asyncio.wait({self._watcher}, timeout=self._timeout_s)  # it finds the reason
            return False
        except asyncio.CancelledError:  # in the middle of a frame
            self.cancel()
            raise
        finally:
            self.writing_since_s = None
        self.written_s += time.monotonic() - begin_s
        return True

    def cancel(self) -> None:
        """See `Stream.cancel`."""
        self._watcher.cancel()
        if self._socket is not None:
            self._socket.close()

    async def close(self) -> None:
        """See `Stream.close`."""
        self.cancel()

    async def _run(
        self,
        connect: Callable[[], Awaitable[DataSocket]],
        on_unreachable: Callable[[str], None],
        on_broken: Callable[[str], Awaitable[None]],
    ) -> None:
        """Connects, then waits for the end of the connection."""
        try:
            self._socket = await connect()
        except (OSError, asyncio.TimeoutError) as error:
            on_unreachable(str(error) or "it does not answer in time")
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
