"""The frame: a fixed header of 64 bytes, then the payload; drawn in docs/wire.md."""

from __future__ import annotations

import struct

from hostopt.errors import ProtocolError
from hostopt.transport.base import Payload, Tag

__all__: list[str] = []

WIRE_VERSION = 1
_MAGIC = b"HO"
# magic, version, 1 spare byte, channel, step, bucket, round, chunk, segment, layout, length;
# filled with zeros to 64 bytes, so that the payload of a received frame is aligned
_HEADER = struct.Struct("<2sBxIQIIIIIQ20x")
HEADER_BYTES = _HEADER.size


def encode(tag: Tag, payload: Payload) -> bytes:
    """Build a frame.

    Args:
      tag: which message this is.
      payload: contiguous bytes.

    Returns:
      Header and payload, in one new byte string.
    """
    header = _HEADER.pack(_MAGIC, WIRE_VERSION, *tag, len(payload))
    return b"".join((header, payload))


def decode(frame: bytes) -> tuple[Tag, memoryview]:
    """Take a frame apart, without copying the payload.

    Args:
      frame: what arrived as one message.

    Returns:
      The tag and the payload, a read-only view of `frame`.

    Raises:
      ProtocolError: not a frame, of another wire version, or of another length than it says.
    """
    if len(frame) < HEADER_BYTES:
        raise ProtocolError(
            f"a frame of {len(frame)} bytes arrived, wanted {HEADER_BYTES} bytes of header"
        )
    magic, version, *numbers, length = _HEADER.unpack_from(frame)
    if magic != _MAGIC or version != WIRE_VERSION:
        raise ProtocolError(
            f"a frame begins with {magic!r} version {version}, wanted {_MAGIC!r} version "
            f"{WIRE_VERSION}. Run the same version of hostopt on all ranks"
        )
    payload = memoryview(frame)[HEADER_BYTES:]
    if len(payload) != length:
        raise ProtocolError(f"a frame says {length} bytes of payload and has {len(payload)}")
    return Tag(*numbers), payload
