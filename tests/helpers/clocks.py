"""A clock that tests advance, so that what takes minutes in the product takes no time in tests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
from harness import until

from hostopt.collectives.communicator import Communicator
from hostopt.telemetry import flight_recorder
from hostopt.transport import event_loop, mailbox, mismatch, stall

_DIAGNOSIS_S = 1e6  # no test depends on how long the real diagnosis takes


class Clock:
    """Stands for the module `time` until the test ends; `advance` adds to real time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._advancing = threading.Lock()
        self._ahead_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        """Like `time.monotonic`."""
        return time.monotonic() + self._ahead_s

    def govern(self, *modules: ModuleType) -> None:
        """Lets modules that import `time` use this clock until the end of the test."""
        for module in modules:
            self._monkeypatch.setattr(module, "time", self)

    def govern_waits(self) -> None:
        """Lets this clock decide when waits for messages are due for a warning or their end."""
        self.govern(mailbox, stall, mismatch, flight_recorder)
        self._monkeypatch.setattr(stall, "_DIAGNOSIS_S", _DIAGNOSIS_S)

    def advance(self, seconds: float, *waiting: Communicator) -> None:
        """Moves the clock.

        Args:
          waiting: ranks whose waits on the event loop look at the clock before this returns, and
            not when their timers ring.
        """
        with self._advancing:
            self._ahead_s += seconds
        for communicator in waiting:
            box = communicator.transport.mailbox
            box._wake_all()
        if waiting:
            event_loop.run(asyncio.sleep(0))  # they come first


def until_blocked(
    ring: Sequence[Communicator], busy: Communicator | None = None
) -> list[Communicator]:
    """Waits until each rank, except a busy one, waits for a message that nobody has sent."""
    waiting = [each for each in ring if each is not busy]
    seen: list[list[Any]] = [[]]

    def is_same() -> bool:
        """A wait that is seen twice is no wait in shared memory that is about to end."""
        seen.append(event_loop.run(_waits(ring, waiting)))
        return all(seen[-1]) and seen[-1] == seen[-2]

    until(is_same, f"wait of ranks {[each.rank for each in waiting]}")
    return waiting


async def _waits(ring: Sequence[Communicator], waiting: Sequence[Communicator]) -> list[Any]:
    """Returns the waits of each rank; none if the message that ends one is on its way.

    This runs on the event loop, on which the ranks send, so they send nothing meanwhile.
    """
    recorders = {each.rank: each.transport.recorder for each in ring}
    result = []
    for each in waiting:
        waits = each.transport.mailbox.waits()
        ends = any(recorders[one.peer].has_sent(each.rank, one.tag) for one in waits)
        result.append([] if ends else waits)
    return result
