"""Findings, and functions that run checks with a deadline.

A check is a function that yields findings. If it raises an exception or hangs, that becomes a
finding, too.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from hostopt.errors import HostOptError

OK, NOTE, WRONG = "ok", "note", "WRONG"


class Finding(NamedTuple):
    """One line of the doctor's output."""

    verdict: str  # WRONG: something prevents a training from running properly
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:<5} {self.text}"


ok, note, wrong = (functools.partial(Finding, verdict) for verdict in (OK, NOTE, WRONG))


def run(check: Callable[..., Iterable[Finding]], *args: Any, timeout_s: float) -> list[Finding]:
    """Runs a check."""
    findings: list[Finding] = []
    (outcome,) = outcomes(lambda _: findings.extend(check(*args)), [None], timeout_s)
    if outcome is None:
        return findings
    name = check.__name__.strip("_").replace("_", " ")
    if isinstance(outcome, HostOptError):
        text = str(outcome)
    elif isinstance(outcome, TimeoutError):
        text = f"the check of {name} did not finish within {timeout_s:g} s: what it accesses hangs"
    else:
        text = f"the check of {name} failed: {outcome!r}"
    return [*findings, wrong(text)]


def outcomes(function: Callable[[Any], Any], items: Sequence[Any], timeout_s: float) -> list[Any]:
    """Calls a function for several items in parallel; returns the result or exception of each.

    It is a TimeoutError if the call did not finish before the common deadline. Its daemon thread
    then keeps running, without effect.
    """
    results: list[Any] = [TimeoutError(f"no answer within {timeout_s:g} s") for _ in items]

    def call(index: int, item: Any) -> None:
        try:
            results[index] = function(item)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=each, daemon=True) for each in enumerate(items)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(deadline_s - time.monotonic(), 0))
    return list(results)
