"""Decides what follows a failed attempt: a restart, when and on which slots, or the end."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hostopt import errors

FIRST_DELAY_S = 1.0  # before the second attempt; doubled before each further one
MAX_DELAY_S = 60.0
STEADY_S = 60.0  # an attempt that lasts longer resets the delay
_MAX_CONSECUTIVE_FAILURES = 2  # attempts in a row after which a slot is left out
_LAST_PERMANENT = 128
_FIRST_RETRYABLE = 193
# Below 128 like the permanent failures, but a damaged message may arrive intact the next time.
_DAMAGED = errors.ProtocolError.exit_code
_NAMES = {kind.exit_code: name for name, kind in errors.CLASSES.items()}
# Exit codes of reporters: ranks that failed because of another rank.
_REPORTERS = {
    _DAMAGED,
    errors.PeerLostError.exit_code,
    errors.CollectiveTimeoutError.exit_code,
    errors.RendezvousTimeoutError.exit_code,
}


@dataclass(frozen=True)
class TaskExit:
    """The exit of one process of an attempt."""

    name: str
    slot: int | None  # 0 to N-1, which may differ from the rank; None beside the ranks
    code: int  # 128 + n if signal n ended the process
    forced: bool = False  # the launcher signalled it because its grace period was over
    cause: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {describe(self.code)}"


@dataclass(frozen=True)
class RestartDecision:
    """The root cause of a failed attempt, and whether to retry."""

    code: int
    retry: bool
    reason: str  # the root cause in words, for the log
    failed_slots: frozenset[int] = frozenset()  # that caused it; empty if only reporters failed
    cause: str = ""  # the error that the root cause reported, or else the first of any process


def classify_exits(exits: Sequence[TaskExit]) -> RestartDecision:
    """Finds the root cause of a failed attempt.

    The first of these is the root cause:

    1. a process with a permanent failure,
    2. a process that a signal ended,
    3. a process that failed by itself, which excludes reporters,
    4. a process that the launcher had to end after the others had failed,
    5. a process that exited with 0 while the others still needed it,
    6. the first reporter.

    Args:
      exits: exits of all processes, in the order in which the launcher saw them. The order proves
        little: a survivor's exit may be seen before the exit of the rank that it lost.
    """
    failed = [each for each in exits if each.code and not each.forced]
    if not failed:
        return RestartDecision(0, False, "all tasks succeeded")
    permanent = next((each for each in failed if is_permanent(each.code)), None)
    if permanent is not None:
        return _decide(permanent, failed)
    killed = [each for each in failed if _LAST_PERMANENT < each.code < _FIRST_RETRYABLE]
    causes = killed or [each for each in failed if each.code not in _REPORTERS]
    if causes:
        return _decide(causes[0], failed, causes)
    first, reason = failed[0], ""
    late = [each for each in exits if each.forced]
    early = [each for each in exits if not each.code]
    if late:
        reason = f"{_names(late)} did not exit in time ({first})"
    elif early and first.code != _DAMAGED:
        reason = f"{_names(early)} exited with code 0 before the other tasks ({first})"
    return _decide(first, failed, late, reason)


def _decide(
    root: TaskExit, failed: Sequence[TaskExit], causes: Sequence[TaskExit] = (), reason: str = ""
) -> RestartDecision:
    slots = frozenset(each.slot for each in causes if each.slot is not None)
    reported = next((each for each in (root, *failed) if each.cause), None)
    cause = f"{reported.name}: {reported.cause}" if reported else ""
    retry = not is_permanent(root.code)
    return RestartDecision(root.code, retry, reason or str(root), slots, cause)


def _names(exits: Sequence[TaskExit]) -> str:
    return ", ".join(each.name for each in exits)


def is_permanent(code: int) -> bool:
    """Returns True if the same command would fail with this exit code again."""
    return 0 < code <= _LAST_PERMANENT and code != _DAMAGED


def describe(code: int) -> str:
    """Returns an exit code with the name of its signal or error."""
    if code in _NAMES:
        return f"exit code {code} ({_NAMES[code]})"
    try:
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    except ValueError:
        return f"exit code {code}"


class Restarts:
    """Counts the restarts of a group and computes the delay before each (exponential back-off)."""

    def __init__(self, max_restarts: int) -> None:
        self.used = 0
        self._max_restarts = max_restarts
        self._delay_s = FIRST_DELAY_S

    def next_delay_s(self, lasted_s: float) -> float | None:
        """Uses up one restart; returns the seconds to wait before it, None if none is left."""
        if self.used == self._max_restarts:
            return None
        self.used += 1
        delay_s = FIRST_DELAY_S if lasted_s > STEADY_S else self._delay_s
        self._delay_s = min(2 * delay_s, MAX_DELAY_S)
        return delay_s


class Slots:
    """The slots that are used in an attempt."""

    def __init__(self, size: int, min_size: int) -> None:
        self.in_use = list(range(size))
        self._size = size
        self.min_size = min_size
        self._consecutive_failures = [0] * size
        self._nodes: dict[int, str] = {}  # names of the machines by slot

    def choose(self, failed_slots: Collection[int]) -> None:
        """Chooses the slots of the next attempt: all but those that failed twice in a row.

        A slot that was left out rejoins at the restart after that. It is left out again at once if
        it fails again. If all slots in use have caused the last failure, none of them counts.
        """
        if set(failed_slots) == set(self.in_use):
            failed_slots = ()
        failures = self._consecutive_failures
        for slot in self.in_use:
            failures[slot] = failures[slot] + 1 if slot in failed_slots else 0
        failing = [slot for slot in self.in_use if failures[slot] >= _MAX_CONSECUTIVE_FAILURES]
        left_out = failing[: self._size - self.min_size]
        self.in_use = [slot for slot in range(self._size) if slot not in left_out]

    def use(self, nodes: Mapping[int, str]) -> None:
        """Uses the slots that have a place in an attempt.

        The failures of a slot that has moved to another machine no longer count.
        """
        for slot, node in nodes.items():
            if self._nodes.get(slot, node) != node:
                self._consecutive_failures[slot] = 0
        self._nodes.update(nodes)
        self.in_use = list(nodes)

    def describe(self) -> str:
        """Returns ", without slot i, j", or an empty string if all slots are in use."""
        left_out = [str(slot) for slot in range(self._size) if slot not in self.in_use]
        return f", without slot {', '.join(left_out)}" if left_out else ""
