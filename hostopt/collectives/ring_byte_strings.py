"""Ring all-gather of byte strings, whose lengths may differ between ranks."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from hostopt.collectives.call import CollectiveCall
from hostopt.collectives.messages import CallMessages
from hostopt.transport import event_loop
from hostopt.transport.base import Transport
from hostopt.transport.message import Payload

_LENGTH = struct.Struct("<Q")  # length of a string, at the start of its first message


def ring_all_gather_bytes(
    transport: Transport, call: CollectiveCall, data: memoryview
) -> list[bytes | memoryview]:
    """Gathers byte strings on every rank, over the ring.

    Collective: all ranks must call it.

    Returns:
      The bytes of each rank, in rank order; `data` itself for this rank.
    """
    return event_loop.run(_ring_all_gather_bytes(transport, call, data))


async def _ring_all_gather_bytes(
    transport: Transport, call: CollectiveCall, data: memoryview
) -> list[bytes | memoryview]:
    messages = CallMessages(transport, call)
    rank, size = transport.rank, transport.size
    next_, previous = (rank + 1) % size, (rank - 1) % size
    gathered: list[bytes | memoryview] = [data] * size
    if size > 1:
        for segment, part in enumerate(_byte_segments(data, transport.options.segment_bytes)):
            await messages.send(next_, call.tag(0, rank, segment), part, "all-gather")
    for round_ in range(size - 1):
        origin = (previous - round_) % size
        parts: list[memoryview] = []
        missing, segment = 1, 0  # the first message contains the real length
        while missing > 0:
            tag = call.tag(round_, origin, segment)
            part = await messages.receive(previous, tag, "all-gather")
            if round_ + 2 < size:
                await messages.send(next_, tag._replace(round=round_ + 1), part, "all-gather")
            if segment == 0:
                (missing,) = _LENGTH.unpack_from(part)
                part = part[_LENGTH.size :]
            parts.append(part)
            missing -= len(part)
            segment += 1
        gathered[origin] = _joined(parts)
    return gathered


def _byte_segments(data: memoryview, segment_bytes: int) -> Iterator[Payload]:
    yield _LENGTH.pack(len(data)) + data[:segment_bytes]
    for start in range(segment_bytes, len(data), segment_bytes):
        yield data[start : start + segment_bytes]


def _joined(parts: list[memoryview]) -> bytes | memoryview:
    """Concatenates the parts; an array of numpy causes fewer page faults than `bytes`."""
    if len(parts) == 1:
        return bytes(parts[0])
    return np.concatenate([np.frombuffer(part, np.uint8) for part in parts]).data.toreadonly()
