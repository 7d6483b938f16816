"""Detects stragglers: rank 0 regularly collects the measurements of all ranks.

A slow rank finds all others ready, so it waits least. A slow link keeps its sender busy much
longer than the other senders of the ring, which send the same number of bytes.
"""

from __future__ import annotations

import logging
import statistics
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from hostopt.collectives.communicator import Communicator
from hostopt.gradients.step_stats import StepTimes, slowest_rank
from hostopt.transport import event_loop
from hostopt.transport.message import Tag

_log = logging.getLogger(__name__)

# Part of the elapsed time; a smaller difference between ranks is normal.
_NOTABLE = 0.3
_TIMES_OTHERS = 3.0
_MESSAGE = struct.Struct("<dd")  # a rank's waiting time and sending time, in ms
_BUCKET = 1  # in the tags of the messages; the communicator's own calls have bucket 0


class Stragglers(NamedTuple):
    """Measurements since the previous report. Summaries show them by field name."""

    slowest_rank: int  # the one that waited least
    skew_ms: float
    slowest_link: int  # the rank whose messages to the next one took longest


class _Report(NamedTuple):
    step: int
    local_ms: tuple[float, float]  # this rank's waiting time and sending time
    steps: int
    elapsed_ms: float


class StragglerReports:
    """Sends the reports of one rank. Rank 0 collects them a step later, when they have arrived.

    The communicator is a duplicate that is used for nothing else.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._reported_ms = (0.0, 0.0)  # totals at the previous report
        self.waited_s = [0.0] * communicator.size  # by rank so far, on rank 0
        self._step = 0
        self._since_s = time.monotonic()
        self._uncollected: _Report | None = None
        self._suspect = ""
        self._has_warned = False  # about the suspect

    def begin(self, step: int) -> None:
        """Starts the measurement at the current step."""
        self._step, self._since_s = step, time.monotonic()
        sent_ms = 1e3 * self._communicator.transport.send_time_s()
        self._reported_ms = (self._reported_ms[0], sent_ms)

    def send(self, step: int, times: StepTimes) -> None:
        """Sends the measurements to rank 0. All ranks must call it after the same steps."""
        transport = self._communicator.transport
        total_ms = (times.total_wait_ms, 1e3 * transport.send_time_s())
        local_ms = (total_ms[0] - self._reported_ms[0], total_ms[1] - self._reported_ms[1])
        self._reported_ms = total_ms
        if self._communicator.rank == 0:
            now_s = time.monotonic()
            elapsed_ms = 1e3 * (now_s - self._since_s)
            self._uncollected = _Report(step, local_ms, step - self._step, elapsed_ms)
            self._since_s, self._step = now_s, step
        else:
            message = _MESSAGE.pack(*local_ms)
            event_loop.run(transport.send(0, self._tag(step), message, "a step report"))

    def collect(self) -> Stragglers | None:
        """Receives the reports of the last `send`. Warns if a rank or link is slow twice in a row.

        Returns None on other ranks than rank 0, and if there is no new report.
        """
        if self._uncollected is None:
            return None
        report, self._uncollected = self._uncollected, None
        transport, measured_ms = self._communicator.transport, [report.local_ms]
        for peer in range(1, self._communicator.size):
            message = event_loop.run(transport.recv(peer, self._tag(report.step), "a step report"))
            measured_ms.append(_MESSAGE.unpack(message))
        waits_ms, sends_ms = zip(*measured_ms)
        self.waited_s = [s + ms / 1e3 for s, ms in zip(self.waited_s, waits_ms)]
        suspect, text = self._find_suspect(waits_ms, sends_ms, report.elapsed_ms)
        is_same = bool(suspect) and suspect == self._suspect
        if is_same and not self._has_warned:
            _log.warning("step %d: %s. It slows down all ranks", report.step, text)
        self._suspect, self._has_warned = suspect, is_same
        lag_ms = straggler_lag(waits_ms) / max(report.steps, 1)
        return Stragglers(slowest_rank(waits_ms), lag_ms, sends_ms.index(max(sends_ms)))

    def _tag(self, step: int) -> Tag:
        return Tag(self._communicator.channel, step, _BUCKET)

    def _find_suspect(
        self, waits_ms: Sequence[float], sends_ms: Sequence[float], elapsed_ms: float
    ) -> tuple[str, str]:
        """Returns the name of a slow rank or link and the text of a warning, or empty texts."""
        describe = self._communicator.transport.cluster.describe
        lag_ms = straggler_lag(waits_ms)
        if lag_ms > _NOTABLE * elapsed_ms:
            rank, percent = slowest_rank(waits_ms), 100 * lag_ms / elapsed_ms
            return f"rank {rank}", (
                f"the others wait {percent:.0f} % of the time for {describe(rank)}"
            )
        hosts = self._communicator.hosts  # the senders form the ring over the network
        senders = range(self._communicator.size) if hosts is None else hosts.leaders
        sent_ms = [sends_ms[rank] for rank in senders]
        if len(senders) > 1 and is_slow_link(sent_ms, elapsed_ms):
            index = sent_ms.index(max(sent_ms))
            sender, receiver = senders[index], senders[(index + 1) % len(senders)]
            percent = 100 * sends_ms[sender] / elapsed_ms
            return f"link {sender}", (
                f"the link from {describe(sender)} to {describe(receiver)} is busy "
                f"{percent:.0f} % of the time, the others far less"
            )
        return "", ""


def straggler_lag(waits_ms: Sequence[float]) -> float:
    """Returns the median waiting time of the others minus the smallest one, 0 or more."""
    least, *others = sorted(waits_ms)
    return statistics.median(others) - least


def is_slow_link(sends_ms: Sequence[float], elapsed_ms: float) -> bool:
    """Returns True if the longest time is notable, and several times the median of the others."""
    *others, most = sorted(sends_ms)
    return most > _NOTABLE * elapsed_ms and most > _TIMES_OTHERS * statistics.median(others)
