"""Frames: a header of 64 bytes, then the payload. docs/wire.md documents the format.

A frame carries the job and the incarnation of its sender, and its sequence number on the stream.
The reader accepts each frame exactly once and in order. It ignores repeated frames and raises an
error for any other unexpected frame, before the payload is used.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from hostopt.errors import ProtocolError
from hostopt.transport.message import Payload, Tag

__all__: list[str] = []

WIRE_VERSION = 4
_MAGIC = b"HO"
_WITH_PAYLOAD = 1  # flag: the checksum covers the payload, too, not only the header
# magic, version, flags, tag (channel, step, bucket, round, chunk, segment, signature), length,
# job, incarnation, number; then the checksum. The payload is aligned after 64 bytes.
_HEADER = struct.Struct("<2sBBIQIIIIIQIQI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_NUMBERS = 1 << 32


class Origin(NamedTuple):
    """Identifies the sender of a frame.

    Args:
      job: number of the job, the same on all of its ranks; 32 bits.
      incarnation: number of this start of the sender; 64 bits.
    """

    job: int
    incarnation: int


class FrameWriter:
    """Builds the frames of one stream.

    Args:
      origin: origin of this rank.
      checksum: adds the payload to the checksum, which always covers the header.
    """

    def __init__(self, origin: Origin, checksum: bool) -> None:
        self._origin = origin
        self._checksum = checksum
        self._next = 0

    def write(self, tag: Tag, payload: Payload) -> bytes:
        """Builds the next frame.

        Args:
          tag: which message this is.
          payload: contiguous bytes.

        Returns:
          Header and payload, in one new byte string.
        """
        flags = _WITH_PAYLOAD if self._checksum else 0
        header = _HEADER.pack(
            _MAGIC, WIRE_VERSION, flags, *tag, len(payload), *self._origin, self._next
        )
        self._next = (self._next + 1) % _NUMBERS
        checksum = zlib.crc32(header)
        if self._checksum:
            checksum = zlib.crc32(payload, checksum)
        return b"".join((header, _CHECKSUM.pack(checksum), payload))


class FrameReader:
    """Reads the frames of one stream.

    Args:
      origin: origin of the peer that sends the stream.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._next = 0

    def read(self, frame: bytes) -> tuple[Tag, memoryview] | None:
        """Checks the next frame, without copying its payload.

        Args:
          frame: one message of the stream.

        Returns:
          The tag, and the payload as a read-only view of `frame`. None for a repeated frame.

        Raises:
          ProtocolError: the message is not a frame, has another wire version, job, incarnation or
            length, is damaged, or frames before it are missing.
        """
        if len(frame) < HEADER_BYTES:
            raise ProtocolError(
                f"a frame of {len(frame)} bytes arrived, expected {HEADER_BYTES} bytes of header"
            )
        magic, version, flags, *rest = _HEADER.unpack_from(frame)
        *numbers, length, job, incarnation, number = rest
        if magic != _MAGIC or version != WIRE_VERSION:
            raise ProtocolError(
                f"a frame begins with {magic!r} version {version}, expected {_MAGIC!r} version "
                f"{WIRE_VERSION}. Run the same version of hostopt on all ranks"
            )
        tag, payload = Tag(*numbers), memoryview(frame)[HEADER_BYTES:]
        if len(payload) != length:
            raise _error(tag, f"expected {length} bytes of payload, got {len(payload)}")
        checksum = zlib.crc32(memoryview(frame)[: _HEADER.size])
        if flags & _WITH_PAYLOAD:
            checksum = zlib.crc32(payload, checksum)
        (expected,) = _CHECKSUM.unpack_from(frame, _HEADER.size)
        if checksum != expected:
            raise _error(
                tag,
                f"expected the checksum {expected:08x}, got {checksum:08x}: it was changed on the "
                "way. Check the network and the memory of both hosts",
            )
        if (job, incarnation) != self._origin:
            raise _error(
                tag,
                f"it has job {job:08x}, incarnation {incarnation:016x}, expected job "
                f"{self._origin.job:08x}, incarnation {self._origin.incarnation:016x}. Start all "
                "ranks again",
            )
        ahead = (number - self._next) % _NUMBERS
        if ahead >= _NUMBERS // 2:
            return None
        if ahead:
            raise _error(tag, f"{ahead} frame(s) before it are missing")
        self._next = (self._next + 1) % _NUMBERS
        return tag, payload


def _error(tag: Tag, reason: str) -> ProtocolError:
    return ProtocolError(
        f"a frame of {tag} cannot be used: {reason}", step=tag.step, bucket=tag.bucket
    )
