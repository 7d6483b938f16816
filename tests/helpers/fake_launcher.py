"""The launcher with simulated tasks, clock and signals: no processes and no real waiting.

The launcher runs in a thread, which stops whenever the launcher would wait. Then it is the test's
turn: it ends tasks, advances the clock or sends signals, and resumes the launcher. Only one of the
two threads runs at any time.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Callable

import pytest
from launcher import launched

from hostopt.launch import launcher, task_group, task_process
from hostopt.launch.engine import LocalEngine

TURN_S = 60.0  # limit for a launcher that hangs


class FakeTask:
    """Replaces `TaskProcess`: a task that ends when the test ends it."""

    def __init__(self, world: World, task: tuple[str, int], environment: dict[str, str]) -> None:
        self.task = task
        self.environment = environment
        self.lifeline = object()
        self.report = ""
        self.group: int | None = None
        self.code: int | None = None
        self.forced = False
        self.closed = False
        self.exit_code: int | None = None  # set when the task ends, before the launcher sees it
        self.received: list[tuple[float, int]] = []
        self.messages: collections.deque[str] = collections.deque(["group"])
        self._world = world

    @property
    def name(self) -> str:
        return "{}:{}".format(*self.task)

    def end(self, code: int) -> None:
        """Ends the task with an exit code."""
        self.exit_code = code
        self.messages.append("end")

    def signal(self, signum: int) -> None:
        self.received.append((self._world.now_s, signum))
        if signum == signal.SIGKILL and self.exit_code is None:
            self.end(128 + signum)

    def has_ended(self) -> bool:
        if self.messages.popleft() == "group":
            self.group = 1
            return False
        self.code = self.exit_code
        self._world.on_end(self)
        return True

    def close(self) -> None:
        self.closed = True


class FakeSelector:
    """Hands over to the test instead of waiting."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.registered: dict[Any, Callable[[], None]] = {}

    def __enter__(self) -> FakeSelector:
        return self

    def __exit__(self, *error: object) -> None:
        self.registered.clear()

    def register(self, fileobj: Any, events: int, data: Callable[[], None]) -> None:
        del events
        self.registered[fileobj] = data

    def unregister(self, fileobj: Any) -> None:
        del self.registered[fileobj]

    def select(self, timeout_s: float | None = None) -> list[tuple[Any, int]]:
        return self._world.wait(timeout_s)


class World:
    """One run of the launcher, with arguments of `launched`.

    Args:
      on_start: called with each started task; may raise OSError.
      on_end: called with each task when the launcher sees its end.
      on_signal: called with each signal before the launcher forwards it.
      on_wait: called when the launcher has nothing left to do but wait.
    """

    def __init__(
        self,
        on_start: Callable[[FakeTask], None],
        on_end: Callable[[FakeTask], None],
        on_signal: Callable[[int], None],
        on_wait: Callable[[], None],
        **arguments: int,
    ) -> None:
        self.on_end = on_end
        self.now_s = 1000.0
        self.wait_until_s: float | None = None  # None if it waits for events only
        self.code: int | None = None
        self.error: BaseException | None = None
        self.tasks: list[FakeTask] = []
        self.selector = FakeSelector(self)
        self._on_start = on_start
        self._on_signal = on_signal
        self._on_wait = on_wait
        self._signals: list[int] = []
        self._wake_fd, self._writer = os.pipe()
        self._order: Callable[[list[Any]], list[Any]] = list
        self._launcher_turn, self._test_turn = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(arguments,), daemon=True)
        self._is_closing = False

    @property
    def running(self) -> list[FakeTask]:
        """Tasks that have not ended."""
        return [task for task in self.tasks if task.exit_code is None]

    @property
    def has_events(self) -> bool:
        """True if there are events for the launcher."""
        return bool(self._signals) or any(task.messages for task in self._watched())

    def begin(self, patch: pytest.MonkeyPatch) -> None:
        """Runs the launcher until it waits for the first time."""
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        selectors = SimpleNamespace(DefaultSelector=lambda: self.selector, EVENT_READ=1)
        for module in (launcher, task_group):
            patch.setattr(module, "time", clock)
        patch.setattr(launcher, "selectors", selectors)
        patch.setattr(launcher, "_signals_caught", lambda: contextlib.nullcontext(self._wake_fd))
        patch.setattr(LocalEngine, "start", lambda *arguments: (arguments[-1], None))
        patch.setattr(task_process, "attend", self._attend)
        self._thread.start()
        self._wait_for_turn()

    def signal(self, signum: int) -> None:
        """Sends a signal to the launcher."""
        self._signals.append(signum)
        os.write(self._writer, bytes([signum]))

    def resume(self, order: Callable[[list[Any]], list[Any]] = list) -> None:
        """Runs the launcher until it waits again; `order` orders what it sees at the same time."""
        self._order = order
        self._launcher_turn.release()
        self._wait_for_turn()

    def close(self) -> None:
        """Ends the thread of the launcher."""
        self._is_closing = True
        self._launcher_turn.release()
        self._thread.join(TURN_S)
        assert not self._thread.is_alive()
        os.close(self._wake_fd)
        os.close(self._writer)

    def wait(self, timeout_s: float | None) -> list[tuple[Any, int]]:
        """Implements `FakeSelector.select`."""
        self._on_wait()
        self.wait_until_s = None if timeout_s is None else self.now_s + timeout_s
        self._test_turn.release()
        assert self._launcher_turn.acquire(timeout=TURN_S)
        if self._is_closing:
            raise SystemExit
        ready = [(task.lifeline, None) for task in self._watched() if task.messages]
        if self._signals:
            ready.append((self._wake_fd, self._signals))
        return [
            (SimpleNamespace(data=self._event(fileobj, signals)), 1)
            for fileobj, signals in self._order(ready)
        ]

    def _event(self, fileobj: Any, signals: list[int] | None) -> Callable[[], None]:
        def handle() -> None:
            if signals is not None:
                for signum in signals:
                    self._on_signal(signum)
                self._signals = []
            self.selector.registered[fileobj]()

        return handle

    def _watched(self) -> Iterator[FakeTask]:
        return (task for task in self.tasks if task.lifeline in self.selector.registered)

    def _attend(self, task: tuple[str, int], settings: dict[str, str], *_: object) -> FakeTask:
        self.tasks.append(FakeTask(self, task, settings))
        self._on_start(self.tasks[-1])
        return self.tasks[-1]

    def _wait_for_turn(self) -> None:
        assert self._test_turn.acquire(timeout=TURN_S), "the launcher neither waits nor ends"
        if self.error is not None:
            raise self.error

    def _run(self, arguments: dict[str, Any]) -> None:
        try:
            self.code = launched(["true"], **arguments)
            self._on_wait()
        except SystemExit:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._test_turn.release()


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Disables logging."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
