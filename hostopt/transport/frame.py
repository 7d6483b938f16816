"""The frame: a fixed header of 64 bytes, then the payload; drawn in docs/wire.md.

A frame says which job and which life of its sender it comes from, and its number on its stream. A
reader takes each frame once, in order, or not at all: one that came before is ignored, and
whatever else does not fit is an error before anyone has seen its payload.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from hostopt.errors import ProtocolError
from hostopt.transport.base import Payload, Tag

__all__: list[str] = []

WIRE_VERSION = 4
_MAGIC = b"HO"
_WITH_PAYLOAD = 1  # flag: the checksum is of header and payload, not of the header alone
# magic, version, flags, tag (channel, step, bucket, round, chunk, segment, layout), length, job,
# incarnation, number; then the checksum. 64 bytes in all, so that a payload is aligned.
_HEADER = struct.Struct("<2sBBIQIIIIIQIQI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_NUMBERS = 1 << 32


class Origin(NamedTuple):
    """Where a frame comes from.

    Args:
      job: number of the job, the same on all of its ranks; 32 bits.
      incarnation: number of this life of the sender; 64 bits.
    """

    job: int
    incarnation: int


class FrameWriter:
    """Makes the frames of one stream.

    Args:
      origin: of this rank.
      checksum: whether the payload is part of the checksum; the header always is.
    """

    def __init__(self, origin: Origin, checksum: bool) -> None:
        self._origin = origin
        self._checksum = checksum
        self._next = 0

    def write(self, tag: Tag, payload: Payload) -> bytes:
        """Build the next frame.

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
    """Takes the frames of one stream apart.

    Args:
      origin: of the peer whose stream this is.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._next = 0

    def read(self, frame: bytes) -> tuple[Tag, memoryview] | None:
        """Check the next frame, without copying its payload.

        Args:
          frame: what arrived as one message.

        Returns:
          The tag and the payload, a read-only view of `frame`; None for a frame that had come
          before.

        Raises:
          ProtocolError: not a frame; of another wire version, job or life of the peer; of another
            length than it says; damaged; or frames before it are missing.
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
                f"expected the checksum {expected:08x}, got {checksum:08x}: it was changed on its "
                "way. Look at the network and the memory of both hosts",
            )
        if (job, incarnation) != self._origin:
            raise _error(
                tag,
                f"it is of job {job:08x}, incarnation {incarnation:016x}, expected job "
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


def _error(tag: Tag, found: str) -> ProtocolError:
    return ProtocolError(
        f"a frame of {tag} cannot be used: {found}", step=tag.step, bucket=tag.bucket
    )
