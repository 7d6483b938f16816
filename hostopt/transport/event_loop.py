"""The one thread of a process in which messages travel and collectives run.

Nothing is handed from thread to thread for each message: of all that a message costs, that was a
third. One loop serves all transports of a process, as grpc.aio wants it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__: list[str] = []

_Result = TypeVar("_Result")
_starting = threading.Lock()


def run(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine on the loop, and wait for its end; from any thread but the loop's own.

    Args:
      coroutine: has deadlines of its own.

    Returns:
      Its result.

    Raises:
      BaseException: what it raises; it is cancelled where this thread is interrupted.
    """
    future = start(coroutine)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def start(coroutine: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
    """Start a coroutine on the loop, from any thread.

    Args:
      coroutine: what to run.

    Returns:
      Its future.
    """
    return asyncio.run_coroutine_threadsafe(coroutine, _running_loop())


def _running_loop() -> asyncio.AbstractEventLoop:
    with _starting:
        return _start_loop()


@functools.cache
def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="hostopt-loop").start()
    return loop
