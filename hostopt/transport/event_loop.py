"""The event loops of the process, each one thread that sends, receives and runs collectives.

Loop 0 serves all transports of a process, as grpc.aio requires. The others share large collectives
with it: each has data sockets of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Coroutine
from typing import Any, Callable, TypeVar

from hostopt.process.child_process import ForkGuard

_Result = TypeVar("_Result")
_starting = threading.RLock()  # reentrant, as a signal handler may run at any time
_current = threading.local()  # `number` of the loop that this thread runs


def run(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs a coroutine on loop 0 and waits for its result. The loop's thread must not call it.

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


def start(
    coroutine: Coroutine[Any, Any, _Result], number: int = 0
) -> concurrent.futures.Future[_Result]:
    """Starts a coroutine on a loop; may be called from any thread."""
    try:
        guard.check()
    except BaseException:
        coroutine.close()
        raise
    return asyncio.run_coroutine_threadsafe(coroutine, _loop(number))


def current() -> int:
    """Returns the number of the loop that runs the caller."""
    number: int = getattr(_current, "number", 0)
    return number


async def run_on(number: int, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs a coroutine on a loop, from any loop; see `run_on_loops`."""
    if number == current():
        return await coroutine
    (result,) = await run_on_loops({number: coroutine})
    return result


async def run_on_loops(coroutines: dict[int, Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Runs coroutines by the numbers of their loops, and returns once all of them have ended.

    The first error, or the end of the caller, cancels the others. Nothing runs after that, so the
    caller's memory is free again.
    """
    tasks: dict[int, asyncio.Task[_Result]] = {}
    loop = asyncio.get_running_loop()
    ends = [loop.create_future() for _ in coroutines]

    def begin(number: int, coroutine: Coroutine[Any, Any, _Result], end: Any) -> None:
        task = tasks[number] = asyncio.ensure_future(coroutine)
        task.add_done_callback(lambda _: loop.call_soon_threadsafe(settle, end))

    def cancel(number: int) -> None:
        tasks[number].cancel()  # has begun, as a loop makes its calls in order

    def cancel_all() -> None:
        for number in coroutines:
            call(number, functools.partial(cancel, number))

    for (number, coroutine), end in zip(coroutines.items(), ends):
        call(number, functools.partial(begin, number, coroutine, end))
    error: BaseException | None = None
    pending = {*ends}
    while pending:
        try:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError as cancelled:
            error = cancelled
            cancel_all()
            continue
        ended = [tasks[number] for number, end in zip(coroutines, ends) if end.done()]
        failed = [task for task in ended if task.cancelled() or task.exception()]
        if failed and error is None:
            error = asyncio.CancelledError() if failed[0].cancelled() else failed[0].exception()
            cancel_all()
    if error is not None:
        raise error
    return [tasks[number].result() for number in coroutines]


def call(number: int, function: Callable[[], object]) -> None:
    """Calls a function on a loop: at once if that runs the caller, otherwise soon."""
    if number == current():
        function()
    else:
        _loop(number).call_soon_threadsafe(function)


def settle(future: asyncio.Future[None], error: BaseException | None = None) -> None:
    """Ends a future, with an error if there is one, unless it has ended; called on the loop."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _loop(number: int) -> asyncio.AbstractEventLoop:
    with _starting:
        return _start_loop(number)


@functools.cache
def _start_loop(number: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run_forever() -> None:
        _current.number = number
        loop.run_forever()

    threading.Thread(target=run_forever, daemon=True, name=f"hostopt-loop-{number}").start()
    return loop


guard = ForkGuard("a hostopt ring", lambda: _start_loop.cache_info().currsize > 0)
