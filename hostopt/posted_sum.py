"""Two numbers of each rank, summed while the ranks do something else."""

from __future__ import annotations

import abc
import concurrent.futures
import functools
import itertools

import numpy as np

from hostopt import ring
from hostopt.communicator import Communicator
from hostopt.lane import Lane
from hostopt.ring import Array, Operation
from hostopt.transport.signature import signature_of

__all__: list[str] = []

_SIGNATURE = signature_of("posted sum", "", np.dtype(np.float32), (2,))


class PostedSum(abc.ABC):
    """Sums of float32; each rank posts its numbers, and collects the sums some time later."""

    @abc.abstractmethod
    def post(self, value: float, second: float = 0.0) -> None:
        """Give this rank's numbers; waits for nobody.

        Args:
          value: a number; the sums of earlier ones have been collected.
          second: another one, which is summed by itself.
        """

    @abc.abstractmethod
    def collect(self) -> tuple[np.float32, np.float32]:
        """Wait for the numbers that are late.

        Returns:
          The sums of what the ranks have posted, with the same bits on all of them.

        Raises:
          HostOptError: a rank failed, left or timed out.
        """


def open_posted_sum(communicator: Communicator, what: str) -> PostedSum:
    """Open a channel for two numbers; all ranks do so in the same order.

    Args:
      communicator: reaches all ranks.
      what: what the numbers are, for warnings and errors.

    Returns:
      In shared memory where all ranks are on one host, else on the ring of all ranks.

    Raises:
      HostOptError: a rank failed, left or timed out.
    """
    channel = communicator.duplicate(what)
    lane = channel.open_lane()
    return _RingSum(channel) if lane is None else _LaneSum(channel, lane)


class _LaneSum(PostedSum):
    """Numbers that the ranks of one host leave for each other."""

    def __init__(self, channel: Communicator, lane: Lane) -> None:
        self._channel, self._lane = channel, lane
        self._posted, self._collected = itertools.count(), itertools.count()

    def post(self, value: float, second: float = 0.0) -> None:
        """See `PostedSum.post`."""
        word = np.array([value, second], np.float32).view(np.uint64)
        self._lane.post(next(self._posted), int(word[0]))

    def collect(self) -> tuple[np.float32, np.float32]:
        """See `PostedSum.collect`."""
        step, what = next(self._collected), self._channel.what
        words = self._lane.collect(Operation(self._channel.channel, step, what=what))
        numbers = np.array(words, np.uint64).view(np.float32).reshape(-1, 2)
        first, second = functools.reduce(np.add, numbers)
        return first, second


class _RingSum(PostedSum):
    """An all-reduce that the loop of the process runs."""

    def __init__(self, channel: Communicator) -> None:
        self._channel = channel
        self._numbers: Array
        self._summed: concurrent.futures.Future[None]

    def post(self, value: float, second: float = 0.0) -> None:
        """See `PostedSum.post`."""
        self._numbers = np.array([value, second], np.float32)
        operation = self._channel.operation()._replace(signature=_SIGNATURE)
        self._channel.begin(operation)
        self._summed = ring.start_all_reduce(self._channel.transport, operation, self._numbers)

    def collect(self) -> tuple[np.float32, np.float32]:
        """See `PostedSum.collect`."""
        self._summed.result()
        return self._numbers[0], self._numbers[1]
