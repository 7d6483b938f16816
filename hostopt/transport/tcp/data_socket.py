"""A connected TCP socket, with or without TLS, that never blocks the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Callable

from hostopt.transport.event_loop import settle
from hostopt.transport.mailbox import Destination

Data = memoryview

# A wait for a large payload ends once this much of it has arrived, which saves wake-ups.
_LOW_WATER_BYTES = 1 << 20
# TLS sends records of this size; a payload in the same record as its header saves a system call.
_TLS_RECORD_BYTES = 16 << 10
_MOST_PARTS = 64  # of a system call; Linux takes up to 1024
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
        # when the peer last took bytes, on the monotonic clock; None if none wait for it
        self.writing_since_s: float | None = None

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
        await self.fill([Destination(memoryview(data))])
        return bytes(data)

    async def fill(self, wanted: Iterable[Destination | None]) -> None:
        """Fills destinations in turn, until there are no more.

        A byte goes to the view that its destination has when it is read. None stands for a round
        of the event loop before the next destination.
        """
        end: asyncio.Future[None] = self._loop.create_future()
        filling = self._fill(wanted)
        is_soon = False  # a call is due in this round of the loop

        def go_on(has_come: bool = False) -> None:
            nonlocal is_soon
            if end.done() or (is_soon and not has_come):
                return
            is_soon = False
            try:
                has_more = next(filling, None)
            except Exception as error:
                settle(end, error)
                return
            if has_more is None:
                settle(end)
            elif has_more:
                is_soon = True
                self._loop.call_soon(go_on, True)

        with self._calling(go_on, end):
            go_on()
            await end

    def _fill(self, wanted: Iterable[Destination | None]) -> Iterator[bool]:
        """Reads what has arrived; yields True if there may be more, False if nothing is left."""
        for destination in wanted:
            if destination is None:
                yield True
                continue
            filled, length = 0, len(destination.view)
            while filled < length:
                count = self._read_into(destination.view[filled:])
                filled += count
                if not count:
                    self._set_low_water(min(length - filled, _LOW_WATER_BYTES))
                    yield False

    def _read_into(self, view: Data) -> int:
        """Reads what has arrived, 0 bytes if nothing has, into a view that is not empty."""
        try:
            count = self._socket.recv_into(view)
        except (BlockingIOError, ssl.SSLWantReadError, InterruptedError):
            return 0
        if not count:
            raise ConnectionResetError("connection closed")
        return count

    def _set_low_water(self, nbytes: int) -> None:
        """Has the kernel wait until this much has arrived."""
        if nbytes != self._low_water and not isinstance(self._socket, ssl.SSLSocket):
            self._low_water = nbytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    async def write(self, parts: Sequence[bytes | Data]) -> None:
        """Writes all bytes of several parts, which must not change until this returns."""
        rest = [memoryview(part) for part in parts]
        if not self.write_now(rest):
            await self.write_rest(rest)

    async def write_rest(
        self,
        rest: list[Data],
        timeout_s: float | None = None,
        note_progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Writes what `write_now` has left, and what is appended to it meanwhile.

        Raises StalledError if the peer takes no bytes for `timeout_s`.
        """
        end: asyncio.Future[None] = self._loop.create_future()

        def go_on() -> None:
            self.writing_since_s = time.monotonic()
            try:
                if not end.done() and self.write_now(rest):
                    settle(end)
                note_progress()
            except Exception as error:
                settle(end, error)

        self.writing_since_s = time.monotonic()
        try:
            with self._calling(go_on, end, to_write=True):
                while not end.done():
                    left_s = timeout_s and self.writing_since_s + timeout_s - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        raise StalledError
                    await asyncio.wait({end}, timeout=left_s)
                end.result()
        finally:
            self.writing_since_s = None

    def write_now(self, rest: list[Data]) -> bool:
        """Writes what the kernel takes, and removes it from `rest`; True if that is all."""
        is_tls = isinstance(self._socket, ssl.SSLSocket)
        if is_tls and len(rest) > 1 and sum(map(len, rest)) <= _TLS_RECORD_BYTES:
            rest[:] = [memoryview(b"".join(rest))]
        while rest:
            try:
                if is_tls:
                    count = self._socket.send(rest[0]) if len(rest[0]) else 0
                else:
                    count = self._socket.sendmsg(rest[:_MOST_PARTS], (), socket.MSG_NOSIGNAL)
            except (BlockingIOError, ssl.SSLWantWriteError, InterruptedError):
                return False
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                rest[0] = rest[0][count:]
        return True

    async def _ready(self, to_write: bool = False) -> None:
        """Waits until the socket can be read or written."""
        ready: asyncio.Future[None] = self._loop.create_future()
        with self._calling(functools.partial(settle, ready), ready, to_write):
            await ready

    @contextlib.contextmanager
    def _calling(
        self, function: Callable[[], object], end: asyncio.Future[None], to_write: bool = False
    ) -> Iterator[None]:
        """Calls a function whenever the socket can be read or written; `close` ends the wait."""
        fd, loop = self._socket.fileno(), self._loop
        if fd < 0:
            raise ConnectionAbortedError("connection closed by this rank")
        (loop.add_writer if to_write else loop.add_reader)(fd, function)
        self._waits.add(end)
        try:
            yield
        finally:
            self._waits.discard(end)
            if self._socket.fileno() == fd:
                (loop.remove_writer if to_write else loop.remove_reader)(fd)

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
