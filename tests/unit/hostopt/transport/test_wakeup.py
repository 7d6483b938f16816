"""Coroutines that run at once: they continue in the call that wakes them, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from typing import Any

import pytest
from sockets import run

from hostopt.transport.wakeup import Wakeup, at_once


def test_a_coroutine_continues_within_the_call_that_wakes_it() -> None:
    async def work() -> list[Any]:
        events: list[Any] = []
        wakeups: list[Wakeup] = []

        async def wait() -> str:
            for number in range(3):
                wakeups.append(Wakeup())
                await wakeups[-1]
                events.append(number)
            return "the result"

        waiting = asyncio.ensure_future(at_once(wait))
        await asyncio.sleep(0)
        for number in range(3):
            events.append(wakeups[-1].wake())
            assert wakeups[number].wake()  # again: this wait has ended
        return [*events, await waiting]

    assert run(work()) == [0, True, 1, True, 2, True, "the result"]


def test_a_task_continues_soon() -> None:
    async def work() -> None:
        wakeups: list[Wakeup] = []

        async def wait() -> None:
            wakeups.append(Wakeup())
            await wakeups[0]

        waiting = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        assert not wakeups[0].wake()
        assert not wakeups[0].wake()
        assert not waiting.done()
        await waiting

    run(work())


def test_a_coroutine_that_wakes_another_one_goes_first() -> None:
    async def work() -> list[str]:
        events: list[str] = []
        first: list[Wakeup] = []

        async def wait() -> None:
            first.append(Wakeup())
            await first[0]
            events.append("woken")

        async def wake() -> None:
            await asyncio.sleep(0)
            assert not first[0].wake()
            events.append("has woken")

        await asyncio.gather(at_once(wait), at_once(wake))
        return events

    assert run(work()) == ["has woken", "woken"]


@pytest.mark.parametrize("directly", [True, False])
def test_another_thread_may_wake_a_coroutine(directly: bool) -> None:
    async def wait() -> int:
        wakeup = Wakeup()
        threading.Thread(target=wakeup.wake).start()
        await wakeup
        return threading.get_ident()

    async def work() -> None:
        ends_in = await (at_once(wait) if directly else wait())
        assert ends_in == threading.get_ident()

    run(work())


def test_futures_tasks_and_rounds_of_the_loop_may_be_awaited() -> None:
    async def work() -> list[int]:
        async def double(number: int) -> int:
            await asyncio.sleep(0.001)
            return 2 * number

        async def wait() -> list[int]:
            lock = asyncio.Lock()
            await asyncio.sleep(0)
            async with lock:
                task = asyncio.ensure_future(double(1))
                await asyncio.wait({task})
            return [task.result(), *await asyncio.gather(double(2), double(3))]

        return await at_once(wait)

    assert run(work()) == [2, 4, 6]


def test_errors_arrive_at_the_caller() -> None:
    async def fail(waits: bool) -> None:
        if waits:
            await asyncio.sleep(0)
        raise KeyError("mine")

    for waits in (False, True):
        with pytest.raises(KeyError, match="mine"):
            run(at_once(fail, waits))


def test_the_error_of_a_future_arrives_in_the_coroutine() -> None:
    async def wait() -> str:
        try:
            await asyncio.wait_for(asyncio.get_running_loop().create_future(), 0.001)
        except asyncio.TimeoutError:
            return "too late"
        return "in time"

    async def work() -> str:
        async def task() -> str:
            return await asyncio.ensure_future(wait())

        return await at_once(task)

    assert run(work()) == "too late"


def test_a_cancelled_caller_waits_until_the_coroutine_has_ended() -> None:
    async def work() -> list[str]:
        events: list[str] = []
        wakeups: list[Wakeup] = []

        async def wait() -> None:
            try:
                wakeups.append(Wakeup())
                await wakeups[0]
            finally:
                events.append("cancelled")
                await asyncio.sleep(0.001)
                events.append("ended")

        waiting = asyncio.ensure_future(at_once(wait))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        wakeups[0].wake()  # nobody waits any more
        return events

    assert run(work()) == ["cancelled", "ended"]


def test_a_coroutine_may_refuse_to_be_cancelled() -> None:
    async def work() -> str:
        async def wait() -> str:
            try:
                await Wakeup()
            except asyncio.CancelledError:
                await asyncio.sleep(0)
            return "the result"

        waiting = asyncio.ensure_future(at_once(wait))
        await asyncio.sleep(0)
        waiting.cancel()
        return await waiting

    assert run(work()) == "the result"


@pytest.mark.parametrize("error", [None, KeyError("mine")])
def test_a_coroutine_may_end_in_the_round_in_which_its_caller_is_cancelled(
    error: Exception | None,
) -> None:
    async def work() -> None:
        wakeups: list[Wakeup] = []

        async def wait() -> None:
            wakeups.append(Wakeup())
            await wakeups[0]
            if error is not None:
                raise error

        waiting = asyncio.ensure_future(at_once(wait))
        await asyncio.sleep(0)
        waiting.cancel()
        assert wakeups[0].wake()
        await asyncio.wait({waiting})
        assert waiting.cancelled()

    run(work())


def test_a_cancelled_caller_cancels_what_the_coroutine_awaits() -> None:
    async def work() -> list[str]:
        events: list[str] = []

        async def child() -> None:
            try:
                await Wakeup()
            except asyncio.CancelledError:
                events.append("cancelled")
                raise

        async def wait() -> None:
            await asyncio.gather(child(), child())

        waiting = asyncio.ensure_future(at_once(wait))
        while not asyncio.all_tasks() - {asyncio.current_task(), waiting}:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        return [*events]  # the end of the loop cancels them, too

    assert run(work()) == ["cancelled", "cancelled"]


class Memory:
    """Stands for an array, which a test finds again by a weak reference."""


@pytest.mark.parametrize("fails", [False, True])
def test_the_memory_of_a_coroutine_is_free_once_it_has_ended(fails: bool) -> None:
    async def work() -> weakref.ref[Memory]:
        async def wait() -> Memory:
            memory = Memory()
            references.append(weakref.ref(memory))
            asyncio.get_running_loop().call_soon(wakeup_of_wait().wake)
            await wakeups[0]
            if fails:
                raise KeyError("mine")
            return memory

        def wakeup_of_wait() -> Wakeup:
            wakeups.append(Wakeup())
            return wakeups[0]

        references: list[weakref.ref[Memory]] = []
        wakeups: list[Wakeup] = []
        with contextlib.suppress(KeyError):
            await at_once(wait)
        wakeups.clear()
        return references[0]

    gc.disable()
    try:
        assert run(work())() is None
    finally:
        gc.enable()
