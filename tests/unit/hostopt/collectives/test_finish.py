"""The barrier at the end: ranks that have finished, and ranks that still wait for them."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import numpy as np
import pytest
from rings import Spawn, failure

from hostopt.collectives.communicator import Communicator
from hostopt.errors import (
    HostOptError,
    PeerLostError,
)
from hostopt.transport import event_loop
from hostopt.transport.message import Tag


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_after_finish(spawn: Spawn, size: int) -> None:
    def work(communicator: Communicator) -> None:
        for _ in range(10):
            local = np.array([communicator.rank + 1.0])
            assert communicator.all_reduce(local)[0] == size * (size + 1) / 2
            communicator.finish()

    spawn(size, work)


@pytest.mark.parametrize(
    ("size", "early"), [(size, early) for size in (2, 3, 4, 5) for early in range(size)]
)
@pytest.mark.parametrize("length", [9, 100_000])
def test_a_rank_that_waits_for_one_that_has_finished(
    spawn: Spawn, size: int, early: int, length: int
) -> None:
    def work(communicator: Communicator) -> HostOptError:
        if communicator.rank == early:
            communicator.barrier()
            return failure(communicator, communicator.finish)

        def continue_() -> None:
            communicator.barrier()  # others may fail before it has ended on this rank
            communicator.all_reduce(np.ones(length), name="step 7")

        return failure(communicator, continue_)

    errors = spawn(size, work)
    # who receives from the early rank finds it, and the others hear it from there
    for error in errors:
        assert isinstance(error, PeerLostError)
        assert error.rank == early
        assert f"rank {early}" in str(error)
        assert "finished" in str(error)
        assert re.search(r"rank [0-9] waited for .*step 7", str(error))


def test_communicators_that_finish_one_after_the_other(spawn_inproc: Spawn) -> None:
    """Rank 1 reads messages of the first finish only once the second's have arrived."""
    has_sent_both = threading.Event()

    def work(communicator: Communicator) -> None:
        transport = communicator.transport
        first, second = communicator.duplicate("first"), communicator.duplicate("second")
        send, recv = transport.send, transport.recv

        async def send_and_say(*message: Any) -> None:
            await send(*message)
            if message[3] != "first" and not message[1].is_finish_marker:
                has_sent_both.set()

        async def recv_late(*arguments: Any) -> memoryview:
            assert await asyncio.get_running_loop().run_in_executor(None, has_sent_both.wait, 30)
            return await recv(*arguments)

        if communicator.rank == 0:
            first.finish("first")
            transport.send = send_and_say  # type: ignore[method-assign]
        else:
            transport.recv = recv_late  # type: ignore[method-assign]
            first.finish("first")
        second.finish("second")

    spawn_inproc(2, work)


def test_a_rank_that_finishes_twice_while_the_other_continues(spawn_inproc: Spawn) -> None:
    said_again = threading.Event()

    def work(communicator: Communicator) -> HostOptError:
        mailbox = communicator.transport.mailbox
        if communicator.rank == 0:
            send = communicator.transport.send

            async def send_and_say(*message: Any) -> None:
                await send(*message)
                said_again.set()

            communicator.finish()
            communicator.transport.send = send_and_say  # type: ignore[method-assign]
            return failure(communicator, communicator.finish)
        resume = mailbox.resume

        def late_resume(*step: int) -> None:
            assert said_again.wait(30)
            resume(*step)

        mailbox.resume = late_resume  # type: ignore[method-assign]
        communicator.finish()
        return failure(communicator, lambda: communicator.all_reduce(np.ones(9)))

    for error in spawn_inproc(2, work):
        assert isinstance(error, PeerLostError)
        assert error.rank == 0


def test_a_marker_that_arrives_after_the_end(spawn_inproc: Spawn) -> None:
    together = threading.Barrier(3)

    def work(communicator: Communicator) -> float:
        send = communicator.transport.send
        late: list[Any] = []

        async def hold_the_marker(peer: int, tag: Tag, *rest: Any) -> None:
            if tag.is_finish_marker:
                late.append((peer, tag, *rest))
            else:
                await send(peer, tag, *rest)

        communicator.transport.send = hold_the_marker  # type: ignore[method-assign]
        communicator.finish()
        for message in late:
            event_loop.run(send(*message))
        together.wait(30)
        mailbox, previous = communicator.transport.mailbox, (communicator.rank - 1) % 3
        with mailbox.waiting(previous, Tag(0, 1), "new work") as check:
            left_s = check()
        together.wait(30)  # a rank that left would be another reason to give up
        return left_s

    assert all(left_s > 0 for left_s in spawn_inproc(3, work))
