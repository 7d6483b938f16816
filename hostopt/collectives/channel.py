"""Numbering of the collective calls on one channel of a transport."""

from __future__ import annotations

import itertools
import threading

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.transport.base import Transport
from hostopt.transport.signature import signature_of


class Channel:
    """Numbers the collective calls on one channel, in the same order on every rank.

    Args:
      channel: number of the channel.
      name: describes the data of the channel, for warnings and errors.
    """

    def __init__(self, transport: Transport, channel: int = 0, name: str = "") -> None:
        self.transport = transport
        self.channel = channel
        self.name = name
        self._steps = itertools.count()
        self._lock = threading.Lock()

    @property
    def rank(self) -> int:
        """This rank, 0..size-1."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.transport.size

    def next_call(self, name: str = "") -> CollectiveCall:
        """Numbers the next call.

        Args:
          name: name of the data, for warnings and errors; by default the channel's name.

        Returns:
          The call, unsigned. It must be executed exactly once.
        """
        with self._lock:
            return CollectiveCall(self.channel, next(self._steps), name=name or self.name)

    def begin_call(self, kind: str, name: str = "", array: Array | None = None) -> CollectiveCall:
        """Numbers, signs and begins the next call.

        Args:
          name: name of the data, for warnings and errors; by default the channel's name.
          array: array with the dtype and shape that must be the same on all ranks.

        Returns:
          The call. It must be executed exactly once.
        """
        call = self.signed_call(kind, name, array)
        self.begin(call)
        return call

    def signed_call(self, kind: str, name: str = "", array: Array | None = None) -> CollectiveCall:
        """Numbers and signs the next call, as `begin_call` does, but does not begin it."""
        name = name or self.name
        if array is None:
            signature = signature_of(kind, name)
        else:
            signature = signature_of(kind, name, array.dtype, array.shape)
        return self.next_call(name)._replace(signature=signature)

    def begin(self, call: CollectiveCall) -> None:
        """Records that this rank makes a call, for other ranks that wait for it."""
        self.transport.call_log.record(*call[:3], call.signature)

    def refuse(self, reason: str) -> None:
        """Counts a call that this rank does not make, and tells ranks that wait for it.

        Args:
          reason: which call is refused, why, and what to do.
        """
        call = self.next_call()
        self.transport.call_log.refuse(call.channel, call.step, reason)

    def abort(self, error: BaseException) -> None:
        """Aborts the ring on all ranks, with `error` as the root cause."""
        self.transport.abort(error)
