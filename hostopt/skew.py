"""Whom the ranks wait for: rank 0 collects from time to time what each has measured.

A slow rank finds all others ready, so it waits least. A slow link keeps its sender busy, much
longer than the other senders of the ring, which send as much.
"""

from __future__ import annotations

import logging
import statistics
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from hostopt.communicator import Communicator
from hostopt.step_stats import StepTimes, slowest_rank
from hostopt.transport import event_loop
from hostopt.transport.base import Tag

__all__: list[str] = []

_log = logging.getLogger(__name__)

# Of the time that has passed: less than this is how ranks differ anyway.
_NOTABLE = 0.3
_TIMES_OTHERS = 3.0
_MESSAGE = struct.Struct("<dd")  # of a rank: what it waited, and what its sends took, in ms
_BUCKET = 1  # of the messages' tags; 0 is for the communicator's own calls


class Skew(NamedTuple):
    """What the ranks have measured since the report before.

    Args:
      slowest_rank: the rank that waited least.
      skew_ms: how much longer the others waited, per step; their median.
      slowest_link: the rank whose messages to the next one took longest.
    """

    slowest_rank: int
    skew_ms: float
    slowest_link: int


class SkewReports:
    """One rank's part in reports that rank 0 collects one step later, when they have arrived.

    Args:
      communicator: a communicator of its own (a `duplicate`).
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._reported = (0.0, 0.0)  # at the report before, since the beginning
        self._step = 0
        self._since_s = time.monotonic()
        self._uncollected: tuple[int, tuple[float, float], int, float] | None = None
        self._suspicion = ""

    def begin(self, step: int) -> None:
        """Count from here.

        Args:
          step: the step from which all ranks count.
        """
        self._step, self._since_s = step, time.monotonic()
        self._reported = (self._reported[0], 1e3 * self._communicator.transport.sending_s())

    def send(self, step: int, times: StepTimes) -> None:
        """Report what was measured; on all ranks after the same steps.

        Args:
          step: number of the step, larger than at the report before.
          times: of the last step.

        Raises:
          HostOptError: the ring has failed.
        """
        transport = self._communicator.transport
        total = (times.total_wait_ms, 1e3 * transport.sending_s())
        own = (total[0] - self._reported[0], total[1] - self._reported[1])
        self._reported = total
        if self._communicator.rank == 0:
            now_s = time.monotonic()
            elapsed_ms = 1e3 * (now_s - self._since_s)
            self._uncollected = step, own, step - self._step, elapsed_ms
            self._since_s, self._step = now_s, step
        else:
            message = _MESSAGE.pack(*own)
            event_loop.run(transport.send(0, self._tag(step), message, "a step report"))

    def collect(self) -> Skew | None:
        """Take in the reports of the last `send`, and warn of who is slow twice in a row.

        Returns:
          On rank 0 what they say; None where nothing was sent since, and on the other ranks.

        Raises:
          HostOptError: a rank failed, left or timed out.
        """
        if self._uncollected is None:
            return None
        (step, own, steps, elapsed_ms), self._uncollected = self._uncollected, None
        transport, measured = self._communicator.transport, [own]
        for peer in range(1, self._communicator.size):
            message = event_loop.run(transport.recv(peer, self._tag(step), "a step report"))
            waited_ms, sent_ms = _MESSAGE.unpack(message)
            measured.append((waited_ms, sent_ms))
        waits_ms, sends_ms = zip(*measured)
        self._warn(step, waits_ms, sends_ms, elapsed_ms)
        slowest = slowest_rank(waits_ms)
        return Skew(slowest, lag(waits_ms) / max(steps, 1), sends_ms.index(max(sends_ms)))

    def _senders(self) -> Sequence[int]:
        """The ranks of the ring over the network, in its order: one of each host that shares."""
        hosts = self._communicator.hosts
        return range(self._communicator.size) if hosts is None else hosts.leaders

    def _tag(self, step: int) -> Tag:
        return Tag(self._communicator.channel, step, _BUCKET)

    def _warn(
        self, step: int, waits_ms: Sequence[float], sends_ms: Sequence[float], elapsed_ms: float
    ) -> None:
        ring = self._communicator.transport.cluster.ring
        senders = self._senders()
        sent_ms = [sends_ms[rank] for rank in senders]
        suspicion, text = "", ""
        if lag(waits_ms) > _NOTABLE * elapsed_ms:
            rank = slowest_rank(waits_ms)
            percent = 100 * lag(waits_ms) / elapsed_ms
            suspicion = f"rank {rank}"
            text = f"the others wait {percent:.0f} % of the time for rank {rank} ({ring[rank]})"
        elif len(senders) > 1 and is_slow_link(sent_ms, elapsed_ms):
            place = sent_ms.index(max(sent_ms))
            link, following = senders[place], senders[(place + 1) % len(senders)]
            percent = 100 * sends_ms[link] / elapsed_ms
            suspicion = f"link {link}"
            text = (
                f"the link from rank {link} ({ring[link]}) to rank {following} "
                f"({ring[following]}) is busy {percent:.0f} % of the time, the others far less"
            )
        if suspicion and suspicion == self._suspicion:
            _log.warning("step %d: %s. It holds up all ranks", step, text)
            suspicion = f"{suspicion}, told"
        elif self._suspicion == f"{suspicion}, told":
            suspicion = self._suspicion
        self._suspicion = suspicion


def lag(waits_ms: Sequence[float]) -> float:
    """How much longer the others have waited than the rank that waited least.

    Args:
      waits_ms: of each rank; of two at least.

    Returns:
      The median of the others, less what that rank waited; 0 or more.
    """
    least, *others = sorted(waits_ms)
    return statistics.median(others) - least


def is_slow_link(sends_ms: Sequence[float], elapsed_ms: float) -> bool:
    """Whether the messages of one rank took much longer than those of the others.

    Args:
      sends_ms: of each rank; of two at least.
      elapsed_ms: the time that has passed.

    Returns:
      True where they took a notable part of that time, and several times as long as the others'.
    """
    *others, most = sorted(sends_ms)
    return most > _NOTABLE * elapsed_ms and most > _TIMES_OTHERS * statistics.median(others)
