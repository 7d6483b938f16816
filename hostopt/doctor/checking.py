"""What a check says, and how it is run: with a deadline, and never with a traceback.

A check is a function that yields findings. It may raise: a HostOptError's message becomes a
finding, and so does any other exception, as a check that breaks says something too.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hostopt.errors import HostOptError

__all__: list[str] = []

OK, NOTE, WRONG = "ok", "note", "WRONG"


class Finding(NamedTuple):
    """One line of what the doctor says.

    Args:
      verdict: `OK`; `NOTE` for what is worth knowing; `WRONG` for what keeps a training from
        running as it should.
      text: what was found, and where it is not `OK`, what to do.
    """

    verdict: str
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:<5} {self.text}"


def run(check: Callable[..., Iterable[Finding]], *args: Any, timeout_s: float) -> list[Finding]:
    """Run a check.

    Args:
      check: what to call.
      args: its arguments.
      timeout_s: how long it may take.

    Returns:
      Its findings, and one more where it did not come to its end.
    """
    found: list[Finding] = []
    (end,) = outcomes(lambda _: found.extend(_all_of(check, args)), [None], timeout_s)
    name = check.__name__.strip("_").replace("_", " ")
    if isinstance(end, TimeoutError):
        text = f"the check of {name} did not end within {timeout_s:g} s: what it looks at hangs"
        return [*found, Finding(WRONG, text)]
    if isinstance(end, Exception):
        return [*found, Finding(WRONG, f"the check of {name} failed: {end!r}")]
    return found


def _all_of(check: Callable[..., Iterable[Finding]], args: Sequence[Any]) -> Iterator[Finding]:
    try:
        yield from check(*args)
    except HostOptError as error:
        yield Finding(WRONG, str(error))


def outcomes(function: Callable[[Any], Any], items: Sequence[Any], timeout_s: float) -> list[Any]:
    """Call a function for several items at the same time, none longer than a deadline.

    Args:
      function: what may block; it goes on in vain after the deadline, in a daemon thread.
      items: its arguments.
      timeout_s: how long to wait for all of them.

    Returns:
      What it returned for each item, or the exception, a TimeoutError where it has not come back.
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
