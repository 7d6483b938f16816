"""What follows when all ranks have ended: another attempt, when and with whom, or the end."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hostopt import errors

__all__: list[str] = []

FIRST_DELAY_S = 1.0  # before the second attempt; doubled before each further one
MAX_DELAY_S = 60.0
STEADY_S = 60.0  # after an attempt that took longer the delays begin anew
_STRIKES = 2  # attempts in a row after which a slot is left out
_LAST_PERMANENT = 128
_FIRST_RETRYABLE = 193
# Below 128 like what fails again, but a message that was damaged may be whole the next time.
_DAMAGED = errors.ProtocolError.exit_code
_KINDS = (
    errors.ConfigError,
    errors.CollectiveMismatchError,
    errors.ProtocolError,
    errors.AuthError,
    errors.CheckpointError,
    errors.NonFiniteGradientError,
    errors.PeerLostError,
    errors.CollectiveTimeoutError,
    errors.RendezvousTimeoutError,
    errors.ResourceError,
)
_NAMES = {kind.exit_code: kind.__name__ for kind in _KINDS}
# Codes of ranks that say what they have seen of another one.
_WITNESSES = {_DAMAGED, *(code for code in _NAMES if code >= _FIRST_RETRYABLE)}
_WITNESSES.remove(errors.ResourceError.exit_code)


@dataclass(frozen=True)
class Ending:
    """How one process of an attempt has ended.

    Args:
      name: the task, as the log shows it.
      slot: place on this machine, 0..N-1, whatever rank it had; None for an evaluator.
      code: exit code; 128 + n where signal n ended it.
      forced: whether the launcher lost its patience with it.
      said: the cause, as the process has reported it; empty if it could not.
    """

    name: str
    slot: int | None
    code: int
    forced: bool = False
    said: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {describe(self.code)}"


@dataclass(frozen=True)
class Verdict:
    """Why an attempt has ended, judged by all of its processes.

    Args:
      code: exit code of the root cause; 0 where all have succeeded.
      retry: whether another attempt may succeed.
      reason: the root cause in words.
      culprits: slots that caused the end; none where there are only witnesses.
      said: the cause in the words of the process that is the root cause, or if it had none, of
        the first that reports it; empty if none does.
    """

    code: int
    retry: bool
    reason: str
    culprits: frozenset[int] = frozenset()
    said: str = ""


def judge(endings: Sequence[Ending]) -> Verdict:
    """Find the root cause of an attempt's end.

    Args:
      endings: of all its processes, in the order in which they were seen. That order says little:
        a survivor's end may be seen before that of the rank which it has lost.

    Returns:
      The verdict. A permanent failure counts before all others; then a rank that a signal ended;
      then one that failed by itself; then one that did not end when others did; then one that
      ended with 0 while others still needed it; then the first of those that report another one.
    """
    failed = [ending for ending in endings if ending.code and not ending.forced]
    if not failed:
        return Verdict(0, False, "all have ended in good order")
    for ending in failed:
        if is_permanent(ending.code):
            return _verdict(ending, failed, False)
    killed = [ending for ending in failed if _LAST_PERMANENT < ending.code < _FIRST_RETRYABLE]
    to_blame = killed or [ending for ending in failed if ending.code not in _WITNESSES]
    if to_blame:
        return _verdict(to_blame[0], failed, True, to_blame)
    late = [ending for ending in endings if ending.forced]
    if late:
        names = ", ".join(ending.name for ending in late)
        reason = f"{names} did not end when others did ({failed[0]})"
        return replace(_verdict(failed[0], failed, True, late), reason=reason)
    early = [ending for ending in endings if not ending.code]
    if early and failed[0].code != _DAMAGED:
        names = ", ".join(ending.name for ending in early)
        reason = f"{names} ended with exit code 0 before the others had done ({failed[0]})"
        return replace(_verdict(failed[0], failed, True), reason=reason)
    return _verdict(failed[0], failed, True)


def _verdict(
    root: Ending, failed: Sequence[Ending], retry: bool, culprits: Sequence[Ending] = ()
) -> Verdict:
    speaks = next((ending for ending in (root, *failed) if ending.said), None)
    said = f"{speaks.name}: {speaks.said}" if speaks else ""
    return Verdict(root.code, retry, str(root), _slots(culprits), said)


def is_permanent(code: int) -> bool:
    """Whether the same command would fail with this exit code again."""
    return 0 < code <= _LAST_PERMANENT and code != _DAMAGED


def describe(code: int) -> str:
    """An exit code, with the signal or the error that it stands for."""
    if code in _NAMES:
        return f"exit code {code} ({_NAMES[code]})"
    try:
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    except ValueError:
        return f"exit code {code}"


def _slots(endings: Sequence[Ending]) -> frozenset[int]:
    return frozenset(ending.slot for ending in endings if ending.slot is not None)


class Restarts:
    """How often something may be started again, and how long to wait before.

    Args:
      most: number of restarts in all.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self._delay_s = FIRST_DELAY_S

    def next_delay_s(self, lasted_s: float) -> float | None:
        """Take one restart.

        Args:
          lasted_s: seconds that the attempt took which has failed.

        Returns:
          Seconds to wait; None where no restart is left.
        """
        if self.used == self.most:
            return None
        self.used += 1
        delay_s = FIRST_DELAY_S if lasted_s > STEADY_S else self._delay_s
        self._delay_s = min(2 * delay_s, MAX_DELAY_S)
        return delay_s


class Slots:
    """Which of the machine's slots take part in an attempt.

    Args:
      size: number of slots.
      min_size: fewest ranks with which an attempt is worth it.
    """

    def __init__(self, size: int, min_size: int) -> None:
        self.in_use = list(range(size))
        self._size = size
        self._min_size = min_size
        self._strikes = [0] * size

    def choose(self, culprits: Collection[int]) -> None:
        """Choose the slots of the next attempt: all but those that failed twice in a row.

        A slot that was left out takes part again, and is left out at once where it fails again.

        Args:
          culprits: slots that ended the last attempt; where it was all, it was none of them.
        """
        if set(culprits) == set(self.in_use):
            culprits = ()
        for slot in self.in_use:
            self._strikes[slot] = self._strikes[slot] + 1 if slot in culprits else 0
        failing = [slot for slot in self.in_use if self._strikes[slot] >= _STRIKES]
        left_out = failing[: self._size - self._min_size]
        self.in_use = [slot for slot in range(self._size) if slot not in left_out]

    def describe(self) -> str:
        """Which slots are left out, as the end of a sentence; nothing where none is."""
        left_out = [str(slot) for slot in range(self._size) if slot not in self.in_use]
        return f", without slot {', '.join(left_out)}" if left_out else ""
