"""Non-blocking all-reduce (SUM) of two float32 scalars."""

from __future__ import annotations

import concurrent.futures
import functools

import numpy as np

from hostopt.collectives.call import Array, Channel, CollectiveCall
from hostopt.collectives.ring import RingGroup
from hostopt.collectives.sequence_counters import SequenceCounters
from hostopt.transport.message import signature_of

_SIGNATURE = signature_of("posted sum", "", np.dtype(np.float32), (2,))


class ScalarSum:
    """Sums two float32 scalars over the ranks: `start` does not block, `wait` does.

    If all ranks share memory, each writes its scalars to `counters`, and every rank adds them up.
    Otherwise the event loop runs an all-reduce. Nothing else may use the channel or the counters.
    """

    def __init__(self, channel: Channel, counters: SequenceCounters | None) -> None:
        self._channel = channel
        self._counters = counters
        self._ring = RingGroup(channel.transport)
        self._scalars: Array
        self._call: CollectiveCall
        self._result: concurrent.futures.Future[None]

    def start(self, first: float, second: float = 0.0) -> None:
        """Starts the sums. Each call must be followed by `wait` before the next one."""
        self._scalars = np.array([first, second], np.float32)
        self._call = self._channel.next_call()._replace(signature=_SIGNATURE)
        self._channel.begin(self._call)
        if self._counters is None:
            self._result = self._ring.start_all_reduce(self._call, self._scalars)
        else:
            self._counters.write_word(self._call.step, int(self._scalars.view(np.uint64)[0]))

    def wait(self) -> tuple[np.float32, np.float32]:
        """Waits until every rank has started; returns the sums, the same bits on all ranks."""
        if self._counters is None:
            self._result.result()
            first, second = self._scalars
        else:
            words = np.array(self._counters.read_words(self._call), np.uint64)
            first, second = functools.reduce(np.add, words.view(np.float32).reshape(-1, 2))
        return first, second
