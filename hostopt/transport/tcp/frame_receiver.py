"""Receives the frames of a peer from a data socket, into the memory that they are meant for."""

from __future__ import annotations

import asyncio

from hostopt.transport.destinations import Destination
from hostopt.transport.frame import HEADER_BYTES, FrameReader, Header
from hostopt.transport.mailbox import Mailbox
from hostopt.transport.tcp.data_socket import DataSocket


class FrameReceiver:
    """Reads the frames of one peer."""

    def __init__(
        self,
        connection: DataSocket,
        reader: FrameReader,
        mailbox: Mailbox,
        peer: int,
        most_bytes: int,
    ) -> None:
        self._connection = connection
        self._reader = reader
        self._mailbox = mailbox
        self._peer = peer
        self._most_bytes = most_bytes

    async def run(self) -> bool:
        """Receives frames until the last one, or until the ring is aborted.

        Returns:
          True after the last frame.

        Raises:
          ProtocolError: a frame cannot be used. No byte of a payload is read if its header shows
            that.
          OSError: the connection broke or ended.
        """
        data = memoryview(bytearray(HEADER_BYTES))
        while self._mailbox.error is None:
            await self._fill(Destination(data))
            if self._mailbox.error is not None:
                break
            header = Header.parse(data)
            if header.length > self._most_bytes:
                raise header.error(f"expected up to {self._most_bytes} bytes, got {header.length}")
            is_new = self._reader.admit(header)
            if header.is_last:
                header.check(b"")
                return True
            destination = self._destination(header, is_new)
            await self._fill(destination)
            if self._mailbox.error is not None:
                break
            header.check(destination.view)
            if is_new:
                self._mailbox.put(self._peer, header.tag, destination.view)
            # The waiting call continues now, so that it can offer memory for the next payload.
            await asyncio.sleep(0)
        return False

    def _destination(self, header: Header, is_new: bool) -> Destination:
        if not is_new:
            return Destination(memoryview(bytearray(header.length)))
        return self._mailbox.destinations.of(self._peer, header.tag, header.length)

    async def _fill(self, destination: Destination) -> None:
        filled, length = 0, len(destination.view)
        while filled < length and self._mailbox.error is None:
            count = self._connection.read_into(destination.view[filled:])
            filled += count
            if not count:  # the destination may be another one afterwards
                await self._connection.wait_for(length - filled)
