"""Waits of coroutines that end at once, in the call that ends them.

A task of asyncio continues in the next round of its event loop, which costs dozens of calls for
each message of a collective. A coroutine that runs `at_once` continues within `Wakeup.wake`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Generator
from typing import Any, Callable, Generic, TypeVar

from hostopt.transport.event_loop import settle

_Result = TypeVar("_Result")
_current = threading.local()  # `run`: the `_Run` whose coroutine this thread executes


async def at_once(
    function: Callable[..., Coroutine[Any, Any, _Result]], *arguments: Any
) -> _Result:
    """Calls a coroutine function, which continues as soon as a `Wakeup` that it awaits is woken.

    It may await what a task may, but nothing that asks for the current task, such as
    `asyncio.wait_for`.
    """
    run = _Run(function(*arguments))
    try:
        run.step()
        while True:
            try:
                return await run.end
            except asyncio.CancelledError:
                if run.has_ended:
                    raise
                run.cancel()  # it may still await something
    finally:
        run.close()


class Wakeup:
    """Is awaited once, until `wake`; created on the event loop by the coroutine that waits."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._run: _Run[Any] | None = getattr(_current, "run", None)
        if self._run is None:  # a task of asyncio waits
            self._future: asyncio.Future[None] = self._loop.create_future()

    def __await__(self) -> Generator[Any, None, None]:
        if self._run is None:
            yield from self._future
        else:
            yield self

    def wake(self) -> bool:
        """Ends the wait; may be called from any thread, and again.

        Returns True if the coroutine has continued, False if it does so soon.
        """
        if asyncio._get_running_loop() is not self._loop:
            self._loop.call_soon_threadsafe(self.wake)
        elif self._run is None:
            settle(self._future)
        elif getattr(_current, "run", None) is not None:  # such a coroutine calls, and goes first
            self._loop.call_soon(self._run.resume, self)
        else:
            self._run.resume(self)
            return True
        return False


class _Run(Generic[_Result]):
    """Drives a coroutine on the event loop."""

    def __init__(self, coroutine: Coroutine[Any, Any, _Result]) -> None:
        self._coroutine = coroutine
        self._loop = asyncio.get_running_loop()
        self._awaited: Wakeup | asyncio.Future[Any] | None = None
        self.end: asyncio.Future[_Result] = self._loop.create_future()
        self.has_ended = False

    def resume(self, awaited: Wakeup | asyncio.Future[Any] | None) -> None:
        """Continues the coroutine if this is what it awaits."""
        if awaited is self._awaited and not self.has_ended:
            self.step()

    def cancel(self) -> None:
        """Cancels what the coroutine awaits, after the caller of `at_once` was cancelled."""
        self.end = self._loop.create_future()
        if not isinstance(self._awaited, asyncio.Future) or not self._awaited.cancel():
            self.step(asyncio.CancelledError())

    def close(self) -> None:
        """Ends the coroutine, for which nobody waits any more, and frees what its error keeps."""
        self.has_ended = True
        self._coroutine.close()
        del self.end  # its exception has frames that refer to this object

    def step(self, error: BaseException | None = None) -> None:
        """Runs the coroutine, with an error if there is one, until it waits or ends."""
        caller, _current.run = getattr(_current, "run", None), self
        try:
            coroutine = self._coroutine
            awaited = coroutine.send(None) if error is None else coroutine.throw(error)
        except BaseException as raised:
            self._note_end(raised)
            return
        finally:
            _current.run = caller
        self._awaited = awaited
        if awaited is None:  # asyncio.sleep(0)
            self._loop.call_soon(self.resume, None)
        elif not isinstance(awaited, Wakeup):
            awaited._asyncio_future_blocking = False  # as a task tells a future that it waits
            awaited.add_done_callback(self.resume)

    def _note_end(self, raised: BaseException) -> None:
        self.has_ended, self._awaited = True, None
        if self.end.done():  # the caller was cancelled in this round of the loop
            return
        if isinstance(raised, StopIteration):
            self.end.set_result(raised.value)
        elif isinstance(raised, asyncio.CancelledError):
            self.end.cancel()
        else:
            self.end.set_exception(raised)
