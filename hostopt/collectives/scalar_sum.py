"""Non-blocking all-reduce (SUM) of two float32 scalars."""

from __future__ import annotations

import abc
import concurrent.futures
import functools
import itertools

import numpy as np

from hostopt.collectives.call import Array, Channel, CollectiveCall
from hostopt.collectives.ring import RingGroup
from hostopt.collectives.sequence_counters import SequenceCounters
from hostopt.transport.message import signature_of

_SIGNATURE = signature_of("posted sum", "", np.dtype(np.float32), (2,))


class ScalarSum(abc.ABC):
    """Sums two float32 scalars over the ranks: `start` does not block, `wait` does."""

    @abc.abstractmethod
    def start(self, first: float, second: float = 0.0) -> None:
        """Starts the sums. Each call must be followed by `wait` before the next one."""

    @abc.abstractmethod
    def wait(self) -> tuple[np.float32, np.float32]:
        """Waits until every rank has started; returns the sums, the same bits on all ranks."""


def new_scalar_sum(channel: Channel, counters: SequenceCounters | None) -> ScalarSum:
    """Creates a sum, on a channel and counters that nothing else uses; None uses the ring."""
    if counters is None:
        return _RingScalarSum(channel)
    return _SharedMemoryScalarSum(channel, counters)


class _SharedMemoryScalarSum(ScalarSum):
    """Writes the scalars of each rank to shared memory, where every rank adds them up."""

    def __init__(self, channel: Channel, counters: SequenceCounters) -> None:
        self._channel, self._counters = channel, counters
        self._started, self._finished = itertools.count(), itertools.count()

    def start(self, first: float, second: float = 0.0) -> None:
        word = np.array([first, second], np.float32).view(np.uint64)
        self._counters.write_word(next(self._started), int(word[0]))

    def wait(self) -> tuple[np.float32, np.float32]:
        step, name = next(self._finished), self._channel.name
        call = CollectiveCall(self._channel.channel, step, name=name)
        words = self._counters.read_words(call)
        scalars = np.array(words, np.uint64).view(np.float32).reshape(-1, 2)
        first, second = functools.reduce(np.add, scalars)
        return first, second


class _RingScalarSum(ScalarSum):
    """Runs an all-reduce on the event loop."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ring = RingGroup(channel.transport)
        self._scalars: Array
        self._result: concurrent.futures.Future[None]

    def start(self, first: float, second: float = 0.0) -> None:
        self._scalars = np.array([first, second], np.float32)
        call = self._channel.next_call()._replace(signature=_SIGNATURE)
        self._channel.begin(call)
        self._result = self._ring.start_all_reduce(call, self._scalars)

    def wait(self) -> tuple[np.float32, np.float32]:
        self._result.result()
        return self._scalars[0], self._scalars[1]
