"""Identity and numbering of collective calls, and the array type that all algorithms use."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from hostopt.transport.base import Transport
from hostopt.transport.message import UNSIGNED, Signature, Tag, signature_of

Array = np.ndarray[Any, Any]


def bytes_of(array: Array) -> Array:
    """Returns a view of the bytes of a contiguous array, of shape [n]."""
    flat: Array = array.reshape(-1).view(np.uint8)
    return flat


class CollectiveCall(NamedTuple):
    """One collective call, the same on all ranks."""

    channel: int
    step: int  # sequence number of the call on that channel, from 0
    bucket: int = 0  # of gradients
    name: str = ""
    signature: Signature = UNSIGNED  # kind, name, dtype and shape, which the ranks compare

    def in_phase(self, phase: str) -> str:
        """Describes a phase of the call, for warnings and errors."""
        return f"{self.name or 'data'} ({phase})"

    def over(self, streams: int) -> CollectiveCall:
        """Returns the call with a checksum that a rank with another number of streams refuses."""
        text, checksum = self.signature
        return self._replace(signature=Signature(text, checksum ^ (streams - 1)))

    def tag(self, round_: int = 0, chunk: int = 0, segment: int = 0) -> Tag:
        """Tag of one message of the call."""
        checksum = self.signature.checksum
        return Tag(self.channel, self.step, self.bucket, round_, chunk, segment, checksum)


class Channel:
    """Numbers the collective calls on one channel, in the same order on every rank.

    `name`, also in its methods, is the name of the data for warnings and errors.
    """

    def __init__(self, transport: Transport, channel: int = 0, name: str = "") -> None:
        self.transport = transport
        self.channel = channel
        self.name = name
        self._steps = itertools.count()  # taking the next number is atomic

    @property
    def rank(self) -> int:
        """This rank, 0..size-1."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.transport.size

    def next_call(self, name: str = "") -> CollectiveCall:
        """Numbers the next call, which is unsigned and must be executed exactly once."""
        return CollectiveCall(self.channel, next(self._steps), name=name or self.name)

    def begin_call(self, kind: str, name: str = "", array: Array | None = None) -> CollectiveCall:
        """Numbers, signs and begins the next call, which must be executed exactly once.

        The dtype and shape of `array` must be the same on all ranks.
        """
        call = self.signed_call(kind, name, array)
        self.begin(call)
        return call

    def signed_call(self, kind: str, name: str = "", array: Array | None = None) -> CollectiveCall:
        """Numbers and signs the next call, as `begin_call` does, but does not begin it."""
        name = name or self.name
        described = () if array is None else (array.dtype, array.shape)
        signature = signature_of(kind, name, *described)
        return self.next_call(name)._replace(signature=signature)

    def begin(self, call: CollectiveCall) -> None:
        """Records that this rank makes a call, for other ranks that wait for it."""
        self.transport.call_log.record(*call[:3], call.signature)

    def refuse(self, reason: str) -> None:
        """Counts a call that this rank does not make, and tells ranks that wait for it why."""
        call = self.next_call()
        self.transport.call_log.refuse(call.channel, call.step, reason)

    def abort(self, error: BaseException) -> None:
        """Aborts the ring on all ranks, with `error` as the root cause."""
        self.transport.abort(error)
