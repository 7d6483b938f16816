"""A wait for a message of a peer, and the times at which it is due for a warning or its end."""

from __future__ import annotations

import time
from typing import Callable, NamedTuple

from hostopt.options import Options
from hostopt.transport.message import Tag

# Time to find the reason for a timeout before the wait ends without one.
_DIAGNOSIS_S = 5.0
# A rank compares its call with its peer's after this time, and again after each doubling of it.
_COMPARE_AFTER_S = 0.25


class Wait(NamedTuple):
    """A wait for a message of a peer."""

    peer: int
    tag: Tag
    name: str
    since_s: float  # on the monotonic clock


class Schedule:
    """Times at which a wait is due for a comparison of calls, a warning or its end."""

    def __init__(
        self,
        wait: Wait,
        options: Options,
        on_stall: Callable[[Wait, bool], object],
        on_long_wait: Callable[[Wait], object],
        grace_s: float = 0.0,
    ) -> None:
        self._wait = wait
        self._on_stall = on_stall
        self._on_long_wait = on_long_wait
        self._warn_after_s = options.stall_warning_s
        self._compare_after_s = _COMPARE_AFTER_S
        self._timeout_s = options.collective_timeout_s
        self._has_timed_out = False
        self._grace_s = grace_s
        self._grace_end_s: float | None = None

    def is_in_grace(self) -> bool:
        """Returns True until `grace_s` after the first call, when the peer had left."""
        now_s = time.monotonic()
        if self._grace_end_s is None:
            self._grace_end_s = now_s + self._grace_s
        return now_s < self._grace_end_s

    def next_s(self) -> float | None:
        """Does what is due; returns the seconds until its next call, None at the wait's end."""
        waited_s = time.monotonic() - self._wait.since_s
        if waited_s >= self._timeout_s + _DIAGNOSIS_S:
            return None
        if waited_s >= self._timeout_s:
            if not self._has_timed_out:
                self._has_timed_out = True
                self._on_stall(self._wait, True)
            return self._timeout_s + _DIAGNOSIS_S - waited_s
        if waited_s >= self._warn_after_s:
            self._on_stall(self._wait, False)
            while waited_s >= self._warn_after_s:
                self._warn_after_s *= 2
        if waited_s >= self._compare_after_s:
            self._on_long_wait(self._wait)
            while waited_s >= self._compare_after_s:
                self._compare_after_s *= 2
        return min(self._warn_after_s, self._compare_after_s, self._timeout_s) - waited_s
