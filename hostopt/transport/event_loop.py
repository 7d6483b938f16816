"""The event loop of the process: one thread that sends, receives and runs collectives.

No message is handed to another thread, which would cost half as much again as the message. One
loop serves all transports of a process, as grpc.aio requires.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from hostopt.process.child_process import ForkGuard

_Result = TypeVar("_Result")
_starting = threading.RLock()  # reentrant, as a signal handler may run at any time


def run(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs a coroutine on the loop and waits for its result. The loop's thread must not call it.

    The coroutine has its own deadlines. It is cancelled if this thread is interrupted.
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
        del future  # breaks the reference cycle of its exception and this frame


def start(coroutine: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
    """Starts a coroutine on the loop; may be called from any thread."""
    try:
        guard.check()
    except BaseException:
        coroutine.close()
        raise
    with _starting:
        loop = _start_loop()
    return asyncio.run_coroutine_threadsafe(coroutine, loop)


def settle(future: asyncio.Future[None], error: BaseException | None = None) -> None:
    """Ends a future, with an error if there is one, unless it has ended; called on the loop."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


@functools.cache
def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="hostopt-loop").start()
    return loop


guard = ForkGuard("a hostopt ring", lambda: _start_loop.cache_info().currsize > 0)
