"""The event loop of the process: results, errors, and interruption."""

from __future__ import annotations

import asyncio
import gc
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


# --- several loops ----------------------------------------------------------------------------


def test_coroutines_run_on_the_loops_of_their_numbers() -> None:
    async def work(number: int) -> tuple[int, str]:
        assert event_loop.current() == number
        return number, threading.current_thread().name

    results = event_loop.run(event_loop.run_on_loops({n: work(n) for n in (0, 2, 1)}))
    assert results == [(n, f"hostopt-loop-{n}") for n in (0, 2, 1)]


@pytest.mark.parametrize("failing", [0, 1])
def test_nothing_runs_after_an_error_on_one_of_the_loops(failing: int) -> None:
    has_begun, may_end, ended = threading.Event(), threading.Event(), []

    async def fail() -> None:
        await asyncio.get_running_loop().run_in_executor(None, has_begun.wait, 30)
        threading.Timer(0.05, may_end.set).start()
        raise ValueError("no more flour")

    async def work() -> None:
        has_begun.set()
        assert may_end.wait(30)  # as an operation of NumPy, which nothing can interrupt
        ended.append("work")
        await asyncio.sleep(30)
        ended.append("sleep")

    coroutines = {failing: fail(), 1 - failing: work()}
    with pytest.raises(ValueError, match="no more flour"):
        event_loop.run(event_loop.run_on_loops(coroutines))
    assert ended == ["work"]


@pytest.mark.parametrize("failing", [1, 2])
def test_the_first_of_several_errors_is_raised(
    caplog: pytest.LogCaptureFixture, failing: int
) -> None:
    async def fail() -> None:
        raise ValueError("no more flour")

    async def fail_at_its_end() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            raise ValueError("no more salt")

    works = sorted({failing: fail, 3 - failing: fail_at_its_end}.items())
    with pytest.raises(ValueError, match="no more flour"):
        event_loop.run(event_loop.run_on_loops({number: work() for number, work in works}))
    gc.collect()
    event_loop.run(asyncio.sleep(0))
    assert caplog.records == []  # asyncio logs errors that nobody has retrieved


def test_the_end_of_the_caller_ends_all() -> None:
    begun, ended = threading.Barrier(3), []

    async def work(number: int) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, begun.wait, 30)
            await asyncio.sleep(30)
        finally:
            ended.append(number)

    async def cancel() -> None:
        running = asyncio.ensure_future(event_loop.run_on_loops({1: work(1), 2: work(2)}))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, 30)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert sorted(ended) == [1, 2]

    event_loop.run(cancel())
