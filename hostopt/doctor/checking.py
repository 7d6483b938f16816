"""Findings, and functions that run checks with a deadline.

A check is a function that yields findings. If it raises an exception or hangs, that becomes a
finding, too.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hostopt.errors import HostOptError

OK, NOTE, WRONG = "ok", "note", "WRONG"


class Finding(NamedTuple):
    """One line of the doctor's output.

    Args:
      verdict: `OK`; `NOTE` for something to know about; `WRONG` for something that prevents a
        training from running properly.
    """

    verdict: str
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:<5} {self.text}"


def run(check: Callable[..., Iterable[Finding]], *args: Any, timeout_s: float) -> list[Finding]:
    """Runs a check."""
    findings: list[Finding] = []
    (outcome,) = outcomes(lambda _: findings.extend(_run(check, args)), [None], timeout_s)
    name = check.__name__.strip("_").replace("_", " ")
    if isinstance(outcome, TimeoutError):
        text = f"the check of {name} did not finish within {timeout_s:g} s: what it accesses hangs"
        return [*findings, Finding(WRONG, text)]
    if isinstance(outcome, Exception):
        return [*findings, Finding(WRONG, f"the check of {name} failed: {outcome!r}")]
    return findings


def _run(check: Callable[..., Iterable[Finding]], args: Sequence[Any]) -> Iterator[Finding]:
    try:
        yield from check(*args)
    except HostOptError as error:
        yield Finding(WRONG, str(error))


def outcomes(function: Callable[[Any], Any], items: Sequence[Any], timeout_s: float) -> list[Any]:
    """Calls a function for several items in parallel, with a common deadline.

    Args:
      function: may block. After the deadline its daemon thread keeps running, without effect.

    Returns:
      For each item the result or the exception; a TimeoutError if the call did not finish.
    """
    ended: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def call(index: int, item: Any) -> None:
        try:
            ended.put((index, function(item)))
        except Exception as error:
            ended.put((index, error))

    results: list[Any] = [TimeoutError(f"no answer within {timeout_s:g} s") for _ in items]
    for index, item in enumerate(items):
        threading.Thread(target=call, args=(index, item), daemon=True).start()
    deadline_s = time.monotonic() + timeout_s
    for _ in items:
        try:
            index, result = ended.get(timeout=max(deadline_s - time.monotonic(), 0))
        except queue.Empty:
            break
        results[index] = result
    return results
