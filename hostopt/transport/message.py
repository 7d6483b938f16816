"""Messages between ranks: their tags, the signatures of their calls, a count of the traffic."""

from __future__ import annotations

import functools
import hashlib
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

Payload = Union[bytes, memoryview]

# Channel of `Communicator.finish`. Bucket 1 on it marks "I send no more messages for now".
FINISH_CHANNEL = 0xFFFF_FFFF


class Tag(NamedTuple):
    """Identifies a message; sender and receiver compute the same tag."""

    channel: int  # of the communicator; its duplicates share a transport
    step: int  # sequence number of the collective on its channel
    bucket: int = 0  # of gradients
    round: int = 0  # of the ring schedule
    chunk: int = 0  # part of the buffer that one rank reduces
    segment: int = 0  # part of the chunk that is sent as one message
    signature: int = 0  # checksum of the call's `Signature`

    @property
    def is_finish_marker(self) -> bool:
        """True for the message that says that its sender only waits for the other ranks.

        Each stream carries one; `chunk` is the number of the others.
        """
        return self.channel == FINISH_CHANNEL and self.bucket == 1

    def __str__(self) -> str:
        return (
            f"step {self.step}, bucket {self.bucket}, round {self.round}, chunk {self.chunk}, "
            f"segment {self.segment}"
        )


@dataclass
class Traffic:
    """Counts the messages that this rank has sent."""

    messages: int = 0
    payload_bytes: int = 0


def channel_number(name: str) -> int:
    """Returns 31 bits, the same in every process: never 0, the first communicator's number."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFF_FFFF or 1


class Signature(NamedTuple):
    """Describes a call; it must be the same on all ranks."""

    text: str  # for errors, such as: all_reduce(sum) of 'dense/kernel' float32[2, 3]
    checksum: int  # CRC-32 of the text, which each message carries


UNSIGNED = Signature("", 0)


@functools.lru_cache(maxsize=4096)  # the same few calls are made in every step
def signature_of(
    kind: str,  # the collective, with its reduce operation or root
    name: str = "",
    dtype: Any = None,  # of numpy; None for bytes, whose number may differ by rank
    shape: tuple[int, ...] = (),
    wire_format: str = "",
) -> Signature:
    """Describes a call."""
    words = [kind]
    if name:
        words += ["of", name if "'" in name else repr(name)]
    if dtype is not None:
        words.append(f"{dtype.name}{list(shape)}")
    if wire_format:
        words += ["as", wire_format]
    text = " ".join(words)
    return Signature(text, zlib.crc32(text.encode()))
