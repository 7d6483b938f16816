"""Frames, and streams of them. docs/wire.md has the format, and what the reader refuses."""

from __future__ import annotations

import abc
import asyncio
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from zlib_ng.zlib_ng import crc32

from hostopt.errors import ProtocolError
from hostopt.transport import event_loop
from hostopt.transport.message import Payload, Tag

WIRE_VERSION = 5
_MAGIC = b"HO"
# Flags: the checksum covers the payload, too, not only the header; no frame follows (on sockets).
_WITH_PAYLOAD, _LAST = 1, 2
# magic, version, flags, tag (channel, step, bucket, round, chunk, segment, signature), length,
# job, incarnation, number; then the checksum. The payload is aligned after 64 bytes.
_HEADER = struct.Struct("<2sBBIQIIIIIQIQI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_NUMBERS = 1 << 32


class Origin(NamedTuple):
    """Identifies the sender of a frame."""

    job: int  # the same on all of its ranks; 32 bits
    incarnation: int  # 64 bits


@dataclass(eq=False)
class FrameWriter:
    """Builds the frames of one stream; `checksum` is True if it covers the payload, too."""

    _origin: Origin
    _checksum: bool
    _next: int = 0

    def write(self, tag: Tag, payload: Payload) -> bytes:
        """Builds the next frame: header and payload, in one new byte string."""
        return b"".join((self.header(tag, payload), payload))

    def header(self, tag: Tag, payload: Payload, is_last: bool = False) -> bytes:
        """Builds the header of the next frame, whose payload follows it."""
        flags = _WITH_PAYLOAD * self._checksum | _LAST * is_last
        header = _HEADER.pack(
            _MAGIC, WIRE_VERSION, flags, *tag, len(payload), *self._origin, self._next
        )
        self._next = (self._next + 1) % _NUMBERS
        checksum = crc32(header)
        if self._checksum:
            checksum = crc32(payload, checksum)
        return header + _CHECKSUM.pack(checksum)


class Header(NamedTuple):
    """The header of a frame."""

    tag: Tag
    length: int
    origin: Origin
    number: int
    expected: int  # the checksum that the sender has computed
    checksum: int  # of the header
    covers_payload: bool
    is_last: bool

    @classmethod
    def parse(cls, data: Payload) -> Header:
        """Reads a header, and checks it unless its checksum covers the payload, too."""
        if len(data) < HEADER_BYTES:
            raise ProtocolError(
                f"a frame of {len(data)} bytes arrived, expected {HEADER_BYTES} bytes of header"
            )
        magic, version, flags, *rest = _HEADER.unpack_from(data)
        *numbers, length, job, incarnation, number = rest
        if magic != _MAGIC or version != WIRE_VERSION:
            raise ProtocolError(
                f"a frame begins with {magic!r} version {version}, expected {_MAGIC!r} version "
                f"{WIRE_VERSION}. Run the same version of hostopt on all ranks"
            )
        checksum = crc32(memoryview(data)[: _HEADER.size])
        (expected,) = _CHECKSUM.unpack_from(data, _HEADER.size)
        tag, origin = Tag(*numbers), Origin(job, incarnation)
        covers_payload, is_last = bool(flags & _WITH_PAYLOAD), bool(flags & _LAST)
        header = cls(tag, length, origin, number, expected, checksum, covers_payload, is_last)
        if not covers_payload:
            header.check(b"")
        return header

    def check(self, payload: Payload) -> None:
        """Raises ProtocolError unless header and payload have the checksum of the sender."""
        checksum = crc32(payload, self.checksum) if self.covers_payload else self.checksum
        if checksum != self.expected:
            raise self.error(
                f"expected the checksum {self.expected:08x}, got {checksum:08x}: it was changed "
                "on the way. Check the network and the memory of both hosts"
            )

    def error(self, reason: str) -> ProtocolError:
        """Builds the error of a frame that cannot be used."""
        tag = self.tag
        return ProtocolError(
            f"a frame of {tag} cannot be used: {reason}", step=tag.step, bucket=tag.bucket
        )


@dataclass(eq=False)
class FrameReader:
    """Reads the frames of one stream."""

    _origin: Origin
    _next: int = 0

    def read(self, frame: bytes) -> tuple[Tag, memoryview] | None:
        """Returns tag and payload of the next frame, as a view of it; None for a repeated one."""
        header, payload = Header.parse(frame), memoryview(frame)[HEADER_BYTES:]
        if len(payload) != header.length:
            raise header.error(f"expected {header.length} bytes of payload, got {len(payload)}")
        header.check(payload)
        return (header.tag, payload) if self.admit(header) else None

    def admit(self, header: Header) -> bool:
        """Checks that a frame is the next one of its stream; returns False for a repeated one."""
        if header.origin != self._origin:
            job, incarnation = header.origin
            raise header.error(
                f"it has job {job:08x}, incarnation {incarnation:016x}, expected job "
                f"{self._origin.job:08x}, incarnation {self._origin.incarnation:016x}. Start all "
                "ranks again"
            )
        ahead = (header.number - self._next) % _NUMBERS
        if ahead >= _NUMBERS // 2:
            return False
        if ahead:
            raise header.error(f"{ahead} frame(s) before it are missing")
        self._next = (self._next + 1) % _NUMBERS
        return True


class Stream(abc.ABC):
    """Sends frames to one peer; used on the event loop that has created it."""

    _watcher: asyncio.Future[None]  # done once the stream has ended

    def __init__(self, writer: FrameWriter, timeout_s: float) -> None:
        self._writer = writer
        self._timeout_s = timeout_s  # without progress
        self.loop = event_loop.current()  # whose thread uses the stream
        self.written_s = 0.0  # time in which there was something to write

    @property
    @abc.abstractmethod
    def ended(self) -> bool:
        """True once nothing can be sent any more, and the reason is known."""

    @property
    @abc.abstractmethod
    def writing_since_s(self) -> float | None:
        """Monotonic time since which the peer or the network takes nothing; None if they do."""

    @abc.abstractmethod
    async def wait_until_open(self, timeout_s: float) -> bool:
        """Returns True once the peer reads the stream; then each side detects the other's end."""

    @abc.abstractmethod
    async def put(self, tag: Tag, payload: Payload, lazily: bool = False) -> bool:
        """Sends or queues contiguous bytes, which may change once this returns.

        With `lazily`, they may change after `has_written` or `copy_rest`. Returns False if the
        stream has `ended`, or made no progress before the deadline.
        """

    async def has_written(self) -> bool:
        """Waits for what `put` has sent lazily, and returns what it would have returned."""
        return True

    def copy_rest(self) -> None:
        """Copies what `put` still has to send."""
        return None

    @abc.abstractmethod
    async def flush(self) -> None:
        """Ends the stream in good order, and returns once the peer has all frames."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Ends the stream at once and drops frames that are not sent."""

    async def close(self) -> None:
        """Cancels the stream and closes its connection."""
        self.cancel()

    async def _wait_for(self, future: asyncio.Future[Any], timeout_s: float) -> None:
        """Waits for a future, the end of the stream or the deadline."""
        await asyncio.wait(
            {future, self._watcher}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
