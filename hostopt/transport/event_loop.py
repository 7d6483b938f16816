"""The one thread of a process in which messages travel and collectives run.

No message is handed to another thread of ours: that was a third of all that it costs. One loop
serves all transports of a process, as grpc.aio wants it.
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
_starting = threading.RLock()  # a handler of signals may come at any time


def run(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine on the loop, and wait for its end; from any thread but the loop's own.

    Args:
      coroutine: has deadlines of its own.

    Returns:
      Its result.

    Raises:
      BaseException: what it raises; it is cancelled where this thread is interrupted.
    """
    if asyncio._get_running_loop() is not None:
        coroutine.close()
        raise RuntimeError("a coroutine or callback of the loop cannot wait for the loop")
    future = start(coroutine)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
    finally:
        del future  # or its error would keep this frame, and the frame the error


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
