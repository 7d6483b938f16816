"""The event loop of the process: results, errors, and interruption."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hostopt.transport import event_loop


def test_run_returns_the_result() -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    assert event_loop.run(work()) == "hostopt-loop-0"


def test_run_raises_the_error() -> None:
    async def fail() -> None:
        raise ValueError("no more flour")

    with pytest.raises(ValueError, match="no more flour"):
        event_loop.run(fail())


def test_start_does_not_wait() -> None:
    started, may_end = threading.Event(), threading.Event()

    async def work() -> int:
        started.set()
        while not may_end.is_set():
            await asyncio.sleep(0.001)
        return 7

    future = event_loop.start(work())
    assert started.wait(30)
    assert not future.done()
    may_end.set()
    assert future.result(30) == 7


def test_the_event_loop_refuses_to_wait_for_itself() -> None:
    async def waits() -> None:
        event_loop.run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="cannot wait for the loop"):
        event_loop.run(waits())
