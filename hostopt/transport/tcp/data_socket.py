"""A connected TCP socket, with or without TLS, that never blocks the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Sequence

from hostopt.transport.event_loop import settle

Data = memoryview

# A wait for a large payload ends once this much of it has arrived, which saves wake-ups.
_LOW_WATER_BYTES = 1 << 20
# TLS sends records of this size; a payload in the same record as its header saves a system call.
_TLS_RECORD_BYTES = 16 << 10
# Keepalive probes keep the state of firewalls, and end the connection to a host that is gone.
_IDLE_S, _PROBE_EVERY_S, _PROBES = 10, 5, 3


class StalledError(Exception):
    """The peer takes no bytes before the deadline."""


class DataSocket:
    """A socket that reads into, and writes from, memory of the caller; used on the event loop.

    An OSError says that the connection broke or ended.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._waits: set[asyncio.Future[None]] = set()
        self._low_water = 1
        self.unsent: list[bytes] = []  # what the last cancelled `write` has not written

    def on_this_loop(self) -> DataSocket:
        """Hands the connection over to the running loop; this object is closed afterwards."""
        moved = DataSocket(self._socket)
        moved._low_water = self._low_water
        self._socket = socket.socket()
        self._socket.close()
        return moved

    async def start_tls(self, context: ssl.SSLContext, host: str | None = None) -> None:
        """Protects the connection with TLS; `host` is the name in the server's certificate."""
        self._socket = tls = context.wrap_socket(
            self._socket,
            server_side=host is None,
            server_hostname=host,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=False,
        )
        while True:
            try:
                tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                await self._ready()
            except ssl.SSLWantWriteError:
                await self._ready(to_write=True)

    async def read_exactly(self, nbytes: int) -> bytes:
        """Reads a number of bytes."""
        data = bytearray(nbytes)
        filled = 0
        while filled < nbytes:
            count = self.read_into(memoryview(data)[filled:])
            filled += count
            if not count:
                await self.wait_for(nbytes - filled)
        return bytes(data)

    def read_into(self, view: Data) -> int:
        """Reads what has arrived, 0 bytes if nothing has, into a view that is not empty."""
        try:
            count = self._socket.recv_into(view)
        except (BlockingIOError, ssl.SSLWantReadError, InterruptedError):
            return 0
        if not count:
            raise ConnectionResetError("connection closed")
        return count

    async def wait_for(self, nbytes: int) -> None:
        """Waits until some, or many, of the `nbytes` that the peer still sends have arrived."""
        low_water = min(nbytes, _LOW_WATER_BYTES)
        if low_water != self._low_water and not isinstance(self._socket, ssl.SSLSocket):
            self._descriptor()
            self._low_water = low_water
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
        await self._ready()

    async def write(self, parts: Sequence[bytes | Data], timeout_s: float | None = None) -> None:
        """Writes all bytes of several parts, which must not change until this returns.

        Raises:
          StalledError: the peer takes no bytes for `timeout_s`.
          asyncio.CancelledError: `unsent` has the rest of the bytes.
        """
        rest = [memoryview(part) for part in parts if len(part)]
        if isinstance(self._socket, ssl.SSLSocket) and sum(map(len, rest)) <= _TLS_RECORD_BYTES:
            rest = [memoryview(b"".join(rest))]
        while rest:
            try:
                if isinstance(self._socket, ssl.SSLSocket):
                    count = self._socket.send(rest[0])
                else:
                    count = self._socket.sendmsg(rest, (), socket.MSG_NOSIGNAL)
            except (BlockingIOError, ssl.SSLWantWriteError, InterruptedError):
                try:
                    await self._ready(to_write=True, timeout_s=timeout_s)
                except asyncio.CancelledError:
                    self.unsent = [bytes(part) for part in rest]
                    raise
                continue
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                rest[0] = rest[0][count:]

    async def _ready(self, to_write: bool = False, timeout_s: float | None = None) -> None:
        """Waits until the socket can be read or written."""
        fd, loop = self._descriptor(), self._loop
        ready = loop.create_future()
        (loop.add_writer if to_write else loop.add_reader)(fd, settle, ready)
        self._waits.add(ready)
        timer = None
        if timeout_s is not None:
            timer = loop.call_later(timeout_s, settle, ready, StalledError())
        try:
            await ready
        finally:
            self._waits.discard(ready)
            if timer is not None:
                timer.cancel()
            if self._socket.fileno() == fd:
                (loop.remove_writer if to_write else loop.remove_reader)(fd)

    def _descriptor(self) -> int:
        fd = self._socket.fileno()
        if fd < 0:
            raise ConnectionAbortedError("connection closed by this rank")
        return fd

    def close(self) -> None:
        """Closes the connection; pending reads and writes raise an OSError."""
        fd = self._socket.fileno()
        if fd < 0:
            return
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)
        with contextlib.suppress(OSError):
            self._socket.close()
        for wait in self._waits:
            settle(wait, ConnectionAbortedError("connection closed by this rank"))
